"""The demo, several times: seconds from the command to its summary, accuracy before and after.

    make bench-demo            three runs; writes benchmarks/results/demo.json

Says machine, date, commit and spread. A goal in seconds is the median of three on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measured import RESULTS, ROOT, write_to
from runs import finished_run

SPEC = ROOT / "examples" / "arithmetic" / "grpo.yaml"
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


def one_run(spec: Path = SPEC) -> dict[str, Any]:
    """One `gcore run` of two controllers on two cores in a home of its own, with what its summary says."""
    run = finished_run(spec)
    return {"seconds": round(run.seconds, 1)} | {key: run.summary[key] for key in KEPT}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "demo.json")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    runs = []
    for number in range(arguments.runs):
        runs.append(one_run())
        print(f"run {number + 1}/{arguments.runs}: {runs[-1]}", flush=True)
    seconds = [float(run["seconds"]) for run in runs]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    result = {
        "what": "gcore run examples/arithmetic/grpo.yaml, two controllers, packages and example cached",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_before": round(load_before, 2),
        "median_seconds": statistics.median(seconds),
        "spread_seconds": [min(seconds), max(seconds)],
        "runs": runs,
    }
    print(f"median {result['median_seconds']} s, {write_to(arguments.out, result)}")


if __name__ == "__main__":
    main()
