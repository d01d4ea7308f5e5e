"""The start of data epochs: the valid record, when one is needed, what may be deleted, and concurrent writers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import Cursors, ShardCursor, shard_lengths
from gcore.ledger import chain, transactions
from gcore.ledger import statistics as epochs
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, EpochRecord, Head, Lineage, LogEntry, SourceTally, Tally
from gcore.ledger.records.job import EnginePlace, JobPhase, JobStatus, Plan, RankPlace
from gcore.ledger.selection import is_ancestor
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.store.keys import JobKeys
from gcore.store.types import Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import PromptRef, Version

SHAPE = shard_lengths(5, 2)
WRITER = ChainWriter("a", "n")
KEYS = JobKeys("u")


def head_at(step: int, *lineages: tuple[int, int], positions: tuple[int, int] = (0, 0)) -> Head:
    """Head at `step`; lineage 0 and those given as (number, base step)."""
    base = chain.base_entry(2, "w", WRITER).head
    all_of_them = (Lineage(number=0, base_step=0), *(Lineage(number=n, base_step=b) for n, b in lineages))
    cursors = Cursors(tuple(ShardCursor(position) for position in positions))
    update = {"step": step, "lineage": len(lineages), "lineages": all_of_them, "cursors": cursors, "seq": step}
    return base.model_copy(update=update)


def record(epoch: int, lineage: int, step: int, kept: int = 0) -> EpochRecord:
    tally = {"data": SourceTally(kept=kept)} if kept else {}
    return EpochRecord(epoch=epoch, version=Version(lineage, step), so_far=tally)


def test_a_record_counts_while_its_version_is_on_the_chain() -> None:
    one, two = record(1, 0, 2), record(2, 0, 5)
    assert epochs.valid_epochs(head_at(6), [one, two]) == {1: one, 2: two}
    after_rollback = head_at(3, (1, 3))
    assert epochs.valid_epochs(after_rollback, [one, two]) == {1: one}
    assert epochs.valid_epochs(head_at(9, (1, 3)), [one, two, record(3, 1, 8)]) == {1: one, 3: record(3, 1, 8)}


versions = st.tuples(st.integers(0, 3), st.integers(0, 9)).map(lambda pair: Version(*pair))
heads = st.lists(st.integers(0, 9), max_size=3).map(
    lambda bases: head_at(9, *((number, base) for number, base in enumerate(bases, 1)))
)


@given(heads, versions, versions)
def test_a_group_that_may_be_trained_was_issued_under_a_record_that_counts(
    head: Head, begun_at: Version, made_by: Version
) -> None:
    """A record precedes what is issued under it: if its version was an ancestor then, it is one as long as the group's is."""
    then = head.model_copy(
        update={
            "lineage": made_by.lineage,
            "step": made_by.step,
            "lineages": tuple(one for one in head.lineages if one.number <= made_by.lineage),
        }
    )
    issued_under = epochs.valid_epochs(then, [record(1, *begun_at)])
    if issued_under and is_ancestor(head, made_by):
        assert epochs.valid_epochs(head, [record(1, *begun_at)]) == issued_under


@given(heads, st.integers(0, 9), versions)
def test_a_record_that_was_cut_off_never_counts_again(head: Head, base_step: int, begun_at: Version) -> None:
    later = head.model_copy(
        update={
            "lineage": head.lineage + 1,
            "step": min(base_step, head.step),
            "lineages": (*head.lineages, Lineage(number=head.lineage + 1, base_step=min(base_step, head.step))),
        }
    )
    if (
        not epochs.valid_epochs(head, [record(1, *begun_at)])
        and begun_at.lineage <= head.lineage
        and begun_at.step <= head.step
    ):
        assert not epochs.valid_epochs(later, [record(1, *begun_at)])


def test_the_oldest_epoch_that_is_due_and_has_not_begun_is_needed() -> None:
    due = [PromptRef(0, 0, 2), PromptRef(2, 1, 0), PromptRef(1, 0, 0), PromptRef(1, 0, 1)]
    assert epochs.needed_epoch(due, {}) == 1
    assert epochs.needed_epoch(due, {1: record(1, 0, 0)}) == 2
    assert epochs.needed_epoch(due, {1: record(1, 0, 0), 2: record(2, 0, 0)}) is None
    assert epochs.needed_epoch([PromptRef(0, 0, 0)], {}) is None


