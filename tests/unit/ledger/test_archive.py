"""Old log entries: when they may leave the store, and the archive in the run's folder."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gcore.ledger import archive, chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, Checkpoints, Head, LogEntry
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.transactions import Transaction, TransactionExecutor, TxnOutcome, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

KEYS = JobKeys("u")
BASE = chain.base_entry(2, "w", ChainWriter("a", "n"))


def entry(seq: int, kind: str = "account", lineage: int = 0) -> LogEntry:
    return LogEntry.model_validate(
        {"seq": seq, "parent": seq - 1, "kind": kind, "lineage": lineage, "step": 0, "world": "w", "nonce": str(seq)}
    )


def test_only_what_nothing_needs_any_more_is_prunable() -> None:
    log = {0: BASE.entry} | {seq: entry(seq) for seq in range(1, 20)}
    log[3] = entry(3, "rollback", lineage=1)
    log[5] = entry(5, "rollback", lineage=2)
    head = BASE.head.model_copy(update={"seq": 19, "lineage": 2})
    named = (Checkpoint(lineage=0, step=0, seq=0, file=""), Checkpoint(lineage=0, step=1, seq=7, file="c"))
    assert chain.prunable_entries(head, named, log, keep=10) == (1, 2, 3, 4, 6, 8, 9)


def test_archived_entries_are_read_back(tmp_path: Path) -> None:
    archive.append_entries(tmp_path, "a", [entry(1), entry(2)])
    archive.append_entries(tmp_path, "b", [entry(2), entry(3)])
    archive.append_entries(tmp_path, "a", [entry(4)])
    assert archive.read_entries(tmp_path) == {seq: entry(seq) for seq in (1, 2, 3, 4)}
    assert archive.read_entries(tmp_path / "none") == {}


def test_a_line_that_was_cut_off_spoils_nothing_that_follows(tmp_path: Path) -> None:
    archive.append_entries(tmp_path, "a", [entry(1), entry(2)])
    file = tmp_path / "log" / "a.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert archive.read_entries(tmp_path) == {1: entry(1)}
    archive.append_entries(tmp_path, "a", [entry(2), entry(3)])
    assert archive.read_entries(tmp_path) == {seq: entry(seq) for seq in (1, 2, 3)}


def test_two_forms_of_one_entry_are_refused(tmp_path: Path) -> None:
    archive.append_entries(tmp_path, "a", [entry(1)])
    archive.append_entries(tmp_path, "b", [entry(1).model_copy(update={"nonce": "other"})])
    with pytest.raises(ValueError, match="two different versions"):
        archive.read_entries(tmp_path)


def started() -> MemoryCluster:
    cluster = MemoryCluster(FakeClock())
    puts = [Put(KEYS.head, BASE.head.encode()), Put(KEYS.checkpoints, Checkpoints(entries=()).encode())]
    puts += [Put(KEYS.log(seq), entry(seq).encode()) for seq in range(5)]
    cluster.transact((), [*puts, Put(KEYS.state, JobStatus(phase=JobPhase.RUNNING).encode()), Put(KEYS.active, b"")])
    return cluster


def mirror_of(cluster: MemoryCluster) -> JobMirror:
    listing = cluster.listing(KEYS.prefix)
    return JobMirror(KEYS).fold(WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, True))


def run(cluster: MemoryCluster, txn: Transaction) -> TxnOutcome:
    return asyncio.run(TransactionExecutor(MemoryStore(cluster), KEYS).run(txn)).outcome


def test_a_prune_is_lost_when_head_or_the_checkpoints_moved() -> None:
    for moved in (KEYS.head, KEYS.checkpoints):
        cluster = started()
        seen = mirror_of(cluster)
        assert seen.head is not None
        assert seen.checkpoints is not None
        there = cluster.get(moved)
        assert there is not None
        txn = transactions.prune(KEYS, seen.head, seen.checkpoints, [1, 2])
        cluster.transact((), (Put(moved, there.value),))
        assert run(cluster, txn) is TxnOutcome.STALE
        assert set(mirror_of(cluster).log) == {0, 1, 2, 3, 4}
        again = mirror_of(cluster)
        assert again.head is not None
        assert again.checkpoints is not None
        assert run(cluster, transactions.prune(KEYS, again.head, again.checkpoints, [1, 2])) is TxnOutcome.WON
        assert set(mirror_of(cluster).log) == {0, 3, 4}


ENDED = JobStatus(phase=JobPhase.CANCELLED)


def test_a_deleted_job_is_gone_and_who_still_works_on_it_loses() -> None:
    cluster = started()
    old = mirror_of(cluster)
    assert old.head is not None
    assert old.checkpoints is not None
    assert old.status is not None
    with pytest.raises(ValueError, match="only an ended job"):
        transactions.delete_job(KEYS, old.head, old.status)
    ended = Versioned(ENDED, old.status.revision)
    assert run(cluster, transactions.delete_job(KEYS, old.head, ended)) is TxnOutcome.WON
    marked = mirror_of(cluster).head
    assert marked is not None
    assert marked.record.deleted
    zombie = transactions.prune(KEYS, old.head, old.checkpoints, [1])
    assert run(cluster, zombie) is TxnOutcome.STALE
    ended = Versioned(ENDED, cluster.transact((), (Put(KEYS.state, ENDED.encode()),)).revision)
    assert run(cluster, transactions.delete_rest(KEYS, marked, ended, {})) is TxnOutcome.WON
    assert cluster.listing("/gcore/").kvs == ()
    assert run(cluster, zombie) is TxnOutcome.STALE


def test_the_rest_is_not_deleted_before_head_is_marked() -> None:
    head = Versioned(Head.model_validate(BASE.head), 1)
    with pytest.raises(ValueError, match="mark it first"):
        transactions.delete_rest(KEYS, head, Versioned(ENDED, 1), {})
    marked = replace(head, record=head.record.model_copy(update={"deleted": True}))
    assert transactions.delete_rest(KEYS, marked, Versioned(ENDED, 1), {}).writes
