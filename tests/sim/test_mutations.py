"""The simulations notice when a compare or a rule of the protocol is taken out. A few of them; all with `make mutations`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import bare, whole
from mutations import COMPARED, MUTATIONS

from gcore.ledger import transactions

BARE = ("reseal without seal",)
"""Noticed by the first seeds of the bare protocol."""
WHOLE = (
    "2 an update before READY",
    "14 committed before it is trained",
    "recovery: a world that lost a rank is left",
    "publishing: engines keep old weights",
)
"""Noticed by the first seeds of whole clusters."""


@pytest.mark.parametrize("name", BARE)
def test_a_compare_that_is_taken_out_is_noticed_by_the_bare_protocol(name: str) -> None:
    assert not bare(3)
    with MUTATIONS[name].applied():
        assert any(bare(seed) for seed in range(12))


@pytest.mark.parametrize("name", WHOLE)
def test_a_rule_that_is_taken_out_is_noticed_by_whole_clusters(name: str) -> None:
    with MUTATIONS[name].applied():
        assert any(whole(seed) for seed in range(6))


def test_every_transaction_on_a_jobs_records_has_a_mutation_for_each_compare() -> None:
    """A new transaction must be put into the table."""
    tree = ast.parse(Path(transactions.__file__).read_text())
    made = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.returns, ast.Name)
        and node.returns.id == "Transaction"
        and node.args.args[0].arg == "keys"
    }
    assert made - {"create"} <= COMPARED.keys(), "give the new transactions' compares to tests/support/mutations.py"
    assert COMPARED.keys() <= made


def test_each_numbered_rule_of_the_protocol_has_a_mutation() -> None:
    assert {mutation.rule for mutation in MUTATIONS.values()} >= set(map(str, range(1, 18)))
