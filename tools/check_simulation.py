"""Check that the simulation decides, seals and commits nothing itself: production's modules make what is written.

Reads the sources of the simulation's modules: what they construct, what they define, what they write to the store.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.problem import Problem, main, nodes, parsed, relative, sources

SUPPORT = "tests/support"
BARE = f"{SUPPORT}/step_simulation.py"
PEOPLE = f"{SUPPORT}/people.py"
"""What people write, and no controller: quotas, pauses, drained nodes. Nothing of a job's chain."""

RECORDS = {
    *("Head", "LogEntry", "Seal", "SealedGroup", "Checkpoints", "Assignment", "Tally", "Cursors", "Lineage", "Advance"),
    *("Offer", "Checkpoint", "NodeFolder", "Member", "Plan"),
}
"""Classes that only production constructs: records."""
DECIDED = {
    *("Intent", "SealStep", "CloseStep", "MakeSeal", "RecordOutcomes", "CommitStep", "GiveUpBatch", "MarkBatchReady"),
    *("Rollback", "RegisterCheckpoint", "RetainCheckpoints", "PruneLog", "Transaction", "Compare"),
}
"""Classes that only production constructs: decisions and transactions."""
FUNCTIONS = {
    "decide",
    "choose_seal",
    "due_refs",
    "commit",
    "commit_entry",
    "seal_slot",
    "reseal_slot",
    "ready_slot",
    "rollback_entry",
}
"""Functions that only production defines."""
STANDS_FOR = {
    "Offer": "there is no peer that would say what it holds",
    "Plan": "there is no placement: the worlds of a seed stand where it says",
    "Checkpoint": "there is no rank that would have written the file",
    "commit": "a method that is one of the events: it makes the transaction that the ledger gives it",
}
"""The definitions that the bare protocol's simulation has of its own, and why: it uses only the rules and the transactions, and replaces
the rest of a cluster. A simulation of whole clusters has none of these.
"""


def check(root: Path) -> Iterator[Problem]:
    yield from names_exist(root)
    whole = whole_clusters(root)
    others = sorted((root / "tests" / "sim").glob("*.py"))
    for file in [*whole, root / BARE, root / PEOPLE, *others]:
        path = relative(file, root)
        yield from of_its_own(
            path, parsed(file.read_text(encoding="utf-8")), set(STANDS_FOR) if path == BARE else set()
        )
    for file in whole:
        yield from writes_itself(relative(file, root), parsed(file.read_text(encoding="utf-8")))
    yield from parts_are_checked(whole, root)


def whole_clusters(root: Path) -> list[Path]:
    """The simulation of whole clusters: each module that is called so, also one that is still to come."""
    folder = root / SUPPORT
    return [*sorted(folder.glob("simulated_*.py")), folder / "virtual_time.py", folder / "invariants.py"]


def names_exist(root: Path) -> Iterator[Problem]:
    """A name that the product has lost would be looked for in vain."""
    every = [node for _, _, tree in sources(root) for node in nodes(tree)]
    classes = {node.name for node in every if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in every if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for name in sorted((RECORDS | DECIDED) - classes | FUNCTIONS - functions):
        yield Problem("tools/check_simulation.py", 1, f"the product defines no {name}: write its new name here")


def of_its_own(path: str, tree: ast.Module, allowed: set[str]) -> Iterator[Problem]:
    """What is production's to construct or define, and is constructed or defined here; and exceptions not needed."""
    found = set[str]()
    for node in nodes(tree):
        name = ""
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            what = f"constructs {name}" if name in RECORDS | DECIDED else ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
            what = f"defines {name}" if name in FUNCTIONS else ""
        else:
            continue
        if what:
            found.add(name)
            if name not in allowed:
                yield Problem(path, node.lineno, f"{what}: let production do it")
    for name in sorted(allowed - found):
        yield Problem(path, 1, f"STANDS_FOR of tools/check_simulation.py allows {name}, which is not here: delete it")


def writes_itself(path: str, tree: ast.Module) -> Iterator[Problem]:
    """All transactions of whole clusters but the job's creation come from production."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and "Put" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
            yield Problem(path, node.lineno, "puts a record itself: let production write it")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            if owner in ("transactions", "chain") and node.attr != "create":
                yield Problem(path, node.lineno, f"calls {owner}.{node.attr}: let production call it")


def parts_are_checked(whole: list[Path], root: Path) -> Iterator[Problem]:
    """A module of the support folder that the simulation of whole clusters imports belongs to it."""
    names = {file.stem for file in whole} | {Path(PEOPLE).stem}
    for file in whole:
        for node in nodes(parsed(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.module in names:
                continue
            if (root / SUPPORT / f"{node.module}.py").exists():
                message = f"imports {node.module}, which is not checked: call it simulated_*"
                yield Problem(relative(file, root), node.lineno, message)


if __name__ == "__main__":
    sys.exit(main({"simulation": check}, __doc__))
