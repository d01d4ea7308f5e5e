"""The checker of the simulation finds decisions and writes of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from planted import repository

from tools import check_simulation
from tools.problem import ROOT


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def commit(seal):\n    return Head(seq=1)\n", ["defines commit", "constructs Head"]),
        (
            "class Rank:\n    async def commit(self):\n        return records.Checkpoint(seq=1)\n",
            ["defines commit", "constructs Checkpoint"],
        ),
        (
            "def rank():\n    def choose_seal():\n        return SealStep()\n",
            ["defines choose_seal", "constructs SealStep"],
        ),
        ("def trains(seal):\n    return Receipt(seal.token)\n", []),
    ],
    ids=["a function", "a method", "within another", "nothing"],
)
def test_own_rules_of_the_simulation_are_found(source: str, found: list[str]) -> None:
    problems = check_simulation.of_its_own("x.py", ast.parse(source), set())
    assert sorted(problem.message.partition(":")[0] for problem in problems) == sorted(found)


def test_an_exception_lets_its_name_pass_and_is_an_error_when_not_needed() -> None:
    tree = ast.parse("Plan()")
    assert list(check_simulation.of_its_own("x.py", tree, {"Plan"})) == []
    (problem,) = check_simulation.of_its_own("x.py", tree, {"Plan", "Offer"})
    assert "allows Offer, which is not here" in problem.message


def test_each_fault_in_the_simulation_of_whole_clusters_is_found(tmp_path: Path) -> None:
    root = repository(tmp_path, "tests", "gcore")
    (root / check_simulation.SUPPORT / "simulated_planted.py").write_text(
        "from planted import plant\nstore.transact((), [Put(key, value)])\nchain.base(1)\ntransactions.create(x)\n"
    )
    for file in (root / "gcore").rglob("*.py"):
        if "class SealedGroup" in (text := file.read_text()):
            file.write_text(text.replace("class SealedGroup", "class GroupSealed"))
    found = [str(problem) for problem in check_simulation.check(root)]
    where = "tests/support/simulated_planted.py"
    assert found == [
        "tools/check_simulation.py:1: the product defines no SealedGroup: write its new name here",
        f"{where}:3: calls chain.base: let production call it",
        f"{where}:2: puts a record itself: let production write it",
        f"{where}:1: imports planted, which is not checked: call it simulated_*",
    ]


def test_every_part_of_the_simulation_of_whole_clusters_is_read() -> None:
    names = {file.stem for file in check_simulation.whole_clusters(ROOT)}
    assert {"simulated_cluster", "simulated_files", "simulated_controller", "simulated_workers"} <= names
