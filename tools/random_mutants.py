"""Count how many random mutants of a subject its tests kill.

    python -m tools.random_mutants ledger                        # 60 mutants of gcore/ledger, seed 0, 5 s beside the plain run
    python -m tools.random_mutants reward --tree ../earlier      # the same for another checkout
    python -m tools.random_mutants store --modules gcore/store/retry.py --tests tests/unit/store/test_retry.py

A mutant is one change of one expression or statement of a module. The seed chooses the mutants from the sources alone, so two
checkouts with the same sources get the same ones. The tests run in a copy of the checkout. A mutant is killed when a test
fails or when the tests take more than three times as long as without it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.problem import ROOT

FOLDERS = ("gcore", "placement", "controllers")
NOT_HERE = (
    "not serial and not gpu and not sglang and not vllm and not hf and not trackers and not deploy and not notebook and not chaos and not large "
    "and not documents"
)
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change: these bytes of `module` become `text`."""

    module: str
    line: int
    begin: int
    end: int
    text: str
    was: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.was!r} -> {self.text!r}"

    def apply(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


def mutants_of(module: str, source: bytes) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _walk(ast.parse(source)):
        for text in _changed(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(module, node.lineno, begin, end, text, " ".join(source[begin:end].decode().split()))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs: no annotations, no blocks for type checkers, no messages and no logs."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr | ast.Raise | ast.AnnAssign | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from _walk(child)


def _changed(node: ast.AST) -> list[str]:
    """Replacements for a node, in parentheses where it is an expression."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            changed: ast.AST = ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp() if type(node.op) in ARITHMETIC and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            changed = ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.BoolOp():
            changed = ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            changed = node.operand
        case ast.IfExp():
            changed = ast.IfExp(node.test, node.orelse, node.body)
        case ast.Constant(value=bool() as value):
            changed = ast.Constant(not value)
        case ast.Constant(value=int() as value):
            changed = ast.Constant(value + 1)
        case ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Await()) | ast.Continue() | ast.Break():
            return ["pass"]
        case _:
            return []
    return [f"({ast.unparse(changed)})"]


def chosen(tree: Path, modules: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many as there are at most."""
    every = [mutant for module in sorted(modules) for mutant in mutants_of(module, (tree / module).read_bytes())]
    return random.Random(seed).sample(every, min(count, len(every)))


def modules_of(tree: Path, subject: str) -> list[str]:
    """The modules of `gcore/SUBJECT`, `controllers/SUBJECT` or of the whole package SUBJECT."""
    folders = [tree / subject] if subject in FOLDERS else [tree / parent / subject for parent in FOLDERS]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return [str(path.relative_to(tree)) for path in found if path.name not in ("__init__.py", "__main__.py")]


def tests_of(tree: Path, subject: str) -> list[str]:
    """The folders that `make test-SUBJECT` runs."""
    folders = [f"tests/{kind}/{subject}" for kind in ("unit", "contract")]
    return [folder for folder in folders if (tree / folder).is_dir()]


class Tests:
    """The tests of a subject, in a copy of a checkout."""

    def __init__(self, copy: Path, tests: list[str], limit_s: float) -> None:
        self.copy = copy
        self.tests = tests
        self.limit_s = limit_s

    def fail(self) -> bool:
        """Run them to the first failure."""
        command = [
            sys.executable,
            "-B",
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            NOT_HERE,
            *self.tests,
        ]
        environment = os.environ | {"PYTHONPATH": str(self.copy), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            return process.wait(self.limit_s) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Print each mutant that survives, then the count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--modules", nargs="+", help="paths below the checkout, instead of the subject's")
    parser.add_argument("--tests", nargs="+", help="paths below the checkout, instead of the subject's")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tree = options.tree.resolve()
    modules = options.modules or modules_of(tree, options.subject)
    names = options.tests or tests_of(tree, options.subject)
    if not modules or not names:
        parser.error(f"no modules or no tests of {options.subject!r}")
    mutants = chosen(tree, modules, options.count, options.seed)
    with tempfile.TemporaryDirectory(prefix="gcore-mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(
            tree, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".cache", "__pycache__", ".*_cache")
        )
        tests = Tests(copy, names, 3600.0)
        began = time.monotonic()
        if tests.fail():
            print("the tests fail without a mutant")
            return 1
        tests.limit_s = 3 * (time.monotonic() - began) + 5
        survivors = []
        for mutant in mutants:
            module = copy / mutant.module
            source = module.read_bytes()
            module.write_bytes(mutant.apply(source))
            if not tests.fail():
                survivors.append(str(mutant))
                print(f"survives: {mutant}", flush=True)
            module.write_bytes(source)
    killed = len(mutants) - len(survivors)
    print(json.dumps({"subject": options.subject, "seed": options.seed, "mutants": len(mutants), "killed": killed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
