"""The step protocol under random faults: the production rules and transactions over the store in memory.

Controllers act on views that are arbitrarily old, crash, come back as new incarnations, and lose requests and replies;
train worlds die, or are wrongly believed dead, and go on as zombies. After every event the audit must be clean; once the
faults stop, the job must get on. Nothing here decides, seals or commits by rules of its own.

With a filter rate up to nine of ten prompts are filtered; a job by epochs ends with them, and one whose step comes to
its limit does what its rules say. Each committed step must have its quota, or a reason not to.

With a curriculum a ref stands for a prompt only together with the record its epoch began with; the simulation notes that
record with whatever is produced, and after every event all that ended in one epoch must have ended under one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from controllers.rules.decide import shard_assignment
from gcore.data.order import Cursors, shard_lengths
from gcore.ledger import chain, transactions
from gcore.ledger import staleness as carried
from gcore.ledger import statistics as epochs
from gcore.ledger.audit.audit import AuditInputs, audit_records
from gcore.ledger.audit.receipts import Receipt
from gcore.ledger.balance import balance_samples, next_part, part_digests
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import (
    Checkpoint,
    EndedRef,
    Head,
    InFlightRef,
    LogEntry,
    Offer,
    OfferedGroup,
    Seal,
    SealState,
)
from gcore.ledger.records.job import EnginePlace, JobPhase, JobStatus, Plan, RankPlace
from gcore.ledger.selection import (
    AwaitGroups,
    CloseStep,
    DataExhausted,
    OffersView,
    SealStep,
    StreamRules,
    choose_seal,
    due_refs,
    is_acceptable,
    is_ancestor,
    is_over,
    last_position,
    refuse_seal,
    resumable_checkpoints,
)
from gcore.ledger.statistics import shortage_reason
from gcore.ledger.transactions import OpenSlots, Transaction, TransactionExecutor, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import KeyValue, Put, WatchBatch, WatchEvent
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore
from gcore.types import PromptRef, Token, Version

KEYS = JobKeys("u")
RULES = StreamRules(shard_lengths(17, 4), window=4, quota=3)
SMALL = StreamRules(shard_lengths(5, 4), window=4, quota=3)
"""Few prompts: many epochs, several of them in one window."""
RANKS = 2


class BadNetwork:
    """Loses requests and replies, some of which arrive later."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.bad = True

    async def request(self, call: Call) -> Fate:
        if not self.bad or call.kind in ("get", "list") or self._chance.random() > 0.15:
            return Fate.DELIVER
        return self._chance.choice([Fate.LOSE_REQUEST, Fate.LOSE_REPLY, Fate.DELIVER_LATE])

    async def reply(self, call: Call) -> None:
        return None


@dataclass
class World:
    """A train world: which token it was fed whole, what it applied. Zombies live on."""

    name: str
    lineage: int
    done: int
    held: Token | None = None
    applied: Token | None = None
    alive: bool = True
    begun: tuple[tuple[str, ...], ...] = ()
    """The parts of the step after `done` that it has begun."""


@dataclass
class Controller:
    """An incarnation with its own, old, view and its groups."""

    name: str
    mirror: JobMirror
    lease: int
    groups: dict[PromptRef, OfferedGroup] = field(default_factory=dict)
    outcomes: dict[PromptRef, EndedRef] = field(default_factory=dict)
    flights: dict[PromptRef, Version] = field(default_factory=dict)
    """What goes on from step to step, with the weights it was begun with; nothing at staleness 0."""


