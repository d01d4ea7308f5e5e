"""A module that calls itself pure can neither wait, ask, nor draw: it imports nothing with which it could."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPURE = ("time", "asyncio", "grpc", "random", "secrets", "uuid", "httpx", "subprocess", "gcore.clock", "gcore.store")
PLAIN = ("gcore.store.types", "gcore.store.keys", "gcore.store.lease_times")
"""Of the store: what is said to it, not how."""


def claims() -> list[Path]:
    """The modules that say so of themselves."""
    found = []
    for package in ("gcore", "controllers", "placement"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if re.search(r"(^|[.:] )Pure\b", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE):
                found.append(path.relative_to(ROOT))
    return found


def imported(path: Path) -> Iterator[str]:
    """By the module itself, wherever in it, but for types only."""
    tree = ast.parse((ROOT / path).read_text())
    typing = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("path", claims(), ids=str)
def test_what_calls_itself_pure_is(path: Path) -> None:
    assert [name for name in imported(path) if within(name, IMPURE) and not within(name, PLAIN)] == []


def test_the_claims_are_found() -> None:
    assert {Path("controllers/lost.py"), Path("placement/plan.py"), Path("gcore/ledger/sweeping.py")} <= set(claims())
