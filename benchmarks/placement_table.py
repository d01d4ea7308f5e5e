"""Placement policies in the simulator: every scenario of benchmarks/scenarios, seeds that nothing was tuned on, five switch costs.

`dynamic` was tuned on seeds from 1000 on. What came of seeds 0 to 9 was looked at before it was tuned for the last time, so the table
begins at seed 10; tables that were taken in between showed 10 to 23, too. Of seeds that no earlier table showed the same is summed up by
`--first 110 --seeds 14 --out placement_unseen`. A run that was interrupted goes on where it was, as long as neither simulator, policies nor scenarios have changed
since: .cache/placement has what is done. Writes benchmarks/results/placement.json; `benchmarks/placement_page.py` makes the page's tables and plots of it.

    python benchmarks/placement_table.py [--seeds 100] [--processes 2] [--only NAME,NAME] [--done] [--decisions]
    python benchmarks/placement_table.py --first 110 --seeds 14 --out placement_unseen
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from measured import ROOT, circumstances, write
from placement_decisions import decisions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from placement.simulate.job import SimulatedJob
from placement.simulate.oracle import bound
from placement.simulate.scenario import read_scenario
from placement.simulate.table import COSTS, compared

SCENARIOS = ROOT / "benchmarks" / "scenarios"
CACHE = ROOT / ".cache" / "placement"
FIRST = 10
"""The first seed."""
DECIDE = (
    *("forecast", "laws", "lending", "measured", "paces", "speeds", "split", "trends"),
    *(f"policies/{name}" for name in ("base", "choices", "climbing", "dynamic", "errors")),
    *(f"policies/{name}" for name in ("fixed", "hindered", "weighing")),
    *(f"simulate/{name}" for name in ("compiled", "job", "kernel", "oracle", "run", "scenario")),
    *(f"simulate/{name}" for name in ("table", "told", "workload")),
)
"""Modules of placement that a result depends on."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--first", type=int, default=FIRST, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios, with commas")
    parser.add_argument(
        "--out", default="placement", help="the name of the results; the page's table is made of the default's"
    )
    parser.add_argument("--done", action="store_true", help="only sum up what is done of the seeds that are whole")
    parser.add_argument(
        "--decisions",
        action="store_true",
        help="only measure how long decisions take, benchmarks/results/placement_decisions.json",
    )
    told = parser.parse_args()
    about = circumstances("numpy", "numba")
    if told.decisions:
        print(write("placement_decisions", {**about, "cases": decisions()}))
        return
    names = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))
    names = [name for name in names if not told.only or name in told.only.split(",")]
    path, seeds = CACHE / f"{fingerprint()}.jsonl", range(told.first, told.first + told.seeds)
    if not told.done:
        play(path, [(name, seed) for seed in seeds for name in names], told.processes)
    rows = [row for row in read(path) if row["scenario"] in names and row["seed"] in seeds]
    count = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if count[row["seed"]] == len(names)]
    print(write(told.out, {**about, "fingerprint": path.stem, "first_seed": told.first, **summary(rows)}))


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
    found = {str(cost): {row.policy: [row.seconds, row.moves] for row in compared(job, cost)} for cost in COSTS}
    return {"scenario": name, "seed": seed, "bound": round(bound(job), 3), "costs": found}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """What is done; a line that was cut off is not."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def fingerprint() -> str:
    """Of all that a result depends on."""
    files = [*(ROOT / "placement" / f"{name}.py" for name in DECIDE), *sorted(SCENARIOS.glob("*.yaml"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


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


if __name__ == "__main__":
    main()
