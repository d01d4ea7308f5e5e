"""A small job in a store that tests advance transaction by transaction, as controllers do."""

from __future__ import annotations

import itertools

from gcore.data.order import shard_lengths
from gcore.ledger import chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import EndedRef, Offer, OfferedGroup
from gcore.ledger.records.job import EnginePlace, JobPhase, JobRecord, JobStatus, Plan, RankPlace
from gcore.ledger.selection import SealPart, SealStep, StreamRules, begun_groups, refs_in_order, sealed_group
from gcore.ledger.transactions import OpenSlots, Transaction, TransactionExecutor, TxnOutcome, TxnReport
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch, WatchEvent
from gcore.types import PromptRef, Version

SHARDS = 2
RULES = StreamRules(shard_lengths(40, SHARDS), window=8, quota=2, steps=9)
NUMBERS = itertools.count(1)


class StoredJob:
    """One controller's actions on the job `uid`. It reads the store on `look`, and acts on its last view."""

    def __init__(self, store: Store, uid: str, name: str) -> None:
        self.store = store
        self.keys = JobKeys(uid)
        self.ledger = TransactionExecutor(store, self.keys)
        self.name = name
        self.mirror = JobMirror(self.keys)

    async def look(self) -> JobMirror:
        """All records as they are now."""
        listing = await self.store.list(self.keys.prefix)
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        self.mirror = JobMirror(self.keys).fold(batch)
        return self.mirror

    async def create(self) -> None:
        """The job, running, at step 0."""
        job = JobRecord(uid=self.keys.uid, name=self.keys.uid, spec={}, run_dir="/r", created=0.0, prompts=40)
        await self.won(transactions.create(self.keys, job, JobStatus(phase=JobPhase.PENDING), 0))
        status = (await self.look()).status
        assert status is not None
        advance = chain.base_entry(SHARDS, "w0", self.writer())
        running = JobStatus(phase=JobPhase.RUNNING)
        await self.won(transactions.start(self.keys, status, advance, self.plan("w0", 1), running))
        await self.look()

    def writer(self) -> ChainWriter:
        """With a name of its own each time."""
        return ChainWriter(self.name, f"{self.name}-{next(NUMBERS)}")

    def plan(self, world: str, generation: int) -> Plan:
        """Of two ranks and two engines."""
        return Plan(
            generation=generation,
            world=world,
            ranks=tuple(RankPlace(rank=i, node=f"n{i}", slot="cpu:0") for i in range(2)),
            engines=tuple(EnginePlace(node=f"n{i}", slot="cpu:0") for i in range(2)),
        )

    @property
    def slots(self) -> OpenSlots:
        """Head and the open slots as they were seen last."""
        slots = self.mirror.open_slots
        assert slots is not None
        return slots

    def due(self) -> list[PromptRef]:
        """A quota of what comes next."""
        return list(itertools.islice(refs_in_order(RULES, self.slots.head.record, self.slots.seals), RULES.quota))

    def group(self, ref: PromptRef) -> OfferedGroup:
        """A finished one, of head's version."""
        version = self.slots.head.record.version
        return OfferedGroup(
            ref=ref, digest=f"{self.name} {ref}", prompt_tokens=3, response_tokens=(2, 2), versions=(version,)
        )

    def sealing(self) -> Transaction:
        """The next batch, of this controller's groups."""
        assert self.mirror.plan is not None
        kept = begun_groups(self.slots.head.record, self.slots.seals)
        chosen = SealStep((*kept, *(sealed_group(self.group(ref), self.name) for ref in self.due())), ())
        return transactions.seal(self.keys, self.slots, chosen, self.mirror.plan.record, 1, self.name)

    def parting(self) -> Transaction:
        """One more part of it, of one group."""
        assert self.mirror.plan is not None
        kept = begun_groups(self.slots.head.record, self.slots.seals)
        chosen = SealPart((*kept, sealed_group(self.group(self.due()[0]), self.name)))
        return transactions.seal(self.keys, self.slots, chosen, self.mirror.plan.record, 1, self.name)

    def committing(self, *, keep_cursors: bool = False) -> Transaction:
        """Of the slot that was seen, which must be READY."""
        return transactions.commit(
            self.keys, self.slots, RULES.shape, self.writer(), keep_cursors=keep_cursors, stats={}
        )

    def accounting(self) -> Transaction:
        """The next ref has failed."""
        outcomes = (EndedRef(ref=self.due()[0], kind="failed", reason="why"),)
        advance = chain.account_entry(self.slots.head.record, outcomes, RULES.shape, self.writer())
        return transactions.account(self.keys, self.slots, advance)

    def rolling_back(self, *, slots_as_seen: bool = False) -> Transaction:
        """To the base."""
        mirror, head = self.mirror, self.slots.head.record
        assert mirror.checkpoints is not None
        assert mirror.plan is not None
        base = mirror.log[0].record
        world = f"w{head.lineage + 1}-{self.name}"
        advance = chain.rollback_entry(head, base, world, self.writer(), "why")
        plan = self.plan(world, mirror.plan.record.generation + 1)
        return transactions.rollback(
            self.keys, self.slots, mirror.checkpoints, advance, mirror.plan, plan, slots_as_seen=slots_as_seen
        )

    def offering(self, lease: int) -> Transaction:
        """What it holds, under its lease."""
        old = self.mirror.offers.get(self.name)
        offer = Offer(incarnation=self.name, groups=tuple(self.group(ref) for ref in self.due()))
        return transactions.offer(self.keys, old, offer, lease)

    async def run(self, txn: Transaction) -> TxnReport:
        """Make it, whatever comes of it."""
        return await self.ledger.run(txn)

    async def won(self, txn: Transaction) -> None:
        """Make it, and see what it did."""
        report = await self.run(txn)
        assert report.outcome is TxnOutcome.WON, (txn.kind, report)
        await self.look()

    async def step(self, *, keep_cursors: bool = False) -> None:
        """One whole step."""
        await self.won(self.sealing())
        step = self.slots.head.record.step + 1
        await self.won(transactions.ready(self.keys, self.slots, step))
        await self.won(self.committing(keep_cursors=keep_cursors))

    @property
    def version(self) -> Version:
        """Head's."""
        return self.slots.head.record.version
