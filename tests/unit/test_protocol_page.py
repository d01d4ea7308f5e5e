"""The page on the step protocol: every test that it names exists, and no rule, failure or limit is without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gcore.schema import NEWEST_VERSION

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:unit|integration|contract|sim)/\w+\.py)::(\w+)`", PAGE)))
FILES = sorted({file for file, _ in NAMED})


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def rows(title: str) -> list[str]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return lines[2:]


@pytest.mark.parametrize("file", FILES)
def test_every_test_that_it_names_exists(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for named, name in NAMED if named == file} <= there


def test_there_are_all_rules_and_each_is_shown() -> None:
    found = rows("The rules")
    assert [row.split("|")[1].strip() for row in found] == [str(number) for number in range(1, 18)]
    assert all("::test_" in row for row in found)


@pytest.mark.parametrize("title", ["What a failure means", "Limits"])
def test_each_row_of_a_table_is_shown(title: str) -> None:
    assert len(rows(title)) >= 7
    assert all("::test_" in row for row in rows(title))


def test_it_tells_the_versions_that_there_are() -> None:
    assert f"this gcore is of version {NEWEST_VERSION} and reads version {NEWEST_VERSION - 1}" in PAGE
