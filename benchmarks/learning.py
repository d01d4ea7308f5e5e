"""Results of whole jobs: the demonstration, learning from a judge alone, with and without a tool, and with every built-in flow.

**Demo** (`demo`): `gcore run` of the arithmetic example, seconds from the command to its summary, accuracy before and after. A goal in
seconds is the median of three on a quiet machine.

**Judge** (`judge`): the same with a judge as the only reward: seconds, true accuracy, and accuracy according to the judge. The goal: at least
85 % of held-out sums right in less than 4 minutes, preparation cached; the median of three on a quiet machine.

**Calculator** (`calculator`): the gain from a tool, over three seeds. Both runs of a seed begin with the same model and are trained in the
same way, on the same prompts; one of them may call the tool. The result compares their final held-out accuracy. Each seed has a
model of its own, warm-started from that seed.

**Flows** (`flows`): every built-in flow on the arithmetic example, one run of each, so a figure has no spread: it says what a flow
reaches, not which of two is better. Each run has its time, commit and load. `--only` runs some again;
the others stay as they were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import EXAMPLES, Benchmark, Result, circumstances, finished_run, spread, write_to

ARITHMETIC = EXAMPLES / "arithmetic"

# The demonstration ----------------------------------------------------------------------------------------------------

KEPT = (
    "steps",
    "eval_accuracy_before",
    "eval_accuracy_after",
    "tokens_per_second",
    "groups_by_controller",
    "audit",
    "job_seconds",
    "sources",
)
"""Of the summary."""


def kept_of_run(spec: Path) -> dict[str, Any]:
    """One `gcore run` of two controllers on two cores in a home of its own, with what its summary says."""
    run = finished_run(spec)
    return {"seconds": round(run.seconds, 1)} | {key: run.summary[key] for key in KEPT}


def repeated(spec: Path, count: int) -> list[dict[str, Any]]:
    """So many runs of a spec, one after the other."""
    runs = []
    for number in range(count):
        runs.append(kept_of_run(spec))
        print(f"run {number + 1}/{count}: {runs[-1]}", flush=True)
    return runs


def measure_demo(arguments: argparse.Namespace, taken: Result) -> Result:
    """Several runs."""
    runs = repeated(ARITHMETIC / "grpo.yaml", arguments.pairs)
    seconds = [float(run["seconds"]) for run in runs]
    return taken | {
        "what": "gcore run examples/arithmetic/grpo.yaml, two controllers, packages and example cached",
        "median_seconds": statistics.median(seconds),
        "spread_seconds": [min(seconds), max(seconds)],
        "runs": runs,
    }


# A judge --------------------------------------------------------------------------------------------------------------

GOAL_ACCURACY, JUDGE_GOAL_S = 0.85, 240.0


def judged_figures(run: dict[str, Any]) -> dict[str, Any]:
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


def measure_judge(arguments: argparse.Namespace, taken: Result) -> Result:
    """Several runs."""
    runs = [judged_figures(run) for run in repeated(ARITHMETIC / "judge.yaml", arguments.pairs)]
    return taken | {
        "what": "gcore run examples/arithmetic/judge.yaml, two controllers on two CPU slots, preparation cached",
        "goal_seconds": JUDGE_GOAL_S,
        "goal_accuracy": GOAL_ACCURACY,
        "seconds": spread([run["seconds"] for run in runs], 1),
        "accuracy_after": spread([run["accuracy_after"] for run in runs]),
        "runs": runs,
    }


# A tool ---------------------------------------------------------------------------------------------------------------

KINDS = ("with_tool", "without_tool")
CALCULATOR_WHAT = (
    "gcore run examples/calculator/KIND.yaml, two controllers on two CPU slots, each seed with a model of its own"
)
CALCULATOR_GOAL = 0.20
"""By how much the accuracy with the tool is to be above that without."""


def calculator_run(kind: str, seed: int, example: Path, steps: int | None) -> dict[str, Any]:
    """One `gcore run` in a home of its own. Raises SystemExit if it does not succeed."""
    changes = {"seed": seed, "model.path": example / "model", "data.path": example / "train.jsonl"}
    changes |= {"eval.path": example / "eval.jsonl"} | ({} if steps is None else {"flow.steps": steps})
    spec = EXAMPLES / "calculator" / f"{kind}.yaml"
    run = finished_run(spec, *(f"{key}={value}" for key, value in changes.items()))
    return {
        "kind": kind,
        "seed": seed,
        "steps": run.summary["steps"],
        "seconds": round(run.seconds, 1),
        "silence": longest_silence(run.events, run.began, run.began + run.seconds),
        "accuracy_before": run.summary["eval_accuracy_before"],
        "accuracy_after": run.summary["eval_accuracy_after"],
        "curve": run.curve,
    }


def longest_silence(events: list[dict[str, Any]], began: float, ended: float) -> dict[str, Any]:
    """The longest time of a run in which no event came, and what came behind it: where a run that took much longer than others stood."""
    times = [(one["time"], str(one["message"])[:200]) for one in events]
    waits = [(now - before, what) for (before, _), (now, what) in pairwise([(began, ""), *times, (ended, "it ended")])]
    seconds, before = max(waits)
    return {"seconds": round(seconds, 1), "before": before}


def calculator_result(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written down: the runs, and by how much the tool's are above, seed by seed."""
    after = {(run["kind"], run["seed"]): run["accuracy_after"] for run in runs}
    seeds = sorted({seed for _, seed in after})
    above = {
        str(s): round(after["with_tool", s] - after["without_tool", s], 4)
        for s in seeds
        if len({k for k, t in after if t == s}) == 2
    }
    return {
        "what": CALCULATOR_WHAT,
        "goal": CALCULATOR_GOAL,
        "above": above,
        "reaches_goal": min(above.values(), default=0) >= CALCULATOR_GOAL,
        "runs": runs,
    }


