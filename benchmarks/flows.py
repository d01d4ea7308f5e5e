"""Every built-in flow on the arithmetic example: held-out accuracy before, on the way and after, and how long it took.

    make bench-flows                      each flow once; benchmarks/results/flows.json, docs/flows.md, docs/flows.svg
    ... BENCH_ARGS="--only rloo"          that one again; the others stay as they were measured
    ... BENCH_ARGS="--steps 4 --out /tmp/flows.json"

One run of each, so a figure here has no spread: it says what a flow reaches, not which of two is better. Each run says when, at
which commit and under what load it was taken.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, circumstances, write_to
from runs import finished_run

FLOWS = ("grpo", "dapo", "ppo", "remax", "rloo", "reinforce_pp", "sft")
EXAMPLES = ROOT / "examples" / "arithmetic"
WHAT = "gcore run examples/arithmetic/FLOW.yaml, two controllers on two CPU slots, one run each"
GOAL = 0.20
"""By how much the held-out accuracy is to rise."""


def one_run(flow: str, steps: int | None) -> dict[str, Any]:
    """One `gcore run` of a flow's example, and what is kept of it."""
    run = finished_run(EXAMPLES / f"{flow}.yaml", *([] if steps is None else [f"flow.steps={steps}"]))
    before, after = run.summary["eval_accuracy_before"], run.summary["eval_accuracy_after"]
    return {
        "flow": flow,
        "steps": run.summary["steps"],
        "seconds": round(run.seconds, 1),
        "accuracy_before": before,
        "accuracy_after": after,
        "reaches_goal": after - before >= GOAL,
        "curve": run.curve,
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=FLOWS, default=FLOWS)
    parser.add_argument("--steps", type=int, default=None, help="fewer steps than the examples have")
    parser.add_argument("--out", type=Path, default=RESULTS / "flows.json")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    runs = {run["flow"]: run for run in known}
    for flow in arguments.only:
        if not (EXAMPLES / f"{flow}.yaml").exists():
            raise SystemExit(f"{EXAMPLES / flow}.yaml is not there")
        taken = circumstances("torch", "deepspeed", "transformers")
        found = runs[flow] = one_run(flow, arguments.steps) | taken
        rose = f"{found['accuracy_before']:.1%} to {found['accuracy_after']:.1%}"
        print(f"{flow}: {rose} in {found['steps']} steps, {found['seconds']:.0f} s", flush=True)
        # After each: what was measured is not lost with a later one.
        result = {"what": WHAT, "goal": GOAL, "runs": [runs[name] for name in FLOWS if name in runs]}
        write_to(arguments.out, result)
    print(arguments.out)


if __name__ == "__main__":
    main()