def test_a_record_has_all_that_was_committed_and_what_is_new_of_it() -> None:
    tally = Tally(sources={"data": SourceTally(kept=5, reward=2.5), "more": SourceTally(failed=1)})
    head = head_at(4).model_copy(update={"tally": tally})
    first = epochs.make_epoch_record(head, 1, {})
    assert (first.version, first.so_far, first.latest) == (Version(0, 4), tally.sources, tally.sources)
    second = epochs.make_epoch_record(head, 2, {1: record(1, 0, 2, kept=3)})
    assert second.so_far == tally.sources
    assert second.latest["data"] == SourceTally(kept=2, reward=2.5)


BASE = Checkpoint(lineage=0, step=0, seq=0, file="")


def log_at(**positions: tuple[int, int]) -> dict[int, LogEntry]:
    """Entries `_N` with the cursors a rollback to step N finds."""
    entry = chain.base_entry(2, "w", WRITER).entry
    return {
        int(name[1:]): entry.model_copy(update={"cursors": Cursors(tuple(ShardCursor(p) for p in both))})
        for name, both in positions.items()
    }


def on_its_way(step: int, both: tuple[int, int]) -> dict[int, LogEntry]:
    """The entry of a step whose checkpoint may still be registered."""
    entry = log_at(**{f"_{step}": both})[step]
    return {step: entry.model_copy(update={"seq": step, "kind": "train", "step": step})}


def at(step: int) -> Checkpoint:
    return Checkpoint(lineage=0, step=step, seq=step, file=f"c{step}")


BEGUN = {epoch: record(epoch, 0, 2 * epoch) for epoch in range(1, 6)}
"""Epoch n began at step 2n; its refs are the positions 3n, 3n+1, 3n+2 and 2n, 2n+1."""


@pytest.mark.parametrize(
    ("checkpoints", "log", "forgotten"),
    [
        ((BASE,), log_at(_0=(0, 0)), (1, 2, 3)),
        ((BASE,), log_at(_0=(0, 0)) | on_its_way(8, (12, 7)), (1, 2)),
        ((BASE,), log_at(_0=(0, 0)) | on_its_way(3, (4, 2)), (2, 3)),
        ((BASE, at(6)), log_at(_0=(0, 0), _6=(9, 6)) | on_its_way(8, (12, 7)), (1, 2)),
        ((BASE, at(8)), log_at(_0=(0, 0), _8=(12, 8)) | on_its_way(6, (8, 6)), (1, 2, 3)),
        ((BASE, at(8)), log_at(_0=(0, 0), _8=(12, 8)), (1, 2, 3)),
        ((BASE, at(8)), log_at(_0=(0, 0), _8=(12, 7)), (1, 2)),
        ((BASE, at(6), at(8)), log_at(_0=(0, 0), _6=(9, 6), _8=(12, 8)), (1, 2)),
        ((BASE, at(5), at(8)), log_at(_0=(0, 0), _5=(9, 6), _8=(12, 8)), (1, 2, 3)),
        ((BASE, at(8)), log_at(_8=(12, 8)), ()),
    ],
    ids=[
        "only the first model: everything would begin again",
        "a checkpoint that is on its way cuts one in two",
        "what began after one that is on its way would be written again",
        "one that is on its way counts beside one that is registered",
        "one that is older than a registered one never comes",
        "all that ended before the checkpoint",
        "an epoch the checkpoint cuts in two stays",
        "an older checkpoint needs what had begun by then",
        "what began after an older checkpoint would be written again",
        "an entry that is not at hand forbids everything",
    ],
)
def test_epoch_records_that_no_rollback_needs_are_superfluous(
    checkpoints: tuple[Checkpoint, ...], log: dict[int, LogEntry], forgotten: tuple[int, ...]
) -> None:
    head = head_at(10, positions=(15, 10))
    assert epochs.superfluous_epochs(SHAPE, head, checkpoints, log, BEGUN) == forgotten


