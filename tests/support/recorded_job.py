"""A job's records as the production transactions write them, without a cluster: in the store in memory, and a run's folder.

Two controllers hold groups and offer them. Batches are sealed, trained (receipts, by the ranks' own accounting), committed and
checkpointed. Outcomes are recorded. A world dies and the job rolls back. Old entries move to the archive. Nothing here
computes a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from controllers.api.submission.spec_changes import extend_transaction, find_last_state
from gcore.ledger import archive, chain, transactions
from gcore.ledger.archive import mirror_of
from gcore.ledger.balance import balance_samples
from gcore.ledger.chain import NOTHING_SEEN, ChainWriter, HighWater, job_digest
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, EndedRef, Head, Offer, OfferedGroup, RaisedGoal
from gcore.ledger.records.job import EnginePlace, JobPhase, JobRecord, JobStatus, Plan, RankPlace
from gcore.ledger.selection import OffersView, SealStep, StreamRules, choose_seal, refs_in_order, rules_of
from gcore.ledger.transactions import OpenSlots, Transaction, TransactionExecutor, TxnOutcome
from gcore.models.layout import MANIFEST_FILE, Manifest, manifest_digest
from gcore.store import keys as store_keys
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, KeyListing, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.train.checkpoint.run_files import ReceiptWriter
from gcore.train.rank.feed import StepInput
from gcore.types import PromptRef, Version, checkpoint_file

if TYPE_CHECKING:
    from controllers.job.effects import Effects

UID = "0123456789ab"
KEYS = JobKeys(UID)
HOLDERS = ("node-0.a", "node-1.b")
SPEC = {
    "name": "sums",
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "shards": 4, "window": 8},
    "flow": {"epochs": 1, "count": "prompts", "groups_per_step": 4, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 4},
    "train": {},
    "checkpoint": {"every": 2},
}
PROMPTS = 40
RANKS = 2


def hands_of(store: MemoryStore, run_dir: Path) -> Effects:
    """The effects of the housekeeping actions; disk errors are not reported."""
    parts = {
        "ledger": TransactionExecutor(store, KEYS),
        "run_dir": run_dir,
        "tell": lambda topic, sentence: None,
        "away": str,
    }
    return cast("Effects", SimpleNamespace(replicator=None, **parts))


@dataclass
class RecordedJob:
    """One job that is under way."""

    run_dir: Path
    binds: bool = True
    """Whether entries are written as schema version 3 writes them, binding job, head and shares."""
    cluster: MemoryCluster = field(default_factory=lambda: MemoryCluster(FakeClock()))
    nonces: int = 0
    _mirrored: tuple[KeyListing, JobMirror] = field(init=False, default=(KeyListing((), -1), JobMirror(KEYS)))

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.cluster)
        self.leases = {holder: self.cluster.grant(1000) for holder in HOLDERS}
        job = JobRecord(uid=UID, name="sums", spec=SPEC, run_dir=str(self.run_dir), created=1.0, prompts=PROMPTS)
        self.job_digest = job_digest(job)
        self.rules: StreamRules = rules_of(job)
        self.run(transactions.create(KEYS, job, JobStatus(phase=JobPhase.PENDING), 0))
        status = self.mirror.status
        assert status is not None
        advance = chain.base_entry(len(self.rules.shape.lengths), "world-0", self.writer())
        running = JobStatus(phase=JobPhase.RUNNING)
        self.run(transactions.start(KEYS, status, advance, self.plan("world-0", 1), running))

    @property
    def listing(self) -> KeyListing:
        """All keys of the job."""
        return self.cluster.listing(KEYS.prefix)

    @property
    def mirror(self) -> JobMirror:
        """The job as it stands; the same object until the store changes."""
        listing = self.listing
        if listing != self._mirrored[0]:
            batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
            self._mirrored = listing, mirror_of(UID, batch)
        return self._mirrored[1]

    @property
    def head(self) -> Head:
        """The newest entry."""
        head = self.mirror.head
        assert head is not None
        return head.record

    def run(self, txn: Transaction) -> None:
        """Make it; it must be won."""
        assert asyncio.run(TransactionExecutor(self.store, KEYS).run(txn)).outcome is TxnOutcome.WON

    def writer(self) -> ChainWriter:
        """One that writes once."""
        self.nonces += 1
        return ChainWriter(HOLDERS[0], f"nonce-{self.nonces}", self.job_digest if self.binds else "")

    def plan(self, world: str, generation: int) -> Plan:
        """Two ranks and two engines."""
        ranks = tuple(RankPlace(rank=rank, node=f"node-{rank}", slot="cpu:0") for rank in range(RANKS))
        engines = tuple(EnginePlace(node=f"node-{node}", slot="cpu:0") for node in range(2))
        return Plan(generation=generation, world=world, ranks=ranks, engines=engines)

    def offer(self, refs: list[PromptRef], filtered: list[PromptRef]) -> None:
        """The offers of the holders: the groups in turn, and for the first also the outcomes."""
        version = self.head.version
        for number, holder in enumerate(HOLDERS):
            groups = tuple(
                OfferedGroup(
                    ref=ref, digest=f"{ref}:{version}", prompt_tokens=3, response_tokens=(2, 4), versions=(version,)
                )
                for ref in refs[number :: len(HOLDERS)]
            )
            outcomes = tuple(EndedRef(ref=ref, kind="filtered", reason="constant", holder=holder) for ref in filtered)
            record = Offer(incarnation=holder, groups=groups, outcomes=outcomes if number == 0 else ())
            self.run(transactions.offer(KEYS, self.mirror.offers.get(holder), record, self.leases[holder]))

    def sealed(self) -> None:
        """The oldest prompts are made, the first is filtered, and the batch is closed."""
        refs = [ref for ref, _ in zip(refs_in_order(self.rules, self.head, ()), range(5), strict=False)]
        self.offer(refs[1:], refs[:1])
        slots = self.mirror.open_slots
        assert slots is not None
        offers = [stored.record for stored in self.mirror.offers.values()]
        chosen = choose_seal(self.rules, self.head, slots.seals, OffersView.collect(self.rules, self.head, offers))
        assert isinstance(chosen, SealStep)
        assert self.mirror.plan is not None
        self.run(transactions.seal(KEYS, slots, chosen, self.mirror.plan.record, 1, HOLDERS[0]))

    def trained(self, ranks: int = RANKS) -> OpenSlots:
        """The sealed batch is READY, and so many ranks have trained it and left their receipts."""
        slots = self.mirror.open_slots
        assert slots is not None
        step = self.head.step + 1
        self.run(transactions.ready(KEYS, slots, step))
        slots = self.mirror.open_slots
        assert slots is not None
        seal = slots.slots[step].record
        for rank in range(ranks):
            ReceiptWriter(self.run_dir, seal.world, rank).write(
                StepInput(seal, balance_samples(seal), rank, {}), loss=0.5
            )
        return slots

    def step(self) -> None:
        """A batch from seal to commit, with the ranks' receipts and, every second step, a checkpoint."""
        self.sealed()
        slots = self.trained()
        step = self.head.step + 1
        seal = slots.slots[step].record
        keep = step % 2 == 0
        self.run(
            transactions.commit(KEYS, slots, self.rules.shape, self.writer(), keep_cursors=keep, stats={"reward": 0.5})
        )
        if keep:
            mirror, head = self.mirror, self.head
            assert mirror.head is not None
            assert mirror.checkpoints is not None
            made = Checkpoint(
                lineage=head.lineage,
                step=step,
                seq=head.seq,
                file=checkpoint_file(head.version),
                digest=self.write_manifest(head.version, seal.world),
            )
            self.run(transactions.register(KEYS, mirror.head, mirror.checkpoints, mirror.log[head.seq], made))

    def write_manifest(self, version: Version, world: str) -> str:
        """A checkpoint's folder, without its files; the digest of its manifest."""
        folder = self.run_dir / checkpoint_file(version)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(job_uid=UID, world=world, lineage=version.lineage, step=version.step, updates=1, files={})
        (folder / MANIFEST_FILE).write_bytes(manifest.encode())
        return manifest_digest(folder)

    def account(self) -> None:
        """One prompt fails without a step."""
        slots = self.mirror.open_slots
        assert slots is not None
        ref = next(refs_in_order(self.rules, self.head, ()))
        outcomes = (EndedRef(ref=ref, kind="failed", reason="the reward raised"),)
        advance = chain.account_entry(self.head, outcomes, self.rules.shape, self.writer())
        self.run(transactions.account(KEYS, slots, advance))

    def roll_back(self, seen: HighWater = NOTHING_SEEN) -> None:
        """The world is lost; the newest checkpoint is gone back to, in a lineage and under a number above all that was `seen`."""
        mirror = self.mirror
        slots, known, plan = mirror.open_slots, mirror.checkpoints, mirror.plan
        assert slots is not None
        assert known is not None
        assert plan is not None
        target = known.record.entries[-1]
        entry = mirror.log[target.seq].record
        world = f"world-{max(self.head.lineage, seen.lineage) + 1}"
        advance = chain.rollback_entry(self.head, entry, world, self.writer(), "a rank died", seen=seen)
        new = self.plan(world, plan.record.generation + 1)
        self.run(transactions.rollback(KEYS, slots, known, advance, plan, new))

    def prune(self, count: int) -> None:
        """The oldest entries that nothing in the store needs move to the run's folder."""
        mirror = self.mirror
        assert mirror.head is not None
        assert mirror.checkpoints is not None
        log = {seq: stored.record for seq, stored in mirror.log.items()}
        old = chain.prunable_entries(mirror.head.record, mirror.checkpoints.record.entries, log, keep=1)[:count]
        archive.append_entries(self.run_dir, HOLDERS[0], [log[seq] for seq in old])
        self.run(transactions.prune(KEYS, mirror.head, mirror.checkpoints, old))

    def end(self, phase: JobPhase) -> None:
        """The job ends."""
        status = self.mirror.status
        assert status is not None
        self.run(transactions.set_status(KEYS, status, JobStatus(phase=phase, reason="over"), None))

    def finish(self) -> None:
        """Steps until all prompts have their outcome; then the job has succeeded."""
        while any(True for _ in refs_in_order(self.rules, self.head, ())):
            self.step()
        self.prune(3)
        self.end(JobPhase.SUCCEEDED)

    def extend(self, epochs: int) -> None:
        """The job, which has succeeded, goes on to more data epochs, and then has slots again."""
        named = self.cluster.listing(store_keys.name("sums")).kvs[0].mod_revision
        ended, _, entry = find_last_state(self.mirror, named)
        before = ended.job.record.spec["flow"]["epochs"]
        raised = RaisedGoal(what="epochs", before=before, after=epochs)
        self.run(extend_transaction(KEYS, ended, entry, raised, by=HOLDERS[0], time=2.0))
        self.job_digest = job_digest(self.mirror.job_record)
        self.rules = rules_of(self.mirror.job_record)
        self.roll_back()

    def snapshot(self) -> KeyListing:
        """What a backup of the store would hold of the job."""
        return self.listing

    def put_back(self, snapshot: KeyListing) -> None:
        """The store is what it was; the run's folder stays as it is. Nothing that was under a lease is left."""
        self.cluster = MemoryCluster(FakeClock())
        self.store = MemoryStore(self.cluster)
        self.leases = {holder: self.cluster.grant(1000) for holder in HOLDERS}
        leased = (KEYS.offer(""), KEYS.member(""))
        kept = [Put(kv.key, kv.value) for kv in snapshot.kvs if not kv.key.startswith(leased)]
        self.cluster.transact((), kept)

    def corrupt(self, changes: dict[str, bytes | None]) -> None:
        """Write records as they are, without a compare; None takes a key away."""
        self.cluster.transact((), [Delete(k) if v is None else Put(k, v) for k, v in changes.items()])


def a_job_under_way(run_dir: Path) -> RecordedJob:
    """Three steps, a failed prompt, a rollback to the second, three more, an open seal, and a few entries in the archive."""
    job = RecordedJob(run_dir)
    for _ in range(3):
        job.step()
    job.roll_back()
    job.account()
    for _ in range(3):
        job.step()
    job.sealed()
    job.prune(3)
    return job


def a_job_with_a_ready_step(run_dir: Path) -> RecordedJob:
    """The same, and the open seal is READY, and one of its ranks has trained it."""
    job = a_job_under_way(run_dir)
    job.trained(ranks=1)
    return job


def a_finished_job(run_dir: Path) -> RecordedJob:
    """All prompts have their outcome, after a rollback; the job has succeeded."""
    job = RecordedJob(run_dir)
    for _ in range(3):
        job.step()
    job.roll_back()
    job.account()
    job.finish()
    return job


def a_job_that_went_on(run_dir: Path) -> RecordedJob:
    """A finished job goes on to another data epoch, and has made a step of it."""
    job = a_finished_job(run_dir)
    job.extend(2)
    job.step()
    return job
