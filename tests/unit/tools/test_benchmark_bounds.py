"""Every ratio of a committed result has a limit, the results keep them, and one that becomes worse is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import bounds
from benchmarks.harness import RESULTS

LIMITS: dict[str, Any] = json.loads(bounds.FILE.read_text())


def missed(results: dict[str, Any], limits: dict[str, Any] = LIMITS) -> list[str]:
    return [one.name for one in bounds.findings(results, limits) if not one.holds]


def test_every_result_has_bounds_or_a_reason_to_have_none() -> None:
    bounded = {bound.result for bound in bounds.BOUNDS}
    assert {file.stem for file in RESULTS.glob("*.json")} == bounded | set(bounds.WITHOUT)


def test_the_committed_results_keep_their_limits() -> None:
    assert missed(bounds.recorded()) == []


def test_a_limit_says_what_it_was_derived_from() -> None:
    for name, limit in LIMITS.items():
        assert limit["count"] >= 1, name
        assert all(limit[key] for key in ("why", "date", "commit", "machine", "command")), name
        if limit["margin"] is not None:
            sign = -1 if limit["better"] == "more" else 1
            assert limit["limit"] == pytest.approx(limit["median"] * (1 + sign * limit["margin"]), abs=1e-4), name


def slower_engine(results: dict[str, Any]) -> None:
    results["engine"]["cases"][0]["ratio"]["median"] *= 0.5


def failed_seed(results: dict[str, Any]) -> None:
    results["sim"]["failed_seeds"].append(7)


def more_writes(results: dict[str, Any]) -> None:
    results["control_plane"]["writes"]["median"] = 11.0


@pytest.mark.parametrize(
    ("worsen", "name"),
    [
        (slower_engine, "engine: equal"),
        (failed_seed, "sim: seeds that failed, of all"),
        (more_writes, "control_plane: writes a controller and step"),
    ],
)
def test_a_result_that_became_worse_is_found(worsen: Callable[[dict[str, Any]], None], name: str) -> None:
    results = copy.deepcopy(bounds.recorded())
    worsen(results)
    assert missed(results) == [name]


def test_a_ratio_that_is_gone_and_one_without_a_limit_are_found() -> None:
    results = copy.deepcopy(bounds.recorded())
    results["engine"]["cases"][0]["case"] = "renamed"
    assert missed(results) == ["engine: equal", "engine: renamed has no limit in bounds.json"]


def test_of_a_smaller_measurement_only_its_own_ratios_are_compared() -> None:
    engine = copy.deepcopy(bounds.recorded()["engine"])
    engine["cases"] = engine["cases"][:1]
    found = bounds.findings({"engine": engine}, LIMITS, again=True)
    assert [one.name for one in found] == ["engine: equal"]


def test_what_misses_its_limit_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = bounds.recorded()["engine"]
    bad = copy.deepcopy(good)
    slower_engine({"engine": bad})
    monkeypatch.setattr(bounds, "LIVE", {"engine": ("engine",)})
    for measurements, holds in (([good], True), ([bad, good], True), ([bad, bad], False)):
        left = iter(measurements)
        monkeypatch.setattr(bounds, "measured", lambda _, left=left: {"engine": next(left)})
        assert bounds.check(measure=True) == holds
        assert list(left) == []
    assert "MISSED" in capsys.readouterr().out


def test_a_margin_is_half_of_the_range_where_pairs_were_measured() -> None:
    ratio = {"median": 1.0, "least": 0.7, "most": 1.3, "count": 5}
    assert bounds.PAIRS.of(ratio) == 0.3
    assert bounds.PAIRS.of(ratio | {"least": 0.99, "most": 1.01}) == bounds.PAIRS.least
    assert bounds.SIMULATED.of(ratio) == bounds.SIMULATED.least
