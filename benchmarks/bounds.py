"""Bounds of the results, and the check of them: `python -m benchmarks check` (`make bench-check`).

A bound is on a ratio, never on an absolute time, so it holds on another machine. `BOUNDS` says which ratios of which result have one and how
much worse they may become; `bounds.json` has the limits, derived from the committed results by `check --write`. A result that was measured
again is compared with the limits from before, so a slower engine fails the check until the limits are derived again, on purpose.

The ratios of the engine, the trainer, the control plane and the start are measured again by the check, in alternating pairs (`LIVE`). A ratio
that misses its limit is measured once more, because the machine may be shared; the check fails if it misses again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import RESULTS, ROOT, Result, circumstances, read_result, spread, write_to
from benchmarks.report import REGRET_GOALS
from benchmarks.startup import GOAL_SHARE

FILE = ROOT / "benchmarks" / "bounds.json"
Ratios = Mapping[str, Result | float]
"""By name: a spread, or a number."""


@dataclass(frozen=True)
class Margin:
    """How much worse than its median a ratio may become, as a share of it."""

    least: float
    why: str
    spread: bool = False
    """Half of the recorded range, where that is more."""

    def of(self, ratio: Result) -> float:
        """For a ratio."""
        if not self.spread or "most" not in ratio:
            return self.least
        half_range: float = (ratio["most"] - ratio["least"]) / 2 / abs(ratio["median"])
        return max(self.least, round(half_range, 4))


PAIRS = Margin(
    0.1, "alternating pairs: half of their range, at least a tenth, as the machine may be shared", spread=True
)
MEDIANS = Margin(
    0.25, "medians of rounds or single runs on a machine that may be shared; no pairs to take a range from"
)
SIMULATED = Margin(0.05, "simulated time or exact counts: the machine has no part; room for another order of events")
ACCURACY = Margin(0.03, "held-out accuracy at the end of a short run: some of the few hundred held-out prompts")
EXACT = Margin(0.0, "all or none")


@dataclass(frozen=True)
class Bounds:
    """Limits of some ratios of a result."""

    result: str
    ratios: Callable[[Result], Ratios]
    better: Literal["more", "less"]
    margin: Margin = PAIRS
    goal: Callable[[Result], float] | None = None
    """The benchmark's own goal is the limit, in place of a margin."""
    command: str = ""
    """That measures it; default: `python -m benchmarks run RESULT`."""


def quotient(over: Result, under: Result) -> Result:
    """Of two medians that were not measured in pairs."""
    return {"median": round(over["median"] / under["median"], 4), "count": min(over["count"], under["count"])}


def by_case(result: Result, name: Callable[[Result], str], ratio: str) -> Ratios:
    """A ratio of each case."""
    return {name(case): case[ratio] for case in result["cases"]}


def _trainer(result: Result) -> Ratios:
    def name(case: Result) -> str:
        return f"{case['case']}, {case['ranks']} rank{'s' * (case['ranks'] > 1)}"

    return {
        **by_case(result, name, "ratio"),
        **by_case(result, lambda case: f"{name(case)}, processor time", "cpu_ratio"),
    }


def _checkpoints(result: Result) -> Ratios:
    kinds = result["kinds"]
    names = {"first_step": "the step with a checkpoint", "round": "the steps beside a checkpoint"}
    return {f"{what}, through none": quotient(kinds["beside"][key], kinds["none"][key]) for key, what in names.items()}


def _rewards(result: Result) -> Ratios:
    rates = {where: numbers["calls_per_second"] for where, numbers in result["rule"].items()}
    return {
        "responses a second, one process through none": quotient(rates["1 process"], rates["direct"]),
        "responses a second, two processes through one": quotient(rates["2 processes"], rates["1 process"]),
    }


def _idle_shares(result: Result) -> Ratios:
    return {
        f"{situation}: {kind}, share of a core": row["share_of_a_core"]
        for situation, rows in result["verdict"].items()
        for kind, row in rows.items()
        if kind in ("controller", "supervisor")
    }


def _idle_memory(result: Result) -> Ratios:
    after, before = (result["verdict"][name]["controller"]["rss_mb"] for name in ("after_a_job", "fresh"))
    return {"memory of a controller after a job, through before": round(after / before, 4)}


