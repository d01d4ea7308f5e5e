"""What a checker reports, and how a checker is run as a program."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("gcore", "controllers", "placement")
GENERATED = "gcore/api/v1/"


@dataclass(frozen=True, order=True)
class Problem:
    path: str
    """Relative to the root of the repository."""
    line: int
    message: str
    """What is wrong, with which value; what to do."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Check = Callable[[Path], Iterable[object]]
"""Takes the root of a repository; returns what is wrong, each printed as a line."""


def line_of(text: str, part: str) -> int:
    """The line, from 1, on which the first occurrence of a part begins; 1 if it does not occur."""
    place = text.find(part)
    return text.count("\n", 0, place) + 1 if place >= 0 else 1


def relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file)


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a text; several checkers read one module."""
    return ast.parse(text)


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree; several checkers walk over one module."""
    return list(ast.walk(tree))


def sources(root: Path, packages: tuple[str, ...] = PRODUCT) -> Iterator[tuple[str, str, ast.Module]]:
    """(path, text, tree) of each hand-written product module."""
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            path = relative(file, root)
            if not path.startswith(GENERATED):
                text = file.read_text(encoding="utf-8")
                yield path, text, parsed(text)


def main(checks: dict[str, Check], description: str | None, arguments: list[str] | None = None) -> int:
    """Run the checks, print every problem and return 1 if there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if len(checks) > 1:
        parser.add_argument("only", nargs="*", metavar="CHECK", help=f"run only these: {', '.join(checks)}")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: the one of this program)")
    given = parser.parse_args(arguments)
    if unknown := [name for name in getattr(given, "only", ()) if name not in checks]:
        parser.error(f"no check is called {unknown[0]}: choose from {', '.join(checks)}")
    found = 0
    for name in getattr(given, "only", None) or checks:
        for problem in checks[name](given.root):
            print(problem)
            found += 1
    return 1 if found else 0
