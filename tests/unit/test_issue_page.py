"""The table of docs/dynamic-sampling.md says what the committed result says."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def issue(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("page", "issue_ahead"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("issue_ahead")


def test_the_table_is_that_of_the_committed_result(issue: Any) -> None:
    result = json.loads((issue.RESULTS / "issue_ahead.json").read_text())
    written = issue.PAGE.read_text()
    assert issue.page(result, written) == written, "run `python benchmarks/issue_ahead.py --page`"
    assert issue.rows(result) in written


def test_the_simulation_is_the_same_everywhere(issue: Any) -> None:
    """Virtual time and fixed seeds: one small case again, to the digit."""
    one, again = (issue.Generation(issue_rules(issue, 4.0), 0.5, 16, 3) for _ in range(2))
    for generation in (one, again):
        for _ in range(4):
            generation.step()
    assert (one.now, one.made_tokens, one.used_tokens) == (again.now, again.made_tokens, again.used_tokens)
    assert 0 < one.used_tokens <= one.made_tokens


def test_without_a_filter_the_cap_changes_nothing(issue: Any) -> None:
    one, other = (issue.Generation(issue_rules(issue, cap), 0.0, 16, 3) for cap in (1.0, 4.0))
    for generation in (one, other):
        for _ in range(4):
            generation.step()
    assert (one.now, one.made_tokens) == (other.now, other.made_tokens)
    assert one.made_tokens == one.used_tokens


def issue_rules(issue: Any, cap: float) -> Any:
    return issue.StreamRules(issue.shard_lengths(2000, 16), window=64, quota=8, issue_cap=cap)