def measure_calculator(arguments: argparse.Namespace, taken: Result) -> Result:
    """Prepare a model for each seed, then run with and without the tool. Written after each run."""
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            example = Path(folder) / str(seed)
            command = [
                sys.executable,
                "-m",
                "gcore.quickstart",
                "calculator",
                "--to",
                str(example),
                "--seed",
                str(seed),
            ]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for kind in KINDS:
                runs.append(calculator_run(kind, seed, example, arguments.steps))
                print(f"seed {seed}, {kind}: {runs[-1]}", flush=True)
                write_to(arguments.out, taken | calculator_result(runs))
    return taken | calculator_result(runs)


def calculator_options(parser: argparse.ArgumentParser) -> None:
    """Seeds and steps."""
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="fewer steps than the example has")


# Flows ----------------------------------------------------------------------------------------------------------------

FLOWS = ("grpo", "dapo", "ppo", "remax", "rloo", "reinforce_pp", "sft")
FLOWS_WHAT = "gcore run examples/arithmetic/FLOW.yaml, two controllers on two CPU slots, one run each"
FLOWS_GOAL = 0.20
"""By how much the held-out accuracy is to rise."""


def flow_run(flow: str, steps: int | None) -> dict[str, Any]:
    """One `gcore run` of a flow's example, and what is kept of it."""
    run = finished_run(ARITHMETIC / f"{flow}.yaml", *([] if steps is None else [f"flow.steps={steps}"]))
    before, after = run.summary["eval_accuracy_before"], run.summary["eval_accuracy_after"]
    return {
        "flow": flow,
        "steps": run.summary["steps"],
        "seconds": round(run.seconds, 1),
        "accuracy_before": before,
        "accuracy_after": after,
        "reaches_goal": after - before >= FLOWS_GOAL,
        "curve": run.curve,
    }


def measure_flows(arguments: argparse.Namespace, _: Result) -> Result:
    """One run of each flow, beside the runs that the result has already. Written after each run."""
    known = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else []
    runs = {run["flow"]: run for run in known}
    result: Result = {}
    for flow in arguments.only:
        taken = circumstances("torch", "deepspeed", "transformers")
        runs[flow] = flow_run(flow, arguments.steps) | taken
        print(f"{flow}: {runs[flow]}", flush=True)
        result = {"what": FLOWS_WHAT, "goal": FLOWS_GOAL, "runs": [runs[name] for name in FLOWS if name in runs]}
        write_to(arguments.out, result)
    return result


def flow_options(parser: argparse.ArgumentParser) -> None:
    """Flows and steps."""
    parser.add_argument("--only", nargs="*", choices=FLOWS, default=FLOWS)
    parser.add_argument("--steps", type=int, help="fewer steps than the examples have")


BENCHMARKS = (
    Benchmark("demo", "demo", measure_demo, ("torch", "deepspeed"), 3),
    Benchmark("judge", "judge", measure_judge, ("torch", "deepspeed"), 3),
    Benchmark(
        "calculator",
        "calculator",
        measure_calculator,
        ("torch", "deepspeed", "transformers"),
        options=calculator_options,
    ),
    Benchmark("flows", "flows", measure_flows, options=flow_options),
)
