"""`dynamic` placement beside the best fixed plan there is, on two real cores: the judge example, real engines and ranks.

    make bench-placement-pairs   each fixed plan once, then five alternating pairs; benchmarks/results/placement_pairs.json

With two slots and three pools every plan shares slots; fixed plans differ in how many ranks train and how many slots judge. The one that
takes the least time is what `dynamic` is held against. Of each run the seconds from the first step's commit to the last one's.

The goal: `dynamic` at least 0.97 times as fast, the median of the pairs.
"""

from __future__ import annotations

import argparse
from typing import Any

from measured import ROOT, circumstances, spread, write
from runs import alternating_pairs, finished_run

SPEC = ROOT / "examples" / "arithmetic" / "judge.yaml"
GOAL_RATIO = 0.97
STEPS = 40
FIXED = {
    "two ranks, a judge on each slot": ("train.ranks=2",),
    "one rank, a judge on each slot": ("train.ranks=1",),
    "two ranks, a judge on one slot": ("train.ranks=2", "judges.0.serving.replicas=1"),
    "one rank, a judge on one slot": ("train.ranks=1", "judges.0.serving.replicas=1"),
}
DYNAMIC = ("placement.policy=dynamic",)


def one_run(*settings: str) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    run = finished_run(SPEC, f"flow.steps={STEPS}", "eval.every=1000", *settings)
    return {
        "seconds": round(run.step_times[-1] - run.step_times[0], 3),
        "accuracy_after": run.summary["eval_accuracy_after"],
        "moves": run.move_lines,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", default="placement_pairs", help="of the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = circumstances("torch", "deepspeed")
    fixed = {}
    for name, settings in FIXED.items():
        fixed[name] = one_run(*settings)["seconds"]
        print(f"fixed, {name}: {fixed[name]:.1f} s", flush=True)
    best = min(fixed, key=lambda name: fixed[name])
    sides = ("fixed", lambda: one_run(*FIXED[best])), ("dynamic", lambda: one_run(*DYNAMIC))
    pairs = alternating_pairs(arguments.pairs, *sides)
    result |= {
        "what": f"dynamic placement against the best fixed plan: the judge example, {STEPS} steps, two CPU slots, real engines and ranks",
        "goal_ratio": GOAL_RATIO,
        "fixed_seconds": fixed,
        "best_fixed": best,
        "ratio": spread([pair["fixed"]["seconds"] / pair["dynamic"]["seconds"] for pair in pairs]),
        "fixed_accuracy": spread([pair["fixed"]["accuracy_after"] for pair in pairs]),
        "dynamic_accuracy": spread([pair["dynamic"]["accuracy_after"] for pair in pairs]),
        "pairs": pairs,
    }
    print(write(arguments.name, result))


if __name__ == "__main__":
    main()
