"""The simulation decides, seals and commits nothing itself: whatever is written to the store is made by production's modules.

Read from the source: what the simulation's modules import from the ledger, what they construct, and what they write.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
WHOLE = (
    "simulated_cluster",
    "simulated_story",
    "simulated_faults",
    "simulated_ends",
    "simulated_controller",
    "simulated_workers",
    "simulated_network",
    "virtual_time",
    "invariants",
)
"""Of the simulation of whole clusters."""
MODULES = [SUPPORT / f"{name}.py" for name in (*WHOLE, "step_simulation")] + sorted(Path(__file__).parent.glob("*.py"))

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
    """Names of functions at the top of the module."""
    return {n.name for n in getattr(tree, "body", []) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_no_module_of_the_simulation_makes_a_record_of_the_chain_or_decides(module: Path) -> None:
    tree = ast.parse(module.read_text())
    assert not constructed(tree) & RECORDS
    assert not constructed(tree) & DECIDED
    assert not defined(tree) & NAMES


@pytest.mark.parametrize("name", WHOLE)
def test_in_whole_clusters_all_transactions_but_the_jobs_creation_are_productions(name: str) -> None:
    """They come from `controllers.apply`; the simulation calls none of the ledger's, and puts nothing itself."""
    tree = ast.parse((SUPPORT / f"{name}.py").read_text())
    assert "Put" not in constructed(tree)
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("transactions", "chain")
    }
    assert used <= {"create"}


def test_the_rule_would_notice_a_seal_of_the_simulations_own() -> None:
    own = ast.parse("def commit(seal):\n    return Head(seq=1)\n")
    assert constructed(own) & RECORDS
    assert defined(own) & NAMES
