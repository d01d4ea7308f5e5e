"""The simulations notice when a compare or a rule of the protocol is taken out. A few of them; all with `make mutations`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mutants import bare, caught, whole
from mutations import COMPARED, MUTATIONS, Broken, Mutation

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


def _asks_for_what_is_not_there(make: Any) -> Any:
    return lambda keys, old, new: make(keys, old, new.no_such_field)


def _caught_by_whoever_walks_it(make: Any) -> Any:
    def rule(view: Any) -> Iterator[Any]:
        yield from make(view, "no such argument")

    return rule


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(("gcore.ledger.transactions:assign", _asks_for_what_is_not_there), id="a function"),
        pytest.param(("controllers.decide:assigning", _caught_by_whoever_walks_it), id="a rule"),
    ],
)
def test_a_mutation_that_raises_errors_of_its_own_is_broken_and_not_noticed(
    monkeypatch: pytest.MonkeyPatch, patch: tuple[str, Callable[[Any], Any]]
) -> None:
    monkeypatch.setitem(MUTATIONS, "of today", Mutation("of today", "1", (patch,), caught_by=""))
    with pytest.raises(Broken, match="'of today' is itself wrong: line"):
        caught("of today", bare_seeds=1, whole_seeds=1)


def test_tests_that_cannot_be_run_notice_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "assign without assign"
    monkeypatch.setitem(MUTATIONS, name, replace(MUTATIONS[name], caught_by="tests/unit/no_such_file.py"))
    with pytest.raises(Broken, match="no_such_file"):
        caught(name, bare_seeds=0, whole_seeds=0)
