"""Spending by node: the sum is exact, and lost nodes do not fill the store."""

from __future__ import annotations

import pytest
import store_bounds as bounds
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import MOST_JUDGES, ExternalJudge
from gcore.ledger.transactions import Versioned
from gcore.ledger.usage import (
    MOST_ADDED_UP,
    MOST_COUNTED,
    NOTHING,
    SPARE_NODES,
    JudgeUse,
    NodeSpent,
    add_uses,
    records_to_merge,
    spend,
    subtract_uses,
    use_cost,
)
from gcore.store.keys import JobKeys
from gcore.store.types import Delete, Put

KEYS = JobKeys("u")
COUNTS = st.integers(0, 10**15)
USE = st.builds(JudgeUse, requests=COUNTS, tokens_in=COUNTS, tokens_out=COUNTS)
USES = st.dictionaries(st.sampled_from(["a", "b", "c"]), USE)


@given(one=USES, other=USES)
def test_adding_and_subtracting_uses_are_inverse(one: dict[str, JudgeUse], other: dict[str, JudgeUse]) -> None:
    assert add_uses((one, other)) == add_uses((other, one))
    rest = subtract_uses(add_uses((one, other)), other)
    assert rest == {judge: use for judge, use in one.items() if use != NOTHING}


@given(before=USES, life=USES)
def test_a_record_is_read_as_it_was_written(before: dict[str, JudgeUse], life: dict[str, JudgeUse]) -> None:
    record = NodeSpent(node="n", by="n.1", before=before, life=life)
    assert NodeSpent.decode(record.encode()) == record
    assert record.uses == add_uses((before, life))


def test_record_size_is_within_its_bound() -> None:
    much = JudgeUse(requests=10**15, tokens_in=10**18, tokens_out=10**18)
    uses = {f"{number:02}" + "j" * 30: much for number in range(MOST_JUDGES)}
    record = NodeSpent(node="n" * 100, by="n" * 120, before=uses, life=uses)
    assert len(KEYS.spent(record.node)) + len(record.encode()) <= bounds.SMALL + 2 * bounds.USE * MOST_JUDGES


def test_tokens_cost_what_a_million_of_them_does() -> None:
    judge = ExternalJudge(url="http://x/v1", model="m", price_in=2.0, price_out=10.0)
    assert use_cost(JudgeUse(requests=1, tokens_in=500_000, tokens_out=100_000), judge) == pytest.approx(2.0)
    assert use_cost(NOTHING, judge) == 0


def test_a_record_with_more_tokens_than_there_can_be_is_read_and_costs_a_number() -> None:
    judge = ExternalJudge(url="http://x/v1", model="m", price_in=2.0, price_out=1e308)
    absurd = f'{{"schema_version":2,"node":"n","by":"n.1","life":{{"a":{{"tokens_in":{10**400},"tokens_out":1}}}}}}'
    uses = NodeSpent.decode(absurd.encode()).uses
    twice = add_uses((uses, uses))["a"]
    assert (twice.tokens_in, twice.tokens_out) == (MOST_COUNTED, 2)
    assert use_cost(twice, judge) > 1e12


def stored(count: int) -> dict[str, Versioned[NodeSpent]]:
    life = {"a": JudgeUse(requests=1, tokens_in=2)}
    return {f"n{i}": Versioned(NodeSpent(node=f"n{i}", by=f"n{i}.1", life=life), 10 + i) for i in range(count)}


def test_only_the_oldest_records_of_nodes_that_are_gone_are_added_up_and_only_if_there_are_many() -> None:
    spent = stored(SPARE_NODES + 4)
    assert records_to_merge(spent, "n0", nodes=["n0", "n1", "n2"]) == {"n3": spent["n3"]}
    assert records_to_merge(spent, "n0", nodes=[]).keys() == {"n1", "n2", "n3"}
    assert records_to_merge(stored(SPARE_NODES), "me", nodes=[]) == {}
    assert len(records_to_merge(stored(200), "me", nodes=[])) == MOST_ADDED_UP


def test_records_that_are_added_up_go_into_the_one_that_is_written_and_are_compared() -> None:
    gone = stored(2)
    txn = spend(KEYS, None, NodeSpent(node="me", by="me.1", before={"a": JudgeUse(requests=5)}), gone)
    assert {(c.key, c.mod_revision) for c in txn.compares} == {
        (KEYS.spent("me"), 0),
        (KEYS.spent("n0"), 10),
        (KEYS.spent("n1"), 11),
    }
    (put, *deletes) = txn.writes
    assert isinstance(put, Put)
    assert put.lease == 0
    assert NodeSpent.decode(put.value).uses == {"a": JudgeUse(requests=7, tokens_in=4)}
    assert deletes == [Delete(KEYS.spent("n0")), Delete(KEYS.spent("n1"))]


def test_a_node_is_not_added_to_itself() -> None:
    with pytest.raises(ValueError, match="n0 cannot be merged into itself"):
        spend(KEYS, None, NodeSpent(node="n0", by="n0.1"), stored(1))