class Simulation:
    """One seeded run."""

    def __init__(
        self, seed: int, rules: StreamRules = RULES, *, curriculum: bool = False, filter_rate: float = 0.2
    ) -> None:
        self.rules = rules
        self.curriculum = curriculum
        self.filter_rate = filter_rate
        self.issued: dict[tuple[PromptRef, str, Version], Version] = {}
        """The record under which each ref of a later epoch was produced, by whom, with which weights."""
        self.begun = 0
        self.parts = 0
        """Parts that were sealed, or tried to be."""
        self.mixed = 0
        """Groups that several versions made."""
        self.chance = random.Random(seed)
        self.clock = FakeClock()
        self.cluster = MemoryCluster(self.clock)
        self.network = BadNetwork(self.chance)
        self.store = MemoryStore(self.cluster, network=self.network, timeout_s=0.0)
        self.ledger = TransactionExecutor(self.store, KEYS)
        self.worlds: dict[str, World] = {}
        self.receipts: list[Receipt] = []
        self.lives = 0
        self.history: list[str] = []
        self.controllers: list[Controller] = []
        self._fresh = JobMirror(KEYS)
        self._listed: dict[str, KeyValue] = {}

    def fresh(self) -> JobMirror:
        """The job as it stands in the store."""
        known, listing = self._fresh, self.cluster.listing(KEYS.prefix)
        if listing.revision == known.revision:
            return known
        new = [WatchEvent("put", kv) for kv in listing.kvs if kv.mod_revision > known.revision]
        gone = self._listed.keys() - {kv.key for kv in listing.kvs}
        events = (*new, *(WatchEvent("delete", self._listed[key]) for key in sorted(gone)))
        self._fresh = known.fold(WatchBatch(events, listing.revision))
        self._listed = {kv.key: kv for kv in listing.kvs}
        return self._fresh

    def start(self) -> None:
        """A running job and three controllers."""
        advance = chain.base_entry(len(self.rules.shape.lengths), "w0", ChainWriter("x", "n0"))
        self.cluster.transact((), (Put(KEYS.state, JobStatus(phase=JobPhase.PENDING).encode()),))
        status = self.fresh().status
        assert status is not None
        txn = transactions.start(KEYS, status, advance, self.plan("w0", 1), JobStatus(phase=JobPhase.RUNNING))
        assert self.cluster.transact(txn.compares, txn.writes).won
        self.worlds["w0"] = World("w0", 0, 0)
        for _ in range(3):
            self.join()

    def plan(self, world: str, generation: int) -> Plan:
        ranks = tuple(RankPlace(rank=i, node=f"n{i}", slot="cpu:0") for i in range(RANKS))
        engines = tuple(EnginePlace(node=f"n{i}", slot="cpu:0") for i in range(RANKS))
        return Plan(generation=generation, world=world, ranks=ranks, engines=engines)

    def join(self) -> None:
        self.lives += 1
        self.controllers.append(Controller(f"c{self.lives}", self.fresh(), self.cluster.grant(1000)))

    async def run(self, txn: Transaction, who: Controller) -> None:
        """One transaction, with whatever the network does to it."""
        report = await self.ledger.run(txn)
        self.history.append(f"{who.name} {txn.kind} {report.outcome}")
        self.check()

    def check(self) -> None:
        """The audit, after every event."""
        mirror = self.fresh()
        assert mirror.head is not None
        log = {seq: stored.record for seq, stored in self.full_log().items()}
        seals = [stored.record for stored in mirror.seals.values()]
        found = audit_records(self.rules, mirror.head.record, log, self.receipts, AuditInputs(seals=seals))
        assert found.clean, "\n".join([*self.history[-40:], *found.violations])
        if self.curriculum:
            self.check_epochs(mirror, log)

    @property
    def phase(self) -> JobPhase:
        """Whether the job still runs."""
        status = self.fresh().status
        assert status is not None
        return status.record.phase

    def check_quotas(self) -> None:
        """Along the chain, a step has its quota, or has used up its prompts, or there was no more in any window."""
        head, log = self.fresh().head, self.full_log()
        assert head is not None
        chained, seq = [], head.record.seq
        while (entry := log[seq].record).parent is not None:
            chained.append(entry)
            seq = entry.parent
        before, used = Cursors.start(len(self.rules.shape.lengths)), 0
        for entry in reversed(chained):
            after = before.union(self.rules.shape, (one.ref for one in entry.delta))
            used = len(entry.delta) + (used if entry.kind != "rollback" else 0)
            if entry.kind == "train":
                trained = sum(one.kind == "trained" for one in entry.delta)
                at_limit = trained > 0 and used == self.rules.limit and self.rules.on_limit != "fail"
                rest = self.exhausted(before, after) and (self.rules.on_limit != "fail" or self.is_rest(after))
                reason = trained == self.rules.quota or at_limit or rest
                assert reason, "\n".join([*self.history[-40:], f"step {entry.step}: {trained} of {used} prompts"])
                used = 0
            before = after

    def is_rest(self, after: Cursors) -> bool:
        """Whether nothing of the epochs is left `after`."""
        last = [last_position(self.rules, shard) for shard in range(len(after.shards))]
        return all(end is not None and cursor.low_water >= end for end, cursor in zip(last, after.shards, strict=True))

    def exhausted(self, before: Cursors, after: Cursors) -> bool:
        """Whether whatever stood in a window, up to the epochs' end, has its outcome `after`."""
        for shard, (old, new) in enumerate(zip(before.shards, after.shards, strict=True)):
            last = last_position(self.rules, shard)
            end = old.low_water + self.rules.window if last is None else min(old.low_water + self.rules.window, last)
            if not all(new.is_terminal(position) for position in range(old.low_water, end)):
                return False
        return True

    def check_epochs(self, mirror: JobMirror, log: dict[int, LogEntry]) -> None:
        """Along the chain, every epoch went by one record, and what is not forgotten is that one."""
        assert mirror.head is not None
        begun = epochs.valid_epochs(mirror.head.record, [stored.record for stored in mirror.epochs.values()])
        under: dict[int, set[Version]] = {}
        seq: int | None = mirror.head.record.seq
        while seq is not None:
            for ended in log[seq].delta:
                if ended.ref.data_epoch > 0:
                    (version,) = ended.versions
                    under.setdefault(ended.ref.data_epoch, set()).add(self.issued[ended.ref, ended.holder, version])
            seq = log[seq].parent
        for epoch, versions in under.items():
            now = {begun[epoch].version} if epoch in begun else versions
            assert versions == now, "\n".join(
                [*self.history[-40:], f"epoch {epoch} went by {versions}, it stands at {now}"]
            )

    def full_log(self) -> dict[int, Versioned[LogEntry]]:
        """Every entry, by number."""
        return {
            int(kv.key.removeprefix(KEYS.log_prefix)): Versioned(LogEntry.decode(kv.value), kv.mod_revision)
            for kv in self.cluster.listing(KEYS.log_prefix).kvs
        }

    async def act(self, who: Controller) -> None:
        """One random deed on one old view."""
        mirror = who.mirror
        slots = mirror.open_slots
        assert slots is not None
        if mirror.status is not None and mirror.status.record.phase.ended:
            return
        seal = slots.slots.get(slots.head.record.step + 1)
        deeds = ["produce", "offer", "assign", "register", "rollback"] + ["begin"] * (2 * self.curriculum)
        deeds += ["finish"] * (2 * (self.rules.staleness > 0))
        if seal is None or seal.record.state is SealState.OPEN:
            deeds += ["seal"] * 4
        elif seal.record.state in (SealState.SEALED, SealState.PARTIAL):
            deeds += ["feed", "ready", "ready", "reseal"]
        else:
            deeds += ["apply", "apply", "commit", "commit"]
        deeds += ["accumulate"] * (2 * (seal is not None and seal.record.ready_parts > 0))
        await getattr(self, self.chance.choice(deeds))(who, slots, seal.record if seal else None)

    def offered(self, who: Controller, head: Head) -> OffersView:
        return OffersView.collect(self.rules, head, [stored.record for stored in who.mirror.offers.values()])

    def due(self, who: Controller, slots: OpenSlots) -> tuple[PromptRef, ...]:
        head = slots.head.record
        rule = carried.due_refs if self.rules.staleness else due_refs
        return rule(self.rules, head, slots.seals, self.offered(who, head))

    async def finish(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """Some of what is in flight is finished, with whatever weights its engine has by now; some is given up."""
        version = slots.head.record.version
        for ref, begun in list(who.flights.items()):
            if self.chance.random() < 0.5:
                continue
            del who.flights[ref]
            if self.chance.random() < 0.9:
                versions = tuple(sorted({begun, version}))
                self.mixed += len(versions) > 1
                self.make(who, ref, versions)

    def make(self, who: Controller, ref: PromptRef, versions: tuple[Version, ...]) -> None:
        """A group of these weights, or that it is filtered."""
        if self.chance.random() < self.filter_rate:
            ended = EndedRef(ref=ref, kind="filtered", reason="constant", holder=who.name, versions=versions[-1:])
            who.outcomes[ref] = ended
        else:
            who.groups[ref] = OfferedGroup(
                ref=ref,
                digest=f"{who.name}:{ref}:{'-'.join(map(str, versions))}",
                prompt_tokens=2,
                response_tokens=(1, 2),
                versions=versions,
            )

    async def produce(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        head = slots.head.record
        begun = epochs.valid_epochs(head, [stored.record for stored in who.mirror.epochs.values()])
        for ref in self.due(who, slots):
            if ref in who.groups or ref in who.outcomes or ref in who.flights:
                continue
            if self.rules.part and self.chance.random() < 0.6:
                continue  # it takes longer
            if self.curriculum and ref.data_epoch > 0:
                if ref.data_epoch not in begun:
                    continue
                self.issued[ref, who.name, head.version] = begun[ref.data_epoch].version
            if self.rules.staleness:
                who.flights[ref] = head.version
            else:
                self.make(who, ref, (head.version,))

    async def begin(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """Fix the statistics of the epoch that is needed next, as this view has them."""
        head, mirror = slots.head, who.mirror
        offers = [stored.record for stored in mirror.offers.values()]
        wanted = due_refs(self.rules, head.record, slots.seals, OffersView.collect(self.rules, head.record, offers))
        begun = epochs.valid_epochs(head.record, [stored.record for stored in mirror.epochs.values()])
        epoch = epochs.needed_epoch(wanted, begun)
        assert mirror.checkpoints is not None
        if epoch is None:
            return
        record = epochs.make_epoch_record(head.record, epoch, begun)
        log = {seq: stored.record for seq, stored in mirror.log.items()}
        known = mirror.checkpoints.record.entries
        forgotten = epochs.superfluous_epochs(self.rules.shape, head.record, known, log, begun)
        txn = transactions.begin_epoch(KEYS, head, mirror.checkpoints, mirror.epochs.get(epoch), record, forgotten)
        self.begun += 1
        await self.run(txn, who)

    async def offer(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        record = Offer(
            incarnation=who.name,
            groups=tuple(who.groups.values()),
            outcomes=tuple(who.outcomes.values()),
            in_flight=tuple(InFlightRef(ref=ref, version=version) for ref, version in who.flights.items()),
        )
        await self.run(transactions.offer(KEYS, who.mirror.offers.get(who.name), record, who.lease), who)

    async def assign(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        old = who.mirror.assign
        new = shard_assignment([c.name for c in self.controllers], 4, old.record if old else None)
        await self.run(transactions.assign(KEYS, old, new), who)

    async def seal(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        head = slots.head.record
        rule = carried.choose_seal if self.rules.staleness else choose_seal
        chosen = rule(self.rules, head, slots.seals, self.offered(who, head))
        assert who.mirror.plan is not None
        if isinstance(chosen, SealStep) and refuse_seal(self.rules, head, slots.seals, chosen) is None:
            updates = 1 if self.rules.part else 2
            await self.run(transactions.seal(KEYS, slots, chosen, who.mirror.plan.record, updates, who.name), who)
        elif isinstance(chosen, AwaitGroups):
            part = next_part(self.rules, head, slots.seals, self.offered(who, head))
            if part is not None and refuse_seal(self.rules, head, slots.seals, part) is None:
                self.parts += 1
                await self.run(transactions.seal(KEYS, slots, part, who.mirror.plan.record, 1, who.name), who)
        elif isinstance(chosen, CloseStep):
            advance = chain.account_entry(head, chosen.outcomes, self.rules.shape, self.writer(who))
            await self.run(transactions.account(KEYS, slots, advance), who)
        elif isinstance(chosen, DataExhausted):
            assert who.mirror.status is not None
            why = shortage_reason(self.rules, head, chosen, [stored.record for stored in who.mirror.log.values()])
            failed = JobStatus(phase=JobPhase.FAILED, reason=why)
            await self.run(transactions.set_status(KEYS, who.mirror.status, failed, slots), who)

    async def reseal(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        assert seal is not None
        await self.run(transactions.reseal(KEYS, slots, seal.step, who.name), who)

    async def feed(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """All holders push; a dead holder's groups cannot be pushed."""
        assert seal is not None
        holders = {c.name: c for c in self.controllers}
        wanted = seal.groups[len(seal.kept) :]
        whole = all(g.holder in holders and g.ref in holders[g.holder].groups for g in wanted)
        world = self.worlds[seal.world]
        newer = world.held is None or world.held <= seal.token
        if whole and world.alive and newer and seal.step == world.done + 1 and seal.lineage == world.lineage:
            world.held = seal.token
            self.history.append(f"{who.name} feeds {seal.token} to {world.name}")

    async def ready(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        assert seal is not None
        if self.worlds[seal.world].held == seal.token:
            await self.run(transactions.ready(KEYS, slots, seal.step), who)

    async def apply(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """Any world that holds the token applies it, zombies too; once."""
        assert seal is not None
        world = self.worlds[seal.world]
        if world.alive and world.held == seal.token and world.applied != seal.token and world.done == seal.step - 1:
            layout = balance_samples(seal)
            assert part_digests(seal, len(seal.parts))[: len(world.begun)] == world.begun, "\n".join(self.history[-40:])
            for rank in range(RANKS):
                samples: dict[PromptRef, set[int]] = {}
                for slot in layout.of_rank(rank):
                    samples.setdefault(seal.groups[slot.group].ref, set()).add(slot.sample)
                parts = {ref: frozenset(indexes) for ref, indexes in samples.items()}
                self.receipts.append(Receipt(seal.token, world.name, rank, parts))
            world.applied, world.done, world.begun = seal.token, seal.step, ()
            self.history.append(f"{world.name} applies {seal.token}")

    async def accumulate(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """Every world, zombies too, accumulates the READY parts of its step. A begun part never changes."""
        assert seal is not None
        world = self.worlds[seal.world]
        if world.alive and world.done == seal.step - 1 and world.lineage == seal.lineage:
            stated = part_digests(seal, seal.ready_parts)
            common = min(len(stated), len(world.begun))
            assert stated[:common] == world.begun[:common], "\n".join(self.history[-40:])
            world.begun = max(stated, world.begun, key=len)
            self.history.append(f"{world.name} has {len(world.begun)} parts of step {seal.step}")

    async def commit(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        assert seal is not None
        if self.worlds[seal.world].applied == seal.token:
            keep = seal.last or seal.step % 2 == 0
            txn = transactions.commit(KEYS, slots, self.rules.shape, self.writer(who), keep_cursors=keep, stats={})
            await self.run(txn, who)

    async def register(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        head, known = slots.head, who.mirror.checkpoints
        entry = who.mirror.log.get(head.record.seq)
        assert known is not None
        if entry is None or entry.record.kind != "train" or entry.record.cursors is None:
            return
        if any(c.seq == head.record.seq for c in known.record.entries):
            return
        checkpoint = Checkpoint(lineage=head.record.lineage, step=head.record.step, seq=head.record.seq, file="c")
        await self.run(transactions.register(KEYS, head, known, entry, checkpoint), who)

    async def rollback(self, who: Controller, slots: OpenSlots, seal: Seal | None) -> None:
        """The world died, or is only believed to have."""
        head, mirror = slots.head.record, who.mirror
        world = self.worlds[head.world]
        if world.alive and self.network.bad and self.chance.random() < 0.1:
            world.alive = self.chance.random() < 0.5
        elif world.alive:
            return
        assert mirror.checkpoints is not None
        assert mirror.plan is not None
        target = resumable_checkpoints(head, mirror.checkpoints.record.entries)[0]
        entry = self.full_log()[target.seq].record
        name = f"w{len(self.worlds)}"
        advance = chain.rollback_entry(head, entry, name, self.writer(who), "died")
        self.worlds[name] = World(name, advance.head.lineage, target.step)
        plan = self.plan(name, mirror.plan.record.generation + 1)
        await self.run(transactions.rollback(KEYS, slots, mirror.checkpoints, advance, mirror.plan, plan), who)

    def writer(self, who: Controller) -> ChainWriter:
        return ChainWriter(who.name, f"{self.chance.random()}")

    async def faulty(self, events: int) -> None:
        """Views grow old, controllers die and come, late requests arrive."""
        for _ in range(events):
            what = self.chance.random()
            who = self.chance.choice(self.controllers)
            if what < 0.45:
                who.mirror = self.fresh()
                self.prune(who)
            elif what < 0.47:
                self.controllers.remove(who)
                self.cluster.end_lease(who.lease)
                self.history.append(f"{who.name} dies")
                self.join()
            elif what < 0.50:
                self.cluster.deliver_late(1)
                self.check()
            else:
                await self.act(who)

    def prune(self, who: Controller) -> None:
        """What a change of head makes useless is dropped (rule 16)."""
        assert who.mirror.head is not None
        head = who.mirror.head.record
        for ref, group in list(who.groups.items()):
            gone = head.cursors.is_terminal(self.rules.shape, ref)
            if gone or not is_acceptable(head, head.step + 1, group.versions, self.rules.staleness):
                del who.groups[ref]
        for ref, version in list(who.flights.items()):
            gone = head.cursors.is_terminal(self.rules.shape, ref)
            if gone or not is_acceptable(head, head.step + 1, (version,), self.rules.staleness):
                del who.flights[ref]
        for ref, ended in list(who.outcomes.items()):
            gone = head.cursors.is_terminal(self.rules.shape, ref)
            if gone or not all(is_ancestor(head, version) for version in ended.versions):
                del who.outcomes[ref]

    async def calm(self, target: int | None = None) -> None:
        """Faults have stopped: everybody sees what is, does what is to be done, and gives up what cannot come.

        Until step `target` is committed; without one, until the job is over or has failed.
        """
        self.network.bad = False
        self.cluster.deliver_late()
        for _ in range(4000):
            head = self.fresh().head
            assert head is not None
            if self.phase.ended or (target is None and is_over(self.rules, head.record)):
                return
            if target is not None and head.record.step >= target:
                return
            who = self.chance.choice(self.controllers)
            who.mirror = self.fresh()
            self.prune(who)
            await self.act(who)
        raise AssertionError("stuck:\n" + "\n".join(self.history[-60:]))
