"""The count of random mutants that a subject's tests kill."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.problem import ROOT
from tools.random_mutants import chosen, modules_of, mutants_of

MODULE = '''
def size(values: list[int], least: int = 2) -> int:
    """Of the values; 2 at least."""
    if not values or least < 1:
        return least
    values.sort()
    return max(least, len(values) + 0)
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one subject, whose tests look at one of its two functions."""
    files = {
        "gcore/sizes/a.py": MODULE,
        "gcore/__init__.py": "",
        "gcore/sizes/__init__.py": "",
        "tests/unit/sizes/test_a.py": "from gcore.sizes.a import size\n\n"
        "def test_size():\n    assert (size([]), size([], 1), size([3, 1, 2], 1), size([1], 0)) == (2, 1, 3, 0)\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ["
        + ", ".join(
            f"'{name}'"
            for name in [
                "serial",
                "gpu",
                "sglang",
                "vllm",
                "trackers",
                "deploy",
                "notebook",
                "chaos",
                "large",
                "documents",
            ]
        )
        + "]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_mutant_changes_one_expression_or_statement_and_no_words() -> None:
    assert [(one.line, one.was, one.text) for one in mutants_of("a.py", MODULE.encode())] == [
        (2, "2", "(3)"),
        (4, "not values or least < 1", "(not values and least < 1)"),
        (4, "not values", "(values)"),
        (4, "least < 1", "(least <= 1)"),
        (4, "1", "(2)"),
        (6, "values.sort()", "pass"),
        (7, "len(values) + 0", "(len(values) - 0)"),
        (7, "0", "(1)"),
    ]


def test_the_seed_chooses_mutants_of_all_modules_that_can_be_parsed() -> None:
    modules = modules_of(ROOT, "store")
    first, again, other = (chosen(ROOT, modules, 60, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len({one.module for one in first}) > 3
    for one in first:
        ast.parse(one.apply((ROOT / one.module).read_bytes()))


def test_survivors_are_printed_and_the_killed_are_counted(tree: Path) -> None:
    command = [sys.executable, "-m", "tools.random_mutants", "sizes", "--tree", str(tree), "--count", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *survivors, counted = done.stdout.splitlines()
    found = json.loads(counted)
    assert (found["subject"], found["mutants"], found["killed"]) == ("sizes", 3, 3 - len(survivors))
    assert all(line.startswith("survives: gcore/sizes/a.py:") for line in survivors)
    assert found["killed"] >= 1
    assert (tree / "gcore/sizes/a.py").read_text() == MODULE
