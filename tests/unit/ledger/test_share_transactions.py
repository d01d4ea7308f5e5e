"""A plan uses no released slot, and no slot of a plan is released."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import KEYS, running_job

from controllers.job import effects as starting
from controllers.job import executor as apply
from controllers.job import rollback as rolling
from controllers.rules.actions import ChangePlan, ReturnSlots
from controllers.rules.view import JobView
from gcore.ledger import transactions as share_transactions
from gcore.ledger.records.cluster import Claim, KnownShare, Quotas, Share, Shares, group_by_node, slots_of_share
from gcore.ledger.records.job import Plan
from gcore.ledger.transactions import Transaction, TxnKind, Versioned
from gcore.store import keys
from gcore.store.types import Delete, Put, check_transaction
from gcore.testing import FakeClock, MemoryCluster

BOTH = {"n": ("cpu:0", "cpu:1")}
ONE = frozenset({("n", "cpu:1")})


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster(FakeClock())


def put(cluster: MemoryCluster, key: str, value: bytes) -> int:
    return cluster.transact((), (Put(key, value),)).revision


def shares(granted: Any = None) -> Shares:
    return Shares(jobs={"u": Share(granted={"n": ("cpu:0",)} if granted is None else granted, held=BOTH)})


def known(cluster: MemoryCluster, said: Shares | None = None) -> KnownShare:
    said = said or shares()
    return KnownShare("u", said, put(cluster, keys.SHARES, said.encode()))


def won(cluster: MemoryCluster, txn: Transaction) -> bool:
    return cluster.transact(txn.compares, txn.writes).won


def planned(cluster: MemoryCluster) -> Versioned[Plan]:
    plan = Plan(generation=1, world="w", ranks=(), engines=())
    return Versioned(plan, put(cluster, KEYS.plan, plan.encode()))


def test_released_slots_leave_the_share(cluster: MemoryCluster) -> None:
    txn = share_transactions.give_back(KEYS, planned(cluster), known(cluster), ONE)
    assert txn.kind is TxnKind.GIVE_BACK
    assert won(cluster, txn)
    kv = cluster.get(keys.SHARES)
    assert kv is not None
    assert slots_of_share(Shares.decode(kv.value).jobs["u"].held) == {("n", "cpu:0")}


def test_nothing_is_given_back_that_a_newer_plan_may_use(cluster: MemoryCluster) -> None:
    plan = planned(cluster)
    txn = share_transactions.give_back(KEYS, plan, known(cluster), ONE)
    planned(cluster)
    assert not won(cluster, txn)


def test_nothing_is_given_back_from_shares_that_are_others_by_now(cluster: MemoryCluster) -> None:
    txn = share_transactions.give_back(KEYS, planned(cluster), known(cluster), ONE)
    known(cluster, shares(BOTH))
    assert not won(cluster, txn)


def test_a_job_that_was_never_planned_gives_back_as_long_as_it_is_not(cluster: MemoryCluster) -> None:
    txn = share_transactions.give_back(KEYS, None, known(cluster), ONE)
    planned(cluster)
    assert not won(cluster, txn)


def test_shares_are_written_over_the_stored_revision_only(cluster: MemoryCluster) -> None:
    assert won(cluster, share_transactions.share_out(KEYS, None, shares()))
    assert not won(cluster, share_transactions.share_out(KEYS, None, shares()))
    stands = known(cluster)
    assert won(cluster, share_transactions.share_out(KEYS, Versioned(stands.shares, stands.revision), shares(BOTH)))


def test_a_job_whose_claim_was_not_heard_of_keeps_its_slots(cluster: MemoryCluster) -> None:
    """It was just created, or continues after its end; the writer's watch of claims is late."""
    assert won(cluster, share_transactions.share_out(KEYS, None, shares()))
    stands = known(cluster)
    put(cluster, KEYS.active, Claim().encode())
    without = Shares(jobs={})
    assert not won(cluster, share_transactions.share_out(KEYS, Versioned(stands.shares, stands.revision), without))
    cluster.transact((), (Delete(KEYS.active),))
    assert won(cluster, share_transactions.share_out(KEYS, Versioned(stands.shares, stands.revision), without))


def test_of_very_many_jobs_that_ended_at_once_some_lose_their_slots_first() -> None:
    jobs = {f"{number:03d}": Share(held={"n": (f"cpu:{number}",)}) for number in range(150)}
    txn = share_transactions.share_out(KEYS, Versioned(Shares(jobs=jobs), 7), Shares(jobs={"new": Share()}))
    check_transaction(txn.compares, txn.writes)
    (write,) = txn.writes
    assert isinstance(write, Put)
    assert sorted(Shares.decode(write.value).jobs) == sorted(jobs)[100:]


def test_a_claim_is_changed_only_as_it_was_seen_and_never_of_a_job_that_ended(cluster: MemoryCluster) -> None:
    revision = put(cluster, KEYS.active, Claim().encode())
    txn = share_transactions.set_claim(KEYS, Versioned(Claim(), revision), Claim(paused=True))
    cluster.transact((), (Put(KEYS.active, Claim(priority=3).encode()),))
    assert not won(cluster, txn)


def job(cluster: MemoryCluster) -> JobView:
    view = running_job()
    return replace(view, share=known(cluster), mirror=replace(view.mirror, plan=planned(cluster)))


def test_every_plan_compares_who_has_which_slots(cluster: MemoryCluster) -> None:
    view = job(cluster)
    assert view.mirror.plan is not None
    new = view.mirror.plan.record.model_copy(update={"generation": 2})
    txn = apply._transaction(ChangePlan(new), view, None)  # type: ignore[arg-type]
    known(cluster, shares(BOTH))
    assert not won(cluster, txn)
    for module in (apply, rolling, starting):
        plain = Transaction(TxnKind.REPLAN, (), ())
        kept = module.keeping_to(view.share, plain)  # type: ignore[attr-defined]
        assert [compare.key for compare in kept.compares] == [keys.SHARES]
        assert module.keeping_to(None, plain) is plain  # type: ignore[attr-defined]


def test_giving_back_is_one_transaction_of_the_jobs(cluster: MemoryCluster) -> None:
    view = job(cluster)
    txn = apply._transaction(ReturnSlots(ONE), view, None)  # type: ignore[arg-type]
    assert won(cluster, txn)
    assert group_by_node(slots_of_share(shares().released("u", ONE).jobs["u"].held)) == {"n": ("cpu:0",)}


def test_of_two_who_set_quotas_by_the_same_ones_one_wins(cluster: MemoryCluster) -> None:
    one, other = (share_transactions.set_quotas(KEYS, None, Quotas(slots={name: 1})) for name in "ab")
    assert won(cluster, one)
    assert not won(cluster, other), "or it would take the first one's word back unread"
    kv = cluster.get(keys.QUOTAS)
    assert kv is not None
    assert Quotas.decode(kv.value).slots == {"a": 1}
    assert won(
        cluster, share_transactions.set_quotas(KEYS, Versioned(Quotas(), kv.mod_revision), Quotas(slots={"b": 1}))
    )