def _issue(result: Result) -> Ratios:
    return {
        f"{case['filter_rate']:.0%}, {case['seats']}: a step with cap {cap:g}, through cap 1": round(
            case["caps"][str(cap)]["time"]["median"] / case["caps"]["1.0"]["time"]["median"], 4
        )
        for case in result["cases"]
        for cap in result["issue_caps"]
        if cap != 1.0
    }


def _tails(result: Result) -> Ratios:
    # The range is that of the seeds and not of the measurement.
    steps = by_case(
        result, lambda case: f"{case['mechanism']}; {case['regime']}: a step with, through without", "ratio"
    )
    errors = {
        f"expected lengths, likeness {one['likeness']:g}, {one['siblings']} siblings: error through the mean's": one[
            "error_beside_the_mean"
        ]
        for one in result["expectations"]
    }
    return {**steps, **errors}


def _decisions(result: Result) -> Ratios:
    few = result["cases"]["16 slots, engines of 1"]
    return {
        f"{name}: processor time of a decision, through 16 slots": round(case["cpu_p50_ms"] / few["cpu_p50_ms"], 4)
        for name, case in result["cases"].items()
        if case is not few
    }


def _regret(figure: str, quantile: str) -> Callable[[Result], Ratios]:
    def of(result: Result) -> Ratios:
        return {
            f"dynamic: {figure.replace('_', ' ')} {quantile}, percent": result["overall"]["dynamic"][figure][quantile]
        }

    return of


def _constant(goal: float) -> Callable[[Result], float]:
    return lambda _: goal


def _within(result: Result) -> Ratios:
    return {
        f"a change costs {cost} s: {way}, mean percent longer than the best lending": one[way]["mean"]
        for cost, one in result["costs"].items()
        for way in ("best split", "rule")
    }


def _live(result: Result) -> Ratios:
    return {
        f"{name}: a run, through the best static split": ratio
        for name, ratio in result["seconds_by_best_static"].items()
        if name.startswith("dynamic")
    }


def _accuracy(result: Result) -> Ratios:
    return {"held-out accuracy at the end": spread([run["eval_accuracy_after"] for run in result["runs"]])}


def _small_plane(result: Result) -> Ratios:
    return {"4 controllers: seal, ready and commit, through a guarded put": result["control_plane"]["agreeing_by_put"]}


def _small_writes(result: Result) -> Ratios:
    return {"4 controllers: writes a controller and step": result["control_plane"]["writes"]}


