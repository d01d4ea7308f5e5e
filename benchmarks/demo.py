"""The demo, several times: seconds from the command to its summary, accuracy before and after.

    make bench-demo            three runs; writes benchmarks/results/demo.json

Says machine, date, commit and spread. A goal in seconds is the median of three on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
SPEC = ROOT / "examples" / "arithmetic" / "grpo.yaml"


def one_run(spec: Path = SPEC, *more: str) -> dict[str, object]:
    """One `gcore run` of two controllers on two cores in a home of its own, with what its summary says."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "controllers.cli.main",
            "run",
            str(spec),
            "--home",
            f"{folder}/home",
            "--plain",
            *more,
        ]
        began = monotonic()
        subprocess.run(
            [*command, "--controllers", "2", "--slots", "cpu:2"], check=True, stdout=subprocess.DEVNULL, cwd=folder
        )
        seconds = monotonic() - began
        (summary,) = Path(folder).glob("home/runs/*/summary.json")
        found = json.loads(summary.read_text())
    kept = (
        "steps",
        "eval_accuracy_before",
        "eval_accuracy_after",
        "tokens_per_second",
        "groups_by_controller",
        "audit",
        "job_seconds",
        "sources",
    )
    return {"seconds": round(seconds, 1)} | {key: found[key] for key in kept}


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "demo.json")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    runs = []
    for number in range(arguments.runs):
        runs.append(one_run())
        print(f"run {number + 1}/{arguments.runs}: {runs[-1]}", flush=True)
    seconds = [float(str(run["seconds"])) for run in runs]
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
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"median {result['median_seconds']} s, {arguments.out}")


if __name__ == "__main__":
    main()
