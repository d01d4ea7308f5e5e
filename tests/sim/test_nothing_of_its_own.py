"""The simulation decides, seals and commits nothing itself: whatever is written to the store is made by production's modules.

Read from the source: what the simulation's modules import from the ledger, what they construct, and what they write.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
WHOLE = [*sorted(SUPPORT.glob("simulated_*.py")), SUPPORT / "virtual_time.py", SUPPORT / "invariants.py"]
"""Of the simulation of whole clusters: each module that is called so, also one that is still to come."""
BARE = SUPPORT / "step_simulation.py"
PEOPLE = SUPPORT / "people.py"
"""What people write, and no controller: quotas, pauses, drained nodes. Nothing of a job's chain."""
MODULES = [*WHOLE, BARE, PEOPLE, *sorted(Path(__file__).parent.glob("*.py"))]

RECORDS = {
    "Head",
    "LogEntry",
    "Seal",
    "SealedGroup",
    "Checkpoints",
    "Assignment",
    "Tally",
    "Cursors",
    "Lineage",
    "Advance",
    "Offer",
    "Checkpoint",
    "NodeFolder",
    "Member",
    "Plan",
}
"""What only production makes."""
DECIDED = {
    "Intent",
    "SealNow",
    "AccountNow",
    "MakeSeal",
    "Account",
    "Commit",
    "Reseal",
    "Ready",
    "Rollback",
    "Register",
    "Retain",
    "Prune",
    "Transaction",
    "Compare",
}
NAMES = {"decide", "seal_now", "choose", "due", "commit", "committed", "sealed", "resealed", "readied", "rolled_back"}
"""Functions of these names are production's."""
STANDS_FOR = {
    "Offer": "there is no peer that would say what it holds",
    "Plan": "there is no placement: the worlds of a seed stand where it says",
    "Checkpoint": "there is no rank that would have written the file",
    "commit": "a method that is one of the events: it makes the transaction that `gcore.ledger.transactions` gives it",
    "due": "a method that asks production's rule of that name, with what this controller sees",
}
"""What the bare protocol has of its own, and why: it has only the rules and the transactions, and stands for the rest of a
cluster itself. A simulation of whole clusters has none of it."""


def constructed(tree: ast.AST) -> set[str]:
    """Names that are called, and last parts of dotted ones."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            found.add(
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
    return found


def defined(tree: ast.AST) -> set[str]:
    """Names of functions, of methods too, and of those within others."""
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def of_its_own(tree: ast.AST) -> set[str]:
    """What is production's to make, and is made or defined here."""
    return constructed(tree) & (RECORDS | DECIDED) | defined(tree) & NAMES


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_no_module_of_the_simulation_makes_a_record_of_the_chain_or_decides(module: Path) -> None:
    excepted = STANDS_FOR.keys() if module == BARE else set()
    assert of_its_own(ast.parse(module.read_text())) == excepted


def test_every_part_of_the_simulation_of_whole_clusters_is_looked_at() -> None:
    names = {module.stem for module in WHOLE}
    assert {"simulated_cluster", "simulated_files", "simulated_controller", "simulated_workers"} <= names
    parts = {
        node.module
        for module in WHOLE
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and (SUPPORT / f"{node.module}.py").exists()
    }
    assert parts <= names | {PEOPLE.stem}


@pytest.mark.parametrize("module", WHOLE, ids=[module.stem for module in WHOLE])
def test_in_whole_clusters_all_transactions_but_the_jobs_creation_are_productions(module: Path) -> None:
    """They come from `controllers.apply`; the simulation calls none of the ledger's, and puts nothing itself."""
    tree = ast.parse(module.read_text())
    assert "Put" not in constructed(tree)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("transactions", "chain")
    }
    assert used <= {"create"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def commit(seal):\n    return Head(seq=1)\n", {"commit", "Head"}),
        (
            "class Rank:\n    async def commit(self):\n        return records.Checkpoint(seq=1)\n",
            {"commit", "Checkpoint"},
        ),
        ("def rank():\n    def choose():\n        return SealNow()\n", {"choose", "SealNow"}),
        ("def trains(seal):\n    return Receipt(seal.token)\n", set()),
    ],
    ids=["a function", "a method", "within another", "nothing"],
)
def test_the_rule_would_notice_what_is_of_the_simulations_own(source: str, found: set[str]) -> None:
    assert of_its_own(ast.parse(source)) == found