BOUNDS = (
    Bounds("engine", lambda result: by_case(result, lambda case: str(case["case"]), "ratio"), "more"),
    Bounds("trainer", _trainer, "more"),
    Bounds("check", _small_plane, "less", command="python -m benchmarks check --write --measure"),
    Bounds("check", _small_writes, "less", MEDIANS, command="python -m benchmarks check --write --measure"),
    Bounds(
        "check",
        lambda result: {
            f"imports of {what}, through bare ones": one for what, one in result["startup"]["ratios"].items()
        },
        "less",
        command="python -m benchmarks check --write --measure",
    ),
    Bounds(
        "control_plane",
        lambda result: {"seal, ready and commit, through the step": result["share"]},
        "less",
        goal=lambda result: float(result["goals"]["share_of_step"]),
        command="python -m benchmarks run control-plane",
    ),
    Bounds(
        "control_plane",
        lambda result: {"writes a controller and step": result["writes"]},
        "less",
        goal=lambda result: float(result["goals"]["writes_per_controller_and_step"]),
        command="python -m benchmarks run control-plane",
    ),
    Bounds(
        "submit",
        lambda result: {"99th percentile of CreateJob, through a guarded put's": result["p99_times_a_put"]},
        "less",
        goal=lambda result: float(result["limit"]),
    ),
    Bounds(
        "submit",
        lambda result: {"jobs missing or doubled, of all": (result["missing"] + result["doubled"]) / result["jobs"]},
        "less",
        EXACT,
    ),
    Bounds("checkpoints", _checkpoints, "less", MEDIANS),
    Bounds("rewards", _rewards, "more", MEDIANS),
    Bounds("idle", _idle_shares, "less", goal=_constant(GOAL_SHARE)),
    Bounds("idle", _idle_memory, "less", MEDIANS),
    Bounds(
        "memory",
        lambda result: {"largest error of an estimate": max(abs(case["error"]) for case in result["cases"])},
        "less",
        MEDIANS,
    ),
    Bounds(
        "grpo_step",
        lambda result: by_case(result, lambda case: f"{case['tokens']} tokens", "times_faster_than_trl"),
        "more",
        command="python -m benchmarks run grpo",
    ),
    Bounds("demo", _accuracy, "more", ACCURACY),
    Bounds(
        "judge",
        lambda result: {"held-out accuracy at the end": result["accuracy_after"]},
        "more",
        goal=lambda result: float(result["goal_accuracy"]),
    ),
    Bounds(
        "calculator",
        lambda result: {
            f"seed {seed}: accuracy above that without the tool": one for seed, one in result["above"].items()
        },
        "more",
        goal=lambda result: float(result["goal"]),
    ),
    Bounds(
        "flows",
        lambda result: {
            f"{run['flow']}: rise of accuracy": round(run["accuracy_after"] - run["accuracy_before"], 4)
            for run in result["runs"]
        },
        "more",
        goal=lambda result: float(result["goal"]),
    ),
    Bounds(
        "asynchrony",
        lambda result: {"a run that waits, through one that runs ahead": result["ratio"]},
        "more",
        command="python -m benchmarks run async",
    ),
    Bounds("asynchrony", lambda result: {"accuracy of runs ahead": result["ahead_accuracy"]}, "more", ACCURACY),
    Bounds("stream", lambda result: {"a step as a whole, through one in parts": result["ratio"]}, "more"),
    Bounds(
        "issue_ahead",
        _issue,
        "less",
        SIMULATED,
        command="python -m benchmarks run issue",
    ),
    Bounds("tails", _tails, "less", SIMULATED),
    *(
        Bounds("placement", _regret(figure, quantile), "less", goal=_constant(goal))
        for _, figure, quantile, goal in REGRET_GOALS
    ),
    *(
        Bounds(
            "placement_unseen",
            _regret(figure, quantile),
            "less",
            SIMULATED,
            command="python -m benchmarks run placement --first 110 --seeds 14 --out benchmarks/results/placement_unseen.json",
        )
        for _, figure, quantile, _ in REGRET_GOALS
    ),
    Bounds("placement_within", _within, "less", SIMULATED, command="python -m benchmarks run placement-within"),
    Bounds("placement_decisions", _decisions, "less", MEDIANS, command="python -m benchmarks run placement-decisions"),
    Bounds("placement_live", _live, "less", MEDIANS, command="python -m benchmarks run placement-live"),
    Bounds(
        "placement_pairs",
        lambda result: {"the best fixed plan, through dynamic": result["ratio"]},
        "more",
        goal=lambda result: float(result["goal_ratio"]),
        command="python -m benchmarks run placement-pairs",
    ),
    Bounds(
        "sim",
        lambda result: {"seeds that failed, of all": len(result["failed_seeds"]) / result["seeds"]},
        "less",
        EXACT,
        command="make sim SEEDS=20000",
    ),
    Bounds(
        "mutations",
        lambda result: {"mutations noticed, of all": 1 - len(result["not_noticed"]) / len(result["mutations"])},
        "more",
        EXACT,
        command="make mutations",
    ),
    Bounds(
        "chaos",
        lambda result: {
            "runs that passed, of all": sum(row["passed"] for row in result["faults"])
            / sum(row["runs"] for row in result["faults"])
        },
        "more",
        EXACT,
        command="make chaos",
    ),
)
WITHOUT = {"startup": "seconds and imports only; the ratios of its imports to bare ones are in results/check.json"}
"""Results from which no ratio can be derived, and why."""


# Measured again -------------------------------------------------------------------------------------------------------

LIVE = {
    "engine": (
        *("engine", "--pairs", "3"),
        *(word for case in ("equal", "tail", "mixed", "vocabulary") for word in ("--case", case)),
    ),
    "trainer": ("trainer", "--pairs", "4"),
    "control_plane": (
        *("control-plane", "--controllers", "4", "--engines", "32", "--samples", "2"),
        *("--steps", "14", "--speedup", "8", "--puts", "20"),
    ),
    "startup": ("startup", "--only", "ratios", "--pairs", "5"),
}
"""The words of `run` for each of them, chosen so that all take less than ten minutes on two cores. The last two are parts of results/check.json."""
PARTS_OF_CHECK = ("control_plane", "startup")


