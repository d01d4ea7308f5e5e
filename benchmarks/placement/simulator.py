"""Placement policies in the simulator, and how far lending by the rule is from the best lending.

**Policies** (`placement`): every scenario of `benchmarks/scenarios`, seeds that nothing was tuned on, five switch costs. `dynamic` was tuned on
seeds from 1000 on. What came of seeds 0 to 9 was looked at before it was tuned for the last time, so the table begins at seed 10; tables
that were taken in between showed 10 to 23, too. Of seeds that no earlier table showed the same is summed up by
`--first 110 --seeds 14 --out benchmarks/results/placement_unseen.json`. A run that was interrupted goes on where it was, as long as neither
simulator, policies nor scenarios have changed since: .cache/placement has what is done.

**Lending** (`placement-within`): batches of small jobs on three replicas, drawn at random. The best is found by trying all that could be lent
at the moments at which the rule looks, so there are few of them, and few replicas. The rule knows the true lengths of the batch, as it does
for the best split for each step. Goes by what a batch takes, without training. On each of the splits that there are; and on the best of
them, which is another one for each way of lending.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.harness import ROOT, Benchmark, Result
from benchmarks.pictures import plot_placement
from placement.simulator.job import SimulatedJob, draw_workload, replica_pace, true_knowledge
from placement.simulator.run import COSTS, LendingTimes, compare_lending, compare_policies, lower_bound, play_policy
from placement.simulator.scenario import Scenario, read_scenario

SCENARIOS = ROOT / "benchmarks" / "scenarios"
CACHE = ROOT / ".cache" / "placement"
FIRST = 10
"""The first seed."""


def decisive_modules() -> list[Path]:
    """The modules of `placement` that a result depends on: those that the simulator loads in a new process."""
    program = (
        f"import sys, {play_policy.__module__}\n"
        "print(*(module.__file__ for name, module in sorted(sys.modules.items()) "
        "if name.startswith('placement.') and not hasattr(module, '__path__')), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.split()]


def fingerprint() -> str:
    """Of all that a result depends on."""
    files = [*decisive_modules(), *sorted(SCENARIOS.glob("*.yaml"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def measure_policies(arguments: argparse.Namespace, taken: Result) -> Result:
    """Play what is not done yet, and sum up the seeds that are whole."""
    names = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    names = [name for name in names if not arguments.only or name in arguments.only.split(",")]
    path = CACHE / f"{fingerprint()}.jsonl"
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if not arguments.done:
        play(path, [(name, seed) for seed in seeds for name in names], arguments.processes)
    rows = [row for row in read(path) if row["scenario"] in names and row["seed"] in seeds]
    count = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if count[row["seed"]] == len(names)]
    return {**taken, "fingerprint": path.stem, "first_seed": arguments.first, **summary(rows)}


def policy_options(parser: argparse.ArgumentParser) -> None:
    """Seeds and scenarios."""
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios, with commas")
    parser.add_argument("--done", action="store_true", help="only sum up what is done of the seeds that are whole")


def play(path: Path, wanted: list[tuple[str, int]], processes: int) -> None:
    """Whatever of `wanted` is not in the file yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["scenario"], row["seed"]) for row in read(path)}
    left = [one for one in wanted if one not in done]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with path.open("a") as file, Pool(processes) as pool, Progress(*columns) as progress:
        bar = progress.add_task("simulated jobs", total=len(wanted), completed=len(wanted) - len(left))
        for row in pool.imap_unordered(one_job, left):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            progress.advance(bar)


def one_job(what: tuple[str, int]) -> dict[str, Any]:
    """Every policy at every cost on one job."""
    name, seed = what
    job = SimulatedJob(read_scenario(SCENARIOS / f"{name}.yaml"), seed)
    found = {str(cost): {row.policy: [row.seconds, row.moves] for row in compare_policies(job, cost)} for cost in COSTS}
    return {"scenario": name, "seed": seed, "bound": round(lower_bound(job), 3), "costs": found}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """What is done; a line that was cut off is not."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Regret beside the oracle and the best static split, in percent: of each scenario, cost and policy, and of all."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    cells: dict[tuple[str, str, str], list[tuple[float, float, int]]] = {}
    for row in rows:
        for cost, found in row["costs"].items():
            best, fixed = found["best each step"][0], found["best static"][0]
            for policy, (seconds, moves) in found.items():
                regret, behind = 100 * (seconds / best - 1), 100 * (seconds / fixed - 1)
                cells.setdefault((row["scenario"], cost, policy), []).append((regret, behind, moves))
                where = f"{row['scenario']}, seed {row['seed']}, {cost} s"
                points.setdefault(policy, []).append((regret, behind, where))
    return {
        "seeds": len({row["seed"] for row in rows}),
        "jobs": len(rows),
        "overall": {policy: overall(found) for policy, found in points.items()},
        "above_bound": above_bound(rows),
        "cells": [
            {"scenario": name, "cost": float(cost), "policy": policy, **cell(found)}
            for (name, cost, policy), found in sorted(cells.items())
        ],
    }


def overall(found: list[tuple[float, float, str]]) -> dict[str, Any]:
    """Of all runs of a policy, with the worst of them."""
    regret, behind = np.array([one[0] for one in found]), np.array([one[1] for one in found])
    return {
        "runs": len(found),
        "regret": quantiles(regret, 0.5, 0.95, 0.99, 1.0),
        "regret_worst": found[int(regret.argmax())][2],
        "behind_static": quantiles(behind, 0.5, 0.95, 0.99, 1.0),
        "behind_static_worst": found[int(behind.argmax())][2],
    }


def cell(found: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Of a policy's runs in one scenario at one cost."""
    regret, behind, moves = np.array(found).T
    return {
        "regret": quantiles(regret, 0.05, 0.5, 0.95, 1.0),
        "behind_static": quantiles(behind, 0.5, 0.99, 1.0),
        "moves": float(np.median(moves)),
    }


