"""What a tool is worth: the calculator example with and without its calculator, over three seeds.

    make bench-calculator                       six runs; benchmarks/results/calculator.json
    ... BENCH_ARGS="--seeds 0 --steps 4 --out /tmp/calculator.json"

Both runs of a seed begin with the same model and are trained in the same way, on the same prompts; one of them may ask. What is compared
is the held-out accuracy that they end with. Each seed has a model of its own, warm-started from that seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, circumstances, write_to
from runs import finished_run

KINDS = ("with_tool", "without_tool")
WHAT = "gcore run examples/calculator/KIND.yaml, two controllers on two CPU slots, each seed with a model of its own"
GOAL = 0.20
"""By how much the accuracy with the tool is to be above that without."""


def one_run(kind: str, seed: int, example: Path, steps: int | None) -> dict[str, Any]:
    """One `gcore run` in a home of its own. Raises SystemExit if it does not succeed."""
    changes = {"seed": seed, "model.path": example / "model", "data.path": example / "train.jsonl"}
    changes |= {"eval.path": example / "eval.jsonl"} | ({} if steps is None else {"flow.steps": steps})
    spec = ROOT / "examples" / "calculator" / f"{kind}.yaml"
    run = finished_run(spec, *(f"{key}={value}" for key, value in changes.items()))
    return {
        "kind": kind,
        "seed": seed,
        "steps": run.summary["steps"],
        "seconds": round(run.seconds, 1),
        "silence": silence(run.events, run.began, run.began + run.seconds),
        "accuracy_before": run.summary["eval_accuracy_before"],
        "accuracy_after": run.summary["eval_accuracy_after"],
        "curve": run.curve,
    }


def silence(events: list[dict[str, Any]], began: float, ended: float) -> dict[str, Any]:
    """The longest time of a run in which no event came, and what came behind it: where a run that took much longer than others stood."""
    times = [(one["time"], str(one["message"])[:200]) for one in events]
    waits = [(now - before, what) for (before, _), (now, what) in pairwise([(began, ""), *times, (ended, "it ended")])]
    seconds, before = max(waits)
    return {"seconds": round(seconds, 1), "before": before}


def result(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written down: the runs, and by how much the tool's are above, seed by seed."""
    after = {(run["kind"], run["seed"]): run["accuracy_after"] for run in runs}
    seeds = sorted({seed for _, seed in after})
    above = {
        str(s): round(after["with_tool", s] - after["without_tool", s], 4)
        for s in seeds
        if len({k for k, t in after if t == s}) == 2
    }
    return {
        "what": WHAT,
        "goal": GOAL,
        "above": above,
        "reaches_goal": min(above.values(), default=0) >= GOAL,
        "runs": runs,
    }


def main() -> None:
    """Prepare, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=None, help="fewer steps than the example has")
    parser.add_argument("--out", type=Path, default=RESULTS / "calculator.json")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    taken = circumstances("torch", "deepspeed", "transformers")
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            example = Path(folder) / str(seed)
            command = [sys.executable, "-m", "gcore.prepare", "calculator", "--to", str(example), "--seed", str(seed)]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for kind in KINDS:
                runs.append(one_run(kind, seed, example, arguments.steps))
                found = runs[-1]
                rose = f"{found['accuracy_before']:.1%} to {found['accuracy_after']:.1%}"
                print(f"seed {seed}, {kind}: {rose} in {found['steps']} steps, {found['seconds']:.0f} s", flush=True)
                quiet = found["silence"]
                print(f"    {quiet['seconds']:g} s of them without an event before: {quiet['before']}", flush=True)
                # After each: what was measured is not lost with a later one.
                write_to(arguments.out, taken | result(runs))
    print(arguments.out)


if __name__ == "__main__":
    main()
