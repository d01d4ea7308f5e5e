"""Bounds of the results, and the check of them: `python -m benchmarks check` (`make bench-check`).

A bound is on a ratio, never on an absolute time, so it holds on another machine. `BOUNDS` lists the bounded ratios of each result and
their allowed regression; `bounds.json` has the limits, derived from the committed results by `check --write`. A new
result is compared with the earlier limits, so a slower engine fails the check until the limits are derived again, on purpose.

The check measures some ratios of the engine, the trainer, the control plane and the start again, in alternating pairs and with smaller sizes
than their benchmarks (`LIVE`). results/check.json has their values from the time when the limits were derived, with the load of the machine.
Their times leave out seconds in which other processes had the cores (`harness.Stopwatch`), so a busy machine makes them less exact, and not
longer. Two train ranks wait for each other, also while another process has a rank's core. So here only their processor seconds have a limit;
the trainer's own result has one on the elapsed time. A part that misses a limit is measured once more; the check fails if it misses again.

A limit must be able to fail. With `--slowed` each of these parts runs with a planted slow-down: the engine's steps, the updates and the
imports take twice as long, a transaction 50 ms and one write more. The check fails unless every limit is missed. The
margins of these misses are in `bounds.json` (`slowed`).
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
from time import monotonic
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
OWN = Margin(
    0.25,
    "alternating pairs of seconds without those of other processes, which still take caches; twice the work halves the ratio",
)
LATENCY = Margin(
    1.0,
    "lower quartiles of latencies on a shared machine, which double from run to run; 50 ms more in a transaction is more than that",
)


@dataclass(frozen=True)
class Bounds:
    """Limits of some ratios of a result."""

    result: str
    ratios: Callable[[Result], Ratios] | Mapping[str, str]
    """A function, or each ratio's place in the result, by its name."""
    better: Literal["more", "less"]
    margin: Margin = PAIRS
    goal: float | str | None = None
    """The benchmark's own goal, or its place in the result: it is the limit, in place of a margin."""

    def ratios_of(self, result: Result) -> Ratios:
        """By name. Raises KeyError if the result has not the part that they are of."""
        if callable(self.ratios):
            return self.ratios(result)
        return {name: at(result, place) for name, place in self.ratios.items()}

    def goal_of(self, result: Result) -> float | None:
        """The limit that the benchmark sets, if it does."""
        return float(at(result, self.goal)) if isinstance(self.goal, str) else self.goal


def at(result: Result, place: str) -> Any:
    """What is there: `overall.dynamic`."""
    found: Any = result
    for name in place.split("."):
        found = found[name]
    return found


RUN = "python -m benchmarks run"
COMMANDS = {
    "asynchrony": f"{RUN} async",
    "chaos": "make chaos",
    "check": "python -m benchmarks check --write --measure",
    "control_plane": f"{RUN} control-plane",
    "grpo_step": f"{RUN} grpo",
    "issue_ahead": f"{RUN} issue",
    "mutations": "make mutations",
    "placement_decisions": f"{RUN} placement-decisions",
    "placement_live": f"{RUN} placement-live",
    "placement_pictures": f"{RUN} placement-pictures",
    "placement_pairs": f"{RUN} placement-pairs",
    "placement_pictures_simulated": f"{RUN} placement --only pictures/judge-slow --seeds 5 --out benchmarks/results/placement_pictures_simulated.json",
    "placement_unseen": f"{RUN} placement --first 110 --seeds 14 --out benchmarks/results/placement_unseen.json",
    "placement_within": f"{RUN} placement-within",
    "sim": "make sim SEEDS=20000",
    "sim_generated": f"{RUN} sim --generated --seeds 2000 --out benchmarks/results/sim_generated.json",
    "sim_pictures": f"{RUN} sim --pictures --seeds 5000 --out benchmarks/results/sim_pictures.json",
}
"""What measures a result, where that is not `run RESULT`."""
SMALL = "4 controllers"


def quotient(over: Result, under: Result) -> Result:
    """Of two medians that were not measured in pairs."""
    return {"median": round(over["median"] / under["median"], 4), "count": min(over["count"], under["count"])}


def by_case(result: Result, name: Callable[[Result], str], ratio: str) -> Ratios:
    """A ratio of each case."""
    return {name(case): case[ratio] for case in result["cases"]}


