"""Every ratio of a committed result has a limit, the results are within the limits, and a regression is found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import bounds, run
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


def live_engine() -> dict[str, Any]:
    return {"engine": copy.deepcopy(bounds.recorded()["check"]["engine"])}


def test_of_a_part_only_its_own_ratios_are_compared() -> None:
    part = live_engine()
    part["engine"]["cases"] = part["engine"]["cases"][:1]
    found = bounds.findings({"check": part}, LIMITS, again=True)
    assert [one.name for one in found] == ["check: engine, equal"]


def test_missed_limit_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = live_engine(), live_engine()
    bad["engine"]["cases"][0]["own_ratio"]["median"] *= 0.5
    for measurements, holds in (([good], True), ([bad, good], True), ([bad, bad], False)):
        left = iter(measurements)
        monkeypatch.setattr(bounds, "measured", lambda _, left=left: next(left))
        assert bounds.check(parts=["engine"]) == holds
        assert list(left) == []
    assert "MISSED" in capsys.readouterr().out


def test_every_limit_that_is_measured_again_is_missed_with_a_planted_slow_down() -> None:
    again = {name: limit for name, limit in LIMITS.items() if name.startswith("check: ")}
    assert {name.removeprefix("check: ") for name in again} == set(bounds.recorded()["check"]["slowed"])
    for name, limit in again.items():
        assert not bounds.Finding(name, limit["slowed"], limit["limit"], limit["better"]).holds, name


def test_with_planted_slow_downs_a_limit_that_holds_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = live_engine()
    for case in slow["engine"]["cases"]:
        case["own_ratio"]["median"] *= 0.5
    for result, noticed in ((slow, True), (live_engine(), False)):
        monkeypatch.setattr(bounds, "measured", lambda _, *, slowed, result=result: result)
        assert bounds.check_slowed(parts=["engine"]) == noticed


def test_the_measured_parts_say_the_load_of_the_machine() -> None:
    recorded = bounds.recorded()["check"]
    for part in bounds.LIVE:
        assert {"load_before", "load_after"} <= set(recorded[part]), part


def test_every_result_can_be_made_again_by_its_command() -> None:
    targets = (bounds.ROOT / "Makefile").read_text()
    for command in {limit["command"] for limit in LIMITS.values()}:
        words = command.split()
        if words[0] == "make":
            assert f"\n{words[1]}: " in targets, command
        elif words[:4] == ["python", "-m", "benchmarks", "run"]:
            assert words[4] in run.MODULES, command
        else:
            assert words == ["python", "-m", "benchmarks", "check", "--write", "--measure"]


def test_a_margin_is_half_of_the_range_where_pairs_were_measured() -> None:
    ratio = {"median": 1.0, "least": 0.7, "most": 1.3, "count": 5}
    assert bounds.PAIRS.of(ratio) == 0.3
    assert bounds.PAIRS.of(ratio | {"least": 0.99, "most": 1.01}) == bounds.PAIRS.least
    assert bounds.SIMULATED.of(ratio) == bounds.SIMULATED.least