def measured(name: str) -> Result:
    """One of `LIVE`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", "run", *LIVE[name], "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        result: Result = json.loads(out.read_text())
    return {"check": {name: result}} if name in PARTS_OF_CHECK else {name: result}


# Limits ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A ratio beside its limit."""

    name: str
    value: float | None
    """None: it is not in the result any more."""
    limit: float
    better: str
    again: bool = False
    """It was measured by this check."""

    @property
    def holds(self) -> bool:
        """Whether the limit is kept."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.better == "more" else self.value <= self.limit

    def __str__(self) -> str:
        sign = "at least" if self.better == "more" else "at most"
        value = "absent" if self.value is None else f"{self.value:.4g}"
        how = "measured again" if self.again else "recorded"
        return f"{'ok    ' if self.holds else 'MISSED'}  {value:>8}, {sign} {self.limit:.4g}  {self.name} ({how})"


def as_spread(ratio: Result | float) -> Result:
    """A number is a spread of one."""
    return ratio if isinstance(ratio, dict) else {"median": round(float(ratio), 4), "count": 1}


def derived(results: Mapping[str, Result], bounds: Iterable[Bounds] = BOUNDS) -> dict[str, dict[str, Any]]:
    """The limits of all ratios, by name, as they are in `bounds.json`."""
    found: dict[str, dict[str, Any]] = {}
    for bound in bounds:
        result = results[bound.result]
        origin = result if "date" in result else result["runs"][-1]
        for name, ratio in bound.ratios(result).items():
            figures = as_spread(ratio)
            row: dict[str, Any] = {"better": bound.better, **figures}
            if bound.goal is not None:
                row |= {"limit": bound.goal(result), "margin": None, "why": "the goal of the benchmark"}
            else:
                margin = bound.margin.of(figures)
                sign = -1 if bound.better == "more" else 1
                limit = round(figures["median"] * (1 + sign * margin), 4)
                row |= {"limit": limit, "margin": margin, "why": bound.margin.why}
            row |= {key: origin[key] for key in ("date", "commit", "machine")}
            row["command"] = bound.command or f"python -m benchmarks run {bound.result}"
            found[f"{bound.result}: {name}"] = row
    return found


def recorded() -> dict[str, Result]:
    """Every result that has bounds."""
    return {name: read_result(name) for name in dict.fromkeys(bound.result for bound in BOUNDS)}


def findings(results: Mapping[str, Result], limits: Mapping[str, Any], *, again: bool = False) -> list[Finding]:
    """All ratios of these results beside their limits. `again`: of results that may have a part of the ratios only."""
    values: dict[str, float] = {}
    for bound in BOUNDS:
        if bound.result in results:
            try:
                ratios = bound.ratios(results[bound.result])
            except KeyError:
                if again:
                    continue
                raise
            values |= {f"{bound.result}: {name}": as_spread(ratio)["median"] for name, ratio in ratios.items()}
    return [
        Finding(name, values.get(name), limit["limit"], limit["better"], again)
        for name, limit in limits.items()
        if name in values or not again
    ] + [
        # A ratio without a limit is a bound that nobody has derived.
        Finding(f"{name} has no limit in bounds.json", None, 0.0, "more", again)
        for name in values
        if name not in limits
    ]


def check(*, measure: bool) -> bool:
    """Print all ratios beside their limits; whether all hold."""
    limits = json.loads(FILE.read_text())
    found = findings(recorded(), limits)
    for name in LIVE if measure else ():
        print(f"measuring {' '.join(LIVE[name])}", flush=True)
        now = findings(measured(name), limits, again=True)
        if not all(one.holds for one in now):
            print(f"a limit is missed; once more: {' '.join(LIVE[name])}", flush=True)
            second = {one.name: one for one in findings(measured(name), limits, again=True)}
            now = [one if one.holds else second[one.name] for one in now]
        found += now
    for one in found:
        print(one)
    missed = sum(not one.holds for one in found)
    print(f"{len(found)} ratios, {missed} beyond their limits")
    if measure and missed and (load := os.getloadavg()[1]) > (os.cpu_count() or 1) + 1:
        print(
            f"the load is {load:.1f} on {os.cpu_count()} cores: ratios with several processes on a side need a quiet machine"
        )
    return not missed


def write(*, measure: bool) -> None:
    """Derive `bounds.json` from the committed results; `measure`: after measuring results/check.json."""
    if measure:
        result = circumstances()
        for name in PARTS_OF_CHECK:
            result |= measured(name)["check"]
        write_to(RESULTS / "check.json", result)
    print(write_to(FILE, derived(recorded())))
