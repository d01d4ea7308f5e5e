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
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from measured import RESULTS, ROOT, circumstances

FLOWS = ("grpo", "dapo", "ppo", "remax", "rloo", "reinforce_pp", "sft")
EXAMPLES = ROOT / "examples" / "arithmetic"
WHAT = "gcore run examples/arithmetic/FLOW.yaml, two controllers on two CPU slots, one run each"
GOAL = 0.20
"""By how much the held-out accuracy is to rise."""


def one_run(flow: str, steps: int | None) -> dict[str, Any]:
    """One `gcore run` of a flow's example in a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "controllers.cli.main", "run", str(EXAMPLES / f"{flow}.yaml"), "--plain"]
        command += ["--home", f"{folder}/home", "--controllers", "2", "--slots", "cpu:2"]
        if steps is not None:
            command += ["--set", f"flow.steps={steps}"]
        began = monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        seconds = monotonic() - began
        (run,) = Path(folder).glob("home/runs/*")
        summary = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return figures(flow, summary, lines, seconds)


def figures(flow: str, summary: dict[str, Any], lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """What is kept of a run. Raises SystemExit if it did not succeed or its audit is not clean."""
    if summary["state"] != "SUCCEEDED" or summary["audit"] != "clean":
        raise SystemExit(f"{flow}: {summary['state']} ({summary['reason']}), audit {summary['audit']}")
    curve = {line["step"]: line["metrics"]["accuracy"] for line in lines if line["kind"] == "eval"}
    before, after = summary["eval_accuracy_before"], summary["eval_accuracy_after"]
    return {
        "flow": flow,
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "accuracy_before": before,
        "accuracy_after": after,
        "reaches_goal": after - before >= GOAL,
        "curve": [[step, round(accuracy, 4)] for step, accuracy in sorted(curve.items())],
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
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"what": WHAT, "goal": GOAL, "runs": [runs[name] for name in FLOWS if name in runs]}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(arguments.out)


if __name__ == "__main__":
    main()
