"""A hint overwrites only the value that its writer read, not a newer one."""

from __future__ import annotations

from typing import Any

import pytest

from gcore.ledger import transactions
from gcore.ledger import usage as spending
from gcore.ledger.records.chain import NodeCopies, NodeFolder
from gcore.ledger.records.job import Trouble
from gcore.ledger.transactions import Transaction
from gcore.ledger.usage import NodeSpent
from gcore.store.keys import JobKeys
from gcore.testing import FakeClock, MemoryCluster

KEYS = JobKeys("u")


def warned(lease: int) -> Transaction:
    return transactions.warn(KEYS, None, Trouble(topic="disk", node="n", sentence="full"))


def stocked(lease: int) -> Transaction:
    return transactions.take_stock(KEYS, None, NodeCopies(node="n", by="n.1", seq=0), lease)


def told(lease: int) -> Transaction:
    return transactions.say_folder(KEYS, None, NodeFolder(node="n", by="n.1"), lease)


def spent(lease: int) -> Transaction:
    return spending.spend(KEYS, None, NodeSpent(node="n", by="n.1"))


@pytest.mark.parametrize("make", [warned, stocked, told, spent], ids=["warn", "take_stock", "say_folder", "spend"])
def test_of_two_who_have_seen_the_same_one_writes(make: Any) -> None:
    cluster = MemoryCluster(FakeClock())
    lease = cluster.grant(100)
    first, second = make(lease), make(lease)
    assert cluster.transact(first.compares, first.writes).won
    assert not cluster.transact(second.compares, second.writes).won
