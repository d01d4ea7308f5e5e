"""Learning from a judge alone, several times: seconds, true accuracy, and what the judge takes for right.

    make bench-judge           three runs of examples/arithmetic/judge.yaml; benchmarks/results/judge.json

The goal: at least 85 % of held-out sums right in less than 4 minutes, preparation cached; the median of three on a quiet machine.
"""

from __future__ import annotations

import argparse
from typing import Any

from demo import one_run
from measured import ROOT, circumstances, spread, write

SPEC = ROOT / "examples" / "arithmetic" / "judge.yaml"
GOAL_ACCURACY, GOAL_S = 0.85, 240.0


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    source = run["sources"]["sums"]
    return {
        "seconds": run["seconds"],
        "steps": run["steps"],
        "accuracy_before": source["eval_accuracy_before"],
        "accuracy_after": source["eval_accuracy_after"],
        "judged_before": source["eval_before"]["part:judged"],
        "judged_after": source["eval_after"]["part:judged"],
        "tokens_per_second": run["tokens_per_second"],
        "audit": run["audit"],
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--name", default="judge", help="of the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = circumstances("torch", "deepspeed")
    runs = []
    for number in range(arguments.runs):
        runs.append(figures(one_run(SPEC)))
        print(f"run {number + 1}/{arguments.runs}: {runs[-1]}", flush=True)
    result |= {
        "what": "gcore run examples/arithmetic/judge.yaml, two controllers on two CPU slots, preparation cached",
        "goal_seconds": GOAL_S,
        "goal_accuracy": GOAL_ACCURACY,
        "seconds": spread([run["seconds"] for run in runs], 1),
        "accuracy_after": spread([run["accuracy_after"] for run in runs]),
        "runs": runs,
    }
    print(write(arguments.name, result))


if __name__ == "__main__":
    main()
