"""How far the rule that lends within a step is from the best lending: batches of small jobs on three replicas, drawn at random.

The best is found by trying all that could be lent at the moments at which the rule looks, so there are few of them, and few replicas. The rule
is told the truth of the batch, as it is for the best split for each step. Goes by what a batch takes, without training. On each of the splits
that there are; and on the best of them, which is another one for each way of lending.

    python benchmarks/placement_within.py [--cases 200]       # benchmarks/results/placement_within.json; then make bench-page
"""

from __future__ import annotations

import argparse
from multiprocessing import Pool
from typing import Any

import numpy as np
from measured import circumstances, write

from placement.simulate.scenario import Scenario
from placement.simulate.told import truth_of
from placement.simulate.within import Reached, reached
from placement.simulate.workload import replica_pace, workload

REPLICAS, MOMENTS = 3, 5
COSTS = (0.0, 0.5, 2.0)
"""Seconds that a replica which changes over serves nobody."""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    told = parser.parse_args()
    about = circumstances("numpy", "numba")
    with Pool(told.processes) as pool:
        found = pool.map(one_case, range(told.cases), chunksize=4)
    costs = {f"{cost:g}": summary([[split[cost] for split in case] for case in found]) for cost in COSTS}
    shape = {"cases": told.cases, "replicas": REPLICAS, "moments": MOMENTS}
    print(write("placement_within", {**about, **shape, "costs": costs}))


def one_case(seed: int) -> list[dict[float, Reached]]:
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
    work, pace = workload(scenario, seed, 0), replica_pace(scenario, seed)[:REPLICAS]
    engines = scenario.rollout, scenario.reward
    laws = np.array([[one.token_s, one.sequence_s] for one in engines])
    most, told = np.array([one.running for one in engines]), truth_of(0, scenario, work)
    return [
        {
            cost: reached(work.lengths, work.judged, pace, rollout, laws, most, told=told, cost_s=cost, moments=MOMENTS)
            for cost in COSTS
        }
        for rollout in range(1, REPLICAS)
    ]


def summary(found: list[list[Reached]]) -> dict[str, Any]:
    """What each way takes longer than the best lending, percent."""
    every = [one for case in found for one in case]
    best = np.array([min(one.best.seconds for one in case) for case in found])
    known = np.array([min(one.known for one in case) for case in found])
    return {
        "seconds": round(float(np.median(best)), 2),
        "best split": quantiles(100 * (known / best - 1)),
        "rule": quantiles(np.array([100 * (one.by_rule / one.best.seconds - 1) for one in every])),
        "nothing lent": quantiles(np.array([100 * (one.never / one.best.seconds - 1) for one in every])),
    }


def quantiles(values: Any) -> dict[str, float]:
    """Median, 95th percentile, mean and most."""
    told = {
        "p50": np.quantile(values, 0.5),
        "p95": np.quantile(values, 0.95),
        "mean": values.mean(),
        "most": values.max(),
    }
    return {name: round(float(value), 2) for name, value in told.items()}


if __name__ == "__main__":
    main()