def _trainer(result: Result) -> Ratios:
    return {
        **by_case(result, _ranks, "ratio"),
        **by_case(result, lambda case: f"{_ranks(case)}, processor time", "cpu_ratio"),
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


def _regret(figure: str, quantile: str) -> str:
    return f"dynamic: {figure.replace('_', ' ')} {quantile}, percent"


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


def _calculator(result: Result) -> Ratios:
    return {f"seed {seed}: accuracy above that without the tool": one for seed, one in result["above"].items()}


def _flows(result: Result) -> Ratios:
    return {
        f"{run['flow']}: rise of accuracy": round(run["accuracy_after"] - run["accuracy_before"], 4)
        for run in result["runs"]
    }


def _passed(result: Result) -> Ratios:
    passed, runs = (sum(row[key] for row in result["faults"]) for key in ("passed", "runs"))
    return {"runs that passed, of all": passed / runs}


def _live_engine(result: Result) -> Ratios:
    return {f"engine, {case['case']}": case["own_ratio"] for case in result["engine"]["cases"]}


def _ranks(case: Result) -> str:
    return f"{case['case']}, {case['ranks']} rank{'s' * (case['ranks'] > 1)}"


def _live_trainer(ratio: str, ranks: int, what: str = "") -> Callable[[Result], Ratios]:
    return lambda result: {
        f"trainer, {_ranks(case)}{what}": case[ratio] for case in result["trainer"]["cases"] if case["ranks"] == ranks
    }


def _live_imports(result: Result) -> Ratios:
    return {f"imports of {what}, through bare ones": one for what, one in result["startup"]["ratios"].items()}


BOUNDS = (
    Bounds("engine", lambda result: by_case(result, lambda case: str(case["case"]), "ratio"), "more"),
    Bounds("adapters", lambda result: by_case(result, lambda case: str(case["case"]), "ratio"), "less"),
    Bounds("trainer", _trainer, "more"),
    Bounds("check", _live_engine, "more", OWN),
    Bounds("check", _live_trainer("own_ratio", 1), "more", OWN),
    Bounds("check", _live_trainer("cpu_ratio", 2, ", processor time"), "more", OWN),
    Bounds(
        "check",
        {f"{SMALL}: seal, ready and commit, through a guarded put": "control_plane.agreeing_by_put"},
        "less",
        LATENCY,
    ),
    Bounds("check", {f"{SMALL}: writes a controller and step": "control_plane.writes"}, "less", MEDIANS),
    Bounds("check", _live_imports, "less", OWN),
    Bounds("control_plane", {"seal, ready and commit, through the step": "share"}, "less", goal="goals.share_of_step"),
    Bounds(
        "control_plane", {"writes a controller and step": "writes"}, "less", goal="goals.writes_per_controller_and_step"
    ),
    Bounds(
        "submit", {"99th percentile of CreateJob, through a guarded put's": "p99_times_a_put"}, "less", goal="limit"
    ),
    Bounds(
        "submit",
        lambda result: {"jobs missing or doubled, of all": (result["missing"] + result["doubled"]) / result["jobs"]},
        "less",
        EXACT,
    ),
    Bounds("checkpoints", _checkpoints, "less", MEDIANS),
    Bounds("rewards", _rewards, "more", MEDIANS),
    Bounds("idle", _idle_shares, "less", goal=GOAL_SHARE),
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
    ),
    Bounds("demo", _accuracy, "more", ACCURACY),
    Bounds("judge", {"held-out accuracy at the end": "accuracy_after"}, "more", goal="goal_accuracy"),
    Bounds("calculator", _calculator, "more", goal="goal"),
    Bounds("flows", _flows, "more", goal="goal"),
    Bounds("asynchrony", {"a run that waits, through one that runs ahead": "ratio"}, "more"),
    Bounds("asynchrony", {"accuracy of runs ahead": "ahead_accuracy"}, "more", ACCURACY),
    Bounds("stream", {"a step as a whole, through one in parts": "ratio"}, "more"),
    Bounds("issue_ahead", _issue, "less", SIMULATED),
    Bounds("tails", _tails, "less", SIMULATED),
    *(
        Bounds(
            result, {_regret(figure, quantile): f"overall.dynamic.{figure}.{quantile}"}, "less", SIMULATED, goal=limit
        )
        for _, figure, quantile, goal in REGRET_GOALS
        for result, limit in (("placement", goal), ("placement_unseen", None))
    ),
    Bounds(
        "placement_pictures_simulated",
        lambda result: {
            "dynamic: a run, through the best static split": 1
            + result["overall"]["dynamic"]["behind_static"]["p50"] / 100
        },
        "less",
        SIMULATED,
    ),
    Bounds("placement_within", _within, "less", SIMULATED),
    Bounds("placement_decisions", _decisions, "less", MEDIANS),
    Bounds("placement_live", _live, "less", MEDIANS),
    Bounds("placement_pictures", _live, "less", MEDIANS),
    Bounds("placement_pairs", {"the best fixed plan, through dynamic": "ratio"}, "more", goal="goal_ratio"),
    *(
        Bounds(
            name,
            lambda result: {"seeds that failed, of all": len(result["failed_seeds"]) / result["seeds"]},
            "less",
            EXACT,
        )
        for name in ("sim", "sim_pictures", "sim_generated")
    ),
    Bounds(
        "mutations",
        lambda result: {"mutations noticed, of all": 1 - len(result["not_noticed"]) / len(result["mutations"])},
        "more",
        EXACT,
    ),
    Bounds("chaos", _passed, "more", EXACT),
)
WITHOUT = {
    "startup": "seconds and imports only; the ratios of its imports to bare ones are in results/check.json",
    "media_memory": "bytes, not ratios of times; its verdict refuses a message above 1 MiB and a gcore that runs out of memory",
    "release": "what passed, not what was measured",
}
"""Results from which no ratio can be derived, and why."""


