"""A job starts once, from the state that its controller read; leftovers of a deleted job are removed only while it is deleted."""

from __future__ import annotations

import pytest

from gcore.ledger import chain, transactions
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.job import JobPhase, JobStatus, Plan
from gcore.ledger.transactions import Transaction, Versioned
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.testing import FakeClock, MemoryCluster

KEYS = JobKeys("u")
PENDING, RUNNING = JobStatus(phase=JobPhase.PENDING), JobStatus(phase=JobPhase.RUNNING)


def begun(cluster: MemoryCluster) -> Transaction:
    """From the status as it stands."""
    revision = cluster.transact((), (Put(KEYS.state, PENDING.encode()),)).revision
    advance = chain.base_entry(4, "w", ChainWriter("n.1", "nonce"))
    plan = Plan(generation=1, world="w", ranks=(), engines=())
    return transactions.start(KEYS, Versioned(PENDING, revision), advance, plan, RUNNING)


def test_a_job_that_was_cancelled_meanwhile_is_not_begun() -> None:
    cluster = MemoryCluster(FakeClock())
    txn = begun(cluster)
    cluster.transact((), (Put(KEYS.state, JobStatus(phase=JobPhase.CANCELLED).encode()),))
    assert not cluster.transact(txn.compares, txn.writes).won


def test_a_job_that_has_a_chain_is_not_begun_again() -> None:
    cluster = MemoryCluster(FakeClock())
    txn = begun(cluster)
    cluster.transact((), (Put(KEYS.head, b"{}"),))
    assert not cluster.transact(txn.compares, txn.writes).won


def test_the_rest_of_a_job_goes_only_with_the_head_that_was_seen_marked() -> None:
    cluster = MemoryCluster(FakeClock())
    head = chain.base_entry(4, "w", ChainWriter("n.1", "nonce")).head.model_copy(update={"deleted": True})
    revision = cluster.transact((), (Put(KEYS.head, head.encode()),)).revision
    ended = JobStatus(phase=JobPhase.CANCELLED)
    status = Versioned(ended, cluster.transact((), (Put(KEYS.state, ended.encode()),)).revision)
    txn = transactions.delete_rest(KEYS, Versioned(head, revision), status, {})
    cluster.transact((), (Put(KEYS.head, head.encode()),))
    assert not cluster.transact(txn.compares, txn.writes).won


def test_the_rest_of_a_job_that_never_had_a_head_goes_only_with_the_state_that_was_seen() -> None:
    cluster = MemoryCluster(FakeClock())
    ended = JobStatus(phase=JobPhase.CANCELLED)
    status = Versioned(ended, cluster.transact((), (Put(KEYS.state, ended.encode()),)).revision)
    name = {keys.name("j"): cluster.transact((), (Put(keys.name("j"), b"u"),)).revision}
    txn = transactions.delete_rest(KEYS, None, status, name)
    cluster.transact((), (Put(keys.name("j"), b"another"),))
    assert not cluster.transact(txn.compares, txn.writes).won
    cluster.transact((), (Put(KEYS.head, b"{}"),))
    assert not cluster.transact(txn.compares, txn.writes).won
    with pytest.raises(ValueError, match="only an ended job"):
        transactions.delete_rest(KEYS, None, Versioned(PENDING, 1), {})


def test_the_rest_of_a_job_stays_where_its_state_was_written_meanwhile() -> None:
    cluster = MemoryCluster(FakeClock())
    ended = JobStatus(phase=JobPhase.CANCELLED)
    status = Versioned(ended, cluster.transact((), (Put(KEYS.state, ended.encode()),)).revision)
    txn = transactions.delete_rest(KEYS, None, status, {})
    cluster.transact((), (Put(KEYS.state, PENDING.encode()),))
    assert not cluster.transact(txn.compares, txn.writes).won
    again = Versioned(ended, cluster.transact((), (Put(KEYS.state, ended.encode()),)).revision)
    txn = transactions.delete_rest(KEYS, None, again, {})
    assert cluster.transact(txn.compares, txn.writes).won
