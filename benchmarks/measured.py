"""What every benchmark's result says of itself: machine, date, commit, versions, load; and medians with their spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def circumstances(*packages: str) -> dict[str, Any]:
    """Where and when this is measured. `packages`: whose versions matter."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Python {platform.python_version()}",
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {name: _version(name) for name in packages},
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, least and most, and how many."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
        "count": len(values),
    }


def write(name: str, result: dict[str, Any]) -> Path:
    """benchmarks/results/NAME.json."""
    return write_to(RESULTS / f"{name}.json", result)


def write_to(path: Path, result: dict[str, Any]) -> Path:
    """A file of that path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