# Measured again -------------------------------------------------------------------------------------------------------

LIVE = {
    "engine": (
        *("engine", "--pairs", "3", "--requests", "64"),
        *(word for case in ("equal", "tail", "mixed", "vocabulary") for word in ("--case", case)),
    ),
    "trainer": ("trainer", "--pairs", "5", "--checked", "3"),
    "control_plane": (
        *("control-plane", "--controllers", "4", "--engines", "32", "--samples", "2"),
        *("--steps", "14", "--speedup", "8", "--puts", "20"),
    ),
    "startup": ("startup", "--only", "ratios", "--pairs", "3"),
}
"""The words of `run` for each part of results/check.json, chosen so that all take about 250 s of processor time, and so less than eight minutes on two quiet cores."""


def measured(name: str, *, slowed: bool = False) -> Result:
    """One of `LIVE`, in a process of its own, as a results/check.json that has this part only."""
    began = monotonic()
    print(f"measuring {name}{', slowed' * slowed}: {' '.join(LIVE[name])}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks", "run", *LIVE[name], "--out", str(out)]
        command += ["--slowed", "--pairs", "1"] if slowed else []
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        result: Result = json.loads(out.read_text())
    result |= {"took_s": round(monotonic() - began, 1), "load_after": round(os.getloadavg()[0], 2)}
    print(f"{result['took_s']:.0f} s; load {result['load_before']} before, {result['load_after']} after", flush=True)
    return {name: result}


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
        for name, ratio in bound.ratios_of(result).items():
            figures = as_spread(ratio)
            row: dict[str, Any] = {"better": bound.better, **figures}
            goal = bound.goal_of(result)
            if goal is not None:
                row |= {"limit": goal, "margin": None, "why": "the goal of the benchmark"}
            else:
                margin = bound.margin.of(figures)
                sign = -1 if bound.better == "more" else 1
                limit = round(figures["median"] * (1 + sign * margin), 4)
                row |= {"limit": limit, "margin": margin, "why": bound.margin.why}
            row |= {key: origin[key] for key in ("date", "commit", "machine")}
            row["command"] = COMMANDS.get(bound.result, f"{RUN} {bound.result}")
            if bound.result == "check":
                row["slowed"] = result["slowed"][name]
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
            ratios = _those_of(bound, results) if again else bound.ratios_of(results[bound.result])
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


def _those_of(bound: Bounds, results: Mapping[str, Result]) -> Ratios:
    """A bound's ratios, or none if the result has not the part that they are of."""
    try:
        return bound.ratios_of(results[bound.result]) if bound.result in results else {}
    except KeyError:
        return {}


def check(*, parts: Iterable[str]) -> bool:
    """Print all ratios beside their limits; whether all hold. `parts` of `LIVE` are measured again."""
    limits = json.loads(FILE.read_text())
    found = findings(recorded(), limits)
    for name in parts:
        now = findings({"check": measured(name)}, limits, again=True)
        if not all(one.holds for one in now):
            print("a limit is missed; once more", flush=True)
            second = {one.name: one for one in findings({"check": measured(name)}, limits, again=True)}
            now = [one if one.holds else second[one.name] for one in now]
        found += now
    for one in found:
        print(one)
    missed = sum(not one.holds for one in found)
    print(f"{len(found)} ratios, {missed} beyond their limits")
    if any(one.again for one in found):
        print(f"load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return not missed


def check_slowed(*, parts: Iterable[str]) -> bool:
    """Measure `parts` with a planted slow-down each; whether every limit of them is missed."""
    limits = json.loads(FILE.read_text())
    found = [one for name in parts for one in findings({"check": measured(name, slowed=True)}, limits, again=True)]
    for one in found:
        print(one)
    held = sum(one.holds for one in found)
    print(f"{len(found)} ratios with a planted slow-down, {held} within their limits")
    return bool(found) and not held


def write(*, parts: Iterable[str]) -> None:
    """Derive `bounds.json` from the committed results, after measuring `parts` of results/check.json, each plain and slowed."""
    before = read_result("check") if (RESULTS / "check.json").is_file() else {}
    result = circumstances() | {name: before[name] for name in (*LIVE, "slowed") if name in before}
    for name in parts:
        result |= measured(name)
        slower = measured(name, slowed=True)
        values = {
            key: as_spread(ratio)["median"]
            for bound in BOUNDS
            for key, ratio in _those_of(bound, {"check": slower}).items()
        }
        result["slowed"] = result.get("slowed", {}) | values
    if parts:
        write_to(RESULTS / "check.json", result)
    print(write_to(FILE, derived(recorded())))