def quantiles(values: np.ndarray[Any, Any], *which: float) -> dict[str, float]:
    """By name: p50, p95, most."""
    return {"most" if q == 1.0 else f"p{q * 100:g}": round(float(np.quantile(values, q)), 2) for q in which}


def above_bound(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How far the oracle without switch costs is above the fluid bound, percent, by scenario: the median."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["scenario"], []).append(
            100 * (row["costs"]["0.0"]["best each step"][0] / row["bound"] - 1)
        )
    return {name: round(float(np.median(values)), 1) for name, values in sorted(found.items())}


# Lending --------------------------------------------------------------------------------------------------------------

REPLICAS, MOMENTS = 3, 5
WITHIN_COSTS = (0.0, 0.5, 2.0)
"""Seconds that a replica which changes over serves nobody."""


def one_case(seed: int) -> list[dict[float, LendingTimes]]:
    """A batch on each split, at each cost."""
    draw = np.random.default_rng((seed, 7))
    scenario = Scenario.model_validate(
        {
            "name": "small",
            "what": "one batch",
            "slots": REPLICAS + 1,
            "steps": 1,
            "groups": int(draw.integers(4, 13)),
            "samples": 2,
            "lengths": {"mean": float(draw.uniform(200, 800)), "spread": float(draw.uniform(0.5, 1.3))},
            "judging": {"tokens": float(np.exp(draw.uniform(np.log(30), np.log(600))))},
            "rollout": {"running": int(draw.integers(4, 17))},
            "reward": {"running": int(draw.integers(4, 17))},
        }
    )
    work, pace = draw_workload(scenario, seed, 0), replica_pace(scenario, seed)[:REPLICAS]
    engines = scenario.rollout, scenario.reward
    laws = np.array([[one.token_s, one.sequence_s] for one in engines])
    most, told = np.array([one.running for one in engines]), true_knowledge(0, scenario, work)
    return [
        {
            cost: compare_lending(
                work.lengths, work.judged, pace, rollout, laws, most, told=told, cost_s=cost, moments=MOMENTS
            )
            for cost in WITHIN_COSTS
        }
        for rollout in range(1, REPLICAS)
    ]


def lending_summary(found: list[list[LendingTimes]]) -> dict[str, Any]:
    """What each way takes longer than the best lending, percent."""
    every = [one for case in found for one in case]
    best = np.array([min(one.best.seconds for one in case) for case in found])
    known = np.array([min(one.known for one in case) for case in found])
    return {
        "seconds": round(float(np.median(best)), 2),
        "best split": quantiles_and_mean(100 * (known / best - 1)),
        "rule": quantiles_and_mean(np.array([100 * (one.by_rule / one.best.seconds - 1) for one in every])),
        "nothing lent": quantiles_and_mean(np.array([100 * (one.never / one.best.seconds - 1) for one in every])),
    }


def quantiles_and_mean(values: Any) -> dict[str, float]:
    """Median, 95th percentile, mean and most."""
    told = {
        "p50": np.quantile(values, 0.5),
        "p95": np.quantile(values, 0.95),
        "mean": values.mean(),
        "most": values.max(),
    }
    return {name: round(float(value), 2) for name, value in told.items()}


def measure_lending(arguments: argparse.Namespace, taken: Result) -> Result:
    """All cases, at each cost."""
    with Pool(arguments.processes) as pool:
        found = pool.map(one_case, range(arguments.cases), chunksize=4)
    costs = {f"{cost:g}": lending_summary([[split[cost] for split in case] for case in found]) for cost in WITHIN_COSTS}
    shape = {"cases": arguments.cases, "replicas": REPLICAS, "moments": MOMENTS}
    return {**taken, **shape, "costs": costs}


def lending_options(parser: argparse.ArgumentParser) -> None:
    """How many."""
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)


BENCHMARKS = (
    Benchmark(
        "placement",
        "placement",
        measure_policies,
        ("numpy", "numba"),
        options=policy_options,
        pictures=plot_placement,
    ),
    Benchmark("placement-within", "placement_within", measure_lending, ("numpy", "numba"), options=lending_options),
)
