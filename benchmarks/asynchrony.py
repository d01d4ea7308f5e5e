"""Rollouts that run ahead of training beside rollouts that wait for it: one slot rolls out, the other trains.

    make bench-async           five alternating pairs; benchmarks/results/asynchrony.json

The same job with `rollout.staleness` 0 and 2, each pool on a slot of its own (`placement.policy: static`), so that nothing but the
waiting differs. Of each run the seconds from the first step's commit to the last one's, and the accuracy at the end; of a pair
their ratio. Real engines and ranks, on two CPU cores.
"""

from __future__ import annotations

import argparse
from typing import Any

from measured import ROOT, circumstances, spread, write
from runs import alternating_pairs, finished_run

SPEC = ROOT / "examples" / "arithmetic" / "grpo.yaml"
STEPS = 40
STALENESS = 2
SHARED = ("placement={policy: static, train: 1}", f"flow.steps={STEPS}", "eval.every=1000")
AHEAD = (f"rollout.staleness={STALENESS}", "rollout.correction=tis")


def one_run(*settings: str) -> dict[str, Any]:
    """One run. Raises SystemExit unless it succeeds with a clean audit."""
    run = finished_run(SPEC, *SHARED, *settings, controllers=1)
    return {
        "seconds": run.step_times[-1] - run.step_times[0],
        "step_seconds": [round(one, 3) for one in run.step_seconds],
        "accuracy_after": run.summary["eval_accuracy_after"],
        "staleness": [round(one.get("staleness", 0.0), 3) for one in run.stats],
        "wait_for_batch_s": round(sum(one.get("wait_for_batch_s", 0.0) for one in run.stats), 3),
        "wait_for_weights_s": round(sum(one.get("wait_for_weights_s", 0.0) for one in run.stats), 3),
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", default="asynchrony", help="of the result")
    arguments = parser.parse_args()
    result: dict[str, Any] = circumstances("torch", "deepspeed")
    pairs = alternating_pairs(arguments.pairs, ("strict", one_run), ("ahead", lambda: one_run(*AHEAD)))
    result |= {
        "what": f"staleness {STALENESS} against 0: GRPO on sums, {STEPS} steps, one slot rolls out and one trains",
        "ratio": spread([pair["strict"]["seconds"] / pair["ahead"]["seconds"] for pair in pairs]),
        "strict_accuracy": spread([pair["strict"]["accuracy_after"] for pair in pairs]),
        "ahead_accuracy": spread([pair["ahead"]["accuracy_after"] for pair in pairs]),
        "pairs": pairs,
    }
    print(write(arguments.name, result))


if __name__ == "__main__":
    main()