def test_epoch_records_of_the_first_model_are_never_superfluous() -> None:
    begun = {**BEGUN, 1: record(1, 0, 0)}
    log = log_at(_0=(0, 0), _8=(12, 8))
    assert epochs.superfluous_epochs(SHAPE, head_at(10, positions=(15, 10)), (BASE, at(8)), log, begun) == (2, 3)


class Cluster:
    """A running job in the store, and how anyone sees it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(FakeClock())
        self.ledger = TransactionExecutor(MemoryStore(self.cluster), KEYS)
        self.cluster.transact((), (Put(KEYS.state, JobStatus(phase=JobPhase.PENDING).encode()),))
        places = (RankPlace(rank=0, node="n0", slot="cpu:0"),)
        engines = (EnginePlace(node="n0", slot="cpu:0"),)
        plan = Plan(generation=1, world="w", ranks=places, engines=engines)
        status = self.look().status
        assert status is not None
        txn = transactions.start(
            KEYS, status, chain.base_entry(2, "w", WRITER), plan, JobStatus(phase=JobPhase.RUNNING)
        )
        assert self.cluster.transact(txn.compares, txn.writes).won

    def look(self) -> JobMirror:
        listing = self.cluster.listing(KEYS.prefix)
        batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
        return JobMirror(KEYS).fold(batch)

    async def begin(self, seen: JobMirror, epoch: int) -> TxnOutcome:
        assert seen.head is not None
        assert seen.checkpoints is not None
        begun = epochs.valid_epochs(seen.head.record, [stored.record for stored in seen.epochs.values()])
        made = epochs.make_epoch_record(seen.head.record, epoch, begun)
        txn = transactions.begin_epoch(KEYS, seen.head, seen.checkpoints, seen.epochs.get(epoch), made, ())
        return (await self.ledger.run(txn)).outcome

    def move_head(self, **update: object) -> None:
        head = self.look().head
        assert head is not None
        self.cluster.transact((), (Put(KEYS.head, head.record.model_copy(update=update).encode()),))


async def test_of_two_who_need_an_epoch_one_fixes_its_statistics() -> None:
    job = Cluster()
    one, other = job.look(), job.look()
    assert await job.begin(one, 1) is TxnOutcome.WON
    assert await job.begin(other, 1) is TxnOutcome.STALE
    assert set(job.look().epochs) == {1}


async def test_statistics_of_an_old_head_are_not_written() -> None:
    job = Cluster()
    seen = job.look()
    job.move_head(step=1)
    assert await job.begin(seen, 1) is TxnOutcome.STALE
    assert job.look().epochs == {}


async def test_epoch_of_a_discarded_branch_is_written_again_once() -> None:
    job = Cluster()
    job.move_head(step=3)
    assert await job.begin(job.look(), 1) is TxnOutcome.WON
    lineages = (Lineage(number=0, base_step=0), Lineage(number=1, base_step=2))
    job.move_head(step=2, lineage=1, lineages=lineages)
    one, other = job.look(), job.look()
    assert await job.begin(one, 1) is TxnOutcome.WON
    assert await job.begin(other, 1) is TxnOutcome.STALE
    assert job.look().epochs[1].record.version == Version(1, 2)


async def test_forgotten_records_go_in_the_same_transaction() -> None:
    job = Cluster()
    await job.begin(job.look(), 1)
    seen = job.look()
    assert seen.head is not None
    assert seen.checkpoints is not None
    txn = transactions.begin_epoch(KEYS, seen.head, seen.checkpoints, None, record(2, 0, 0), (1,))
    assert (await job.ledger.run(txn)).outcome is TxnOutcome.WON
    assert set(job.look().epochs) == {2}


def test_a_mirror_forgets_a_deleted_record() -> None:
    job = Cluster()
    job.cluster.transact((), (Put(KEYS.epoch(3), record(3, 0, 0).encode()),))
    mirror = job.look()
    assert mirror.epochs[3].record == record(3, 0, 0)
    (kv,) = job.cluster.listing(KEYS.epoch_prefix).kvs
    gone = WatchBatch((WatchEvent("delete", replace(kv, value=b"")),), kv.mod_revision + 1)
    assert mirror.fold(gone).epochs == {}
