"""The simulations detect a removed compare or rule of the protocol. This file tries a few; `make mutations` tries all."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from mutants import ROOT, bare, caught, whole
from mutations import COMPARED, MUTATIONS, Broken, Mutation

BARE = ("reseal without seal",)
"""Noticed by the first seeds of the bare protocol."""
WHOLE = {
    "2 an update before READY": 0,
    "14 committed before it is trained": 0,
    "recovery: a world that lost a rank is left": 6,
    "publishing: engines keep old weights": 0,
}
"""Noticed by whole clusters of one of the nine seeds from this one on."""
LONG = ("2 an update before READY",)
"""Noticed only when a cluster makes no progress for a long simulated time."""


@pytest.mark.parametrize("name", BARE)
def test_a_compare_that_is_taken_out_is_noticed_by_the_bare_protocol(name: str) -> None:
    assert not bare(3)
    with MUTATIONS[name].applied():
        assert any(bare(seed) for seed in range(12))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.large] * (name in LONG)) for name in WHOLE])
def test_a_rule_that_is_taken_out_is_noticed_by_whole_clusters(name: str) -> None:
    with MUTATIONS[name].applied():
        assert any(whole(seed) for seed in range(WHOLE[name], WHOLE[name] + 9))


@cache
def production() -> tuple[tuple[str, ast.Module], ...]:
    """Each module's name and tree."""
    paths = (path for folder in ("gcore", "controllers", "placement") for path in (ROOT / folder).rglob("*.py"))
    return tuple(
        (".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())) for path in paths
    )


def test_every_transaction_on_a_jobs_records_has_a_mutation_for_each_compare() -> None:
    """A new one must be put into the table; that each compares what the table says is shown among the rules."""
    made = {
        node.name
        for module, tree in production()
        if module.startswith("gcore.ledger.")
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if isinstance(node.returns, ast.Name) and node.returns.id == "Transaction"
    }
    # `keeping_to` adds a compare to those of others: its mutation is among the rules.
    # `put_if_unchanged` makes the transactions of one key; each of them is in the table under its own name.
    assert made - {"keeping_to", "put_if_unchanged"} == COMPARED.keys(), (
        "give the new transactions' compares to tests/support/mutations.py"
    )


def test_no_transaction_on_a_jobs_records_is_made_outside_the_ledger() -> None:
    """A transaction elsewhere would escape the check of its compares."""
    for module, tree in production():
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        builds = any(isinstance(func, ast.Name) and func.id == "Transaction" for func in calls)
        assert not builds or module.startswith("gcore.ledger."), module


CALLED_BY_NOBODY: dict[str, str] = {}
"""Functions that are kept although production does not call them, with the reason."""


def called_in_production() -> set[str]:
    """ "module:name" of what a module of production uses, of another's or its own; "Class.name" and ".name" of attributes."""
    called: set[str] = set()
    for module, tree in production():
        imported = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                called |= {f"{module}:{node.id}", "{}:{}".format(*imported.get(node.id, ("", "")))}
            elif isinstance(node, ast.Attribute):
                called.add(f".{node.attr}")
                if isinstance(node.value, ast.Name):
                    called.add(f"{node.value.id}.{node.attr}")
                    called.add("{}.{}:{}".format(*imported.get(node.value.id, ("", "")), node.attr))
    return called


def test_nothing_is_mutated_that_production_does_not_call() -> None:
    """Otherwise only tests would run the mutated code, and the effect on production would be unknown."""
    called, dead = called_in_production(), set()
    for where, _ in (patch for mutation in MUTATIONS.values() for patch in mutation.patches):
        path, _, name = where.partition(":")
        owner, _, method = name.rpartition(".")
        if not owner:
            known = where
        elif isinstance(vars(getattr(importlib.import_module(path), owner))[method], classmethod):
            known = name
        else:
            known = f".{method}"
        if known not in called:
            dead.add(where)
    assert dead == CALLED_BY_NOBODY.keys()


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
        pytest.param(("controllers.rules.decide:assign_shards", _caught_by_whoever_walks_it), id="a rule"),
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
