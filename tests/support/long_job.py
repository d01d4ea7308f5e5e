"""One job for very many steps over the store in memory: production's transactions, decisions and executors.

Controllers come and go, the world is lost now and then, evaluations are started and abandoned, plug-ins fail, data epochs begin under a
curriculum, peers agree, and the housekeeping and sweeping rules are executed a few steps late. Nothing is
generated or trained: groups have lengths only. The test measures the store's size regularly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from recorded_job import hands_of

from controllers.job.executor import apply_action
from controllers.rules.actions import Intent
from controllers.rules.retention import (
    archive_evaluations,
    begin_epochs,
    prune_log,
    register_and_forget_checkpoints,
    sweep_old_worlds,
)
from controllers.rules.view import JobView, SavedCheckpoint
from controllers.telemetry.notices import PluginErrorLog
from gcore.config import JobSpec, new_spec
from gcore.ledger import chain, collectives, evaluation, transactions
from gcore.ledger import statistics as epochs
from gcore.ledger.balance import balance_samples
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment, EndedRef, Member, Offer, OfferedGroup
from gcore.ledger.records.job import (
    EvalPart,
    Evaluation,
    JobPhase,
    JobRecord,
    JobStatus,
    Plan,
    RankClaim,
    RankPlace,
    Trouble,
)
from gcore.ledger.selection import CloseStep, OffersView, SealStep, choose_seal, refs_in_order, rules_of
from gcore.ledger.transactions import OpenSlots, Transaction
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.train.checkpoint.run_files import ReceiptWriter
from gcore.train.rank.feed import StepInput
from gcore.types import PromptRef, Version

UID = "0123456789ab"
KEYS = JobKeys(UID)
PROMPTS = 24
RANKS = 2
CONTROLLERS = 3
EVERY, KEEP, EVAL_EVERY = 20, 3, 50
LOST_EVERY = 997
"""Rounds between two worlds."""
LATE = 8
"""Steps between two looks of the housekeeping."""
TIDYING = (register_and_forget_checkpoints, prune_log, sweep_old_worlds, archive_evaluations)


def spec() -> JobSpec:
    """Small, with everything that leaves records."""
    return new_spec(
        {
            "name": "long",
            "model": {"path": "model"},
            "data": {"path": "train.jsonl", "shards": 2, "window": 8, "curriculum": "easy_first"},
            "flow": {"steps": 10**6, "groups_per_step": 1, "samples_per_prompt": 2},
            "rollout": {"max_new_tokens": 4},
            "checkpoint": {"every": EVERY, "keep": KEEP},
            "eval": {"every": EVAL_EVERY, "sources": [{"name": "held", "path": "eval.jsonl"}]},
        }
    )


@dataclass
class Seen:
    """The most there ever was, by kind of key."""

    keys: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def forget(self) -> Seen:
        """What was seen until now; from now on only what comes."""
        before = Seen(dict(self.keys), dict(self.bytes))
        self.keys.clear()
        self.bytes.clear()
        return before

    def note(self, keys: dict[str, int], sizes: dict[str, int]) -> None:
        for most, now in ((self.keys, keys), (self.bytes, sizes)):
            for kind, number in now.items():
                most[kind] = max(most.get(kind, 0), number)


class LongJob:
    """`seed` selects the failures and their times. `lacking`: a rule that is left out. `receipts`: ranks leave them."""

    def __init__(self, run_dir: Path, seed: int = 0, *, lacking: object = None, receipts: bool = False) -> None:
        self.run_dir = run_dir
        self.lacking = lacking
        self.receipts = receipts
        self.chance = random.Random(seed)
        self.spec = spec()
        self.cluster = MemoryCluster(FakeClock())
        self.store = MemoryStore(self.cluster)
        self.mirror = JobMirror(KEYS)
        self.saved: dict[Version, SavedCheckpoint] = {}
        self.members: dict[str, int] = {}
        self.seen = Seen()
        self.lives = self.nonces = self.rollbacks = self.committed = 0
        job = JobRecord(
            uid=UID, name="long", spec=self.spec.model_dump(mode="json"), run_dir=str(run_dir), created=1.0, prompts=PROMPTS
        )  # fmt: skip
        self.rules = rules_of(job)
        self.make(transactions.create(KEYS, job, JobStatus(phase=JobPhase.PENDING), 0))
        assert self.mirror.status is not None
        advance = chain.base_entry(2, "world-0", self.writer())
        running = JobStatus(phase=JobPhase.RUNNING)
        self.make(transactions.start(KEYS, self.mirror.status, advance, self.plan("world-0", 1), running))
        self.claim("world-0")
        for _ in range(CONTROLLERS):
            self.join()

    # The store.

    def make(self, txn: Transaction) -> None:
        """It must be won."""
        assert self.cluster.transact(txn.compares, txn.writes).won, txn.kind
        self.hear()

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self.cluster.transact((), (Put(key, value, lease),))
        self.hear()

    def hear(self) -> None:
        for batch in self.cluster.events_since(self.mirror.revision, KEYS.prefix) or ():
            self.mirror = self.mirror.fold(batch)

    @property
    def slots(self) -> OpenSlots:
        slots = self.mirror.open_slots
        assert slots is not None
        return slots

    def writer(self) -> ChainWriter:
        self.nonces += 1
        return ChainWriter("writer", f"{self.nonces}")

    def measure(self) -> None:
        """How much there is now."""
        keys: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for kv in self.cluster.listing(KEYS.prefix).kvs:
            kind = kv.key.removeprefix(KEYS.prefix).partition("/")[0]
            keys[kind] = keys.get(kind, 0) + 1
            sizes[kind] = sizes.get(kind, 0) + len(kv.key) + len(kv.value)
        self.seen.note(keys, sizes)

    # What happens.

    def plan(self, world: str, generation: int) -> Plan:
        ranks = tuple(RankPlace(rank=rank, node=f"node-{rank}", slot="cpu:0") for rank in range(RANKS))
        return Plan(generation=generation, world=world, ranks=ranks, engines=())

    def claim(self, world: str) -> None:
        for rank in range(RANKS):
            self.put(KEYS.world_rank(world, rank), RankClaim(instance=f"train-node-{rank}-{world}").encode())
        self.put(KEYS.rendezvous(world), b"127.0.0.1:12345")

    def join(self) -> None:
        self.lives += 1
        name = f"node-{self.lives % CONTROLLERS}.{self.lives}"
        self.members[name] = self.cluster.grant(10**9)
        self.put(KEYS.member(name), Member(incarnation=name, node=name, address="a").encode(), self.members[name])
        self.assign()

    def leave(self) -> None:
        name = self.chance.choice(sorted(self.members))
        self.cluster.end_lease(self.members.pop(name))
        self.hear()
        self.assign()

    def assign(self) -> None:
        if self.members:
            new = Assignment(members=tuple(sorted(self.members)), owners=(0, 0))
            self.make(transactions.assign(KEYS, self.mirror.assign, new))

    async def step(self) -> None:
        """A batch, or outcomes; with what it takes for its data epoch to begin."""
        head = self.slots.head.record
        wanted = tuple(itertools.islice(refs_in_order(self.rules, head, ()), 2))
        begun = epochs.valid_epochs(head, [stored.record for stored in self.mirror.epochs.values()])
        if epochs.needed_epoch(wanted, begun) is not None:
            await self.carry_out(begin_epochs)
        self.offer(wanted)
        slots = self.slots
        chosen = choose_seal(self.rules, head, slots.seals, self.offered())
        if isinstance(chosen, CloseStep):
            self.make(
                transactions.account(
                    KEYS, slots, chain.account_entry(head, chosen.outcomes, self.rules.shape, self.writer())
                )
            )
            return
        if not isinstance(chosen, SealStep):
            return
        assert self.mirror.plan is not None
        self.make(transactions.seal(KEYS, slots, chosen, self.mirror.plan.record, 1, "sealer"))
        step = head.step + 1
        self.make(transactions.ready(KEYS, self.slots, step))
        seal = self.slots.slots[step].record
        for rank in range(RANKS) if self.receipts else ():
            ReceiptWriter(self.run_dir, seal.world, rank).write(
                StepInput(seal, balance_samples(seal), rank, {}), loss=0.5
            )
        keep = self.spec.checkpoints_after(step, last=False)
        self.make(
            transactions.commit(
                KEYS,
                self.slots,
                self.rules.shape,
                self.writer(),
                keep_cursors=keep,
                stats={"reward": 0.5, "loss": 0.25},
            )
        )
        self.committed += 1
        if keep:
            version = self.slots.head.record.version
            self.saved = {version: SavedCheckpoint(version, f"checkpoints/{version.lineage}-{version.step}", "d" * 64)}

    def offered(self) -> OffersView:
        head = self.slots.head.record
        return OffersView.collect(self.rules, head, [stored.record for stored in self.mirror.offers.values()])

    def offer(self, wanted: tuple[PromptRef, ...]) -> None:
        """By one of the controllers; every tenth prompt is filtered."""
        name = self.chance.choice(sorted(self.members))
        version = self.slots.head.record.version
        groups, outcomes = [], []
        for ref in wanted:
            if self.chance.random() < 0.1:
                outcomes.append(EndedRef(ref=ref, kind="filtered", reason="constant", holder=name, versions=(version,)))
            else:
                groups.append(
                    OfferedGroup(ref=ref, digest="d" * 32, prompt_tokens=3, response_tokens=(1, 2), versions=(version,))
                )
        record = Offer(incarnation=name, groups=tuple(groups), outcomes=tuple(outcomes))
        self.make(transactions.offer(KEYS, self.mirror.offers.get(name), record, self.members[name]))

    def roll_back(self) -> None:
        mirror = self.mirror
        known, plan, head = mirror.checkpoints, mirror.plan, self.slots.head.record
        assert known is not None
        assert plan is not None
        target = known.record.entries[-1]
        entry = mirror.log[target.seq].record
        self.rollbacks += 1
        world = f"world-{self.rollbacks}"
        advance = chain.rollback_entry(head, entry, world, self.writer(), "a rank died")
        self.make(
            transactions.rollback(KEYS, self.slots, known, advance, plan, self.plan(world, plan.record.generation + 1))
        )
        self.claim(world)

    def evaluate(self, *, whole: bool) -> None:
        """Of head's weights, in two parts; or begun, and left."""
        mirror = self.mirror
        assert mirror.head is not None
        version = mirror.head.record.version
        for number in range(2 if whole else 1):
            part = EvalPart(
                version=version, number=number, parts=2, source="held", first=number, samples=1, correct=(1,), reward=1.0
            )  # fmt: skip
            txn = evaluation.record_part(KEYS, part)
            self.cluster.transact(txn.compares, txn.writes)
        self.hear()
        if whole and str(version) not in self.mirror.evaluations:
            made = Evaluation(version=version, accuracy=self.chance.random(), count=2)
            self.make(evaluation.record_evaluation(KEYS, mirror.head, made))

    def agree(self) -> None:
        """All peers give a number in this step, and one of them fixes the answer."""
        at = self.slots.head.record.version
        for name, lease in self.members.items():
            old = self.mirror.parts.get(name)
            new = collectives.add_contribution(old.record if old else None, name, at, "sum", 1.5)
            self.make(collectives.give(KEYS, old, new, lease))
        parts = {name: stored.record for name, stored in self.mirror.parts.items()}
        answer = collectives.compute_answer(at, "sum", parts)
        known = ((stored.record.version, stored.record.name) for stored in self.mirror.agreed.values())
        if f"{at}/sum" not in self.mirror.agreed:
            self.make(collectives.agree(KEYS, answer, collectives.finished_answers(self.members, parts, known)))

    async def fail_plug_in(self, step: int) -> None:
        """Another error each time, met by a controller of another life each time."""
        book = PluginErrorLog(self.store, KEYS, "node-0")
        book.note(f"the reward raised {step}", "trace " * 100)
        await book.finish()
        self.put(KEYS.trouble("metrics"), Trouble(topic="metrics", node="node-0", sentence=f"trouble {step}").encode())

    # What is tidied up.

    def view(self) -> JobView:
        me = min(self.members)
        return JobView(
            spec=self.spec, rules=self.rules, mirror=self.mirror, me=me, node="node-0", nodes={}, workers={}, saved=self.saved
        )  # fmt: skip

    async def carry_out(self, *rules: Callable[[JobView], Iterable[Intent]]) -> None:
        hands = hands_of(self.store, self.run_dir)
        for rule in rules:
            for intent in rule(self.view()):
                await apply_action(intent.action, self.view(), hands)
                self.hear()

    async def tidy(self) -> None:
        """The work of a controller beside the steps."""
        await self.carry_out(*(rule for rule in TIDYING if rule is not self.lacking))

    async def run(self, steps: int) -> None:
        """Until so many more steps are committed, those that are gone back behind too."""
        end = self.committed + steps
        for number in itertools.count(1):
            if self.committed >= end:
                return
            await self.step()
            if number % EVAL_EVERY == 0:
                self.evaluate(whole=number % (3 * EVAL_EVERY) != 0)
            if number % 97 == 0:
                self.agree()
            if number % 301 == 0:
                self.leave()
                self.join()
            if number % LOST_EVERY == 0:
                self.roll_back()
            if number % 211 == 0:
                await self.fail_plug_in(number)
            if number % LATE == 0:
                self.measure()
                await self.tidy()
            if number % 256 == 0:
                self.cluster.compact()
