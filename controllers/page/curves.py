"""A run's numbers step by step, as the page draws them: from the end of `metrics.jsonl`, along the chain that holds.

A rollback takes the steps behind it out. Of more steps than a curve has room for every second, fourth, ... is left out, never the newest.
Blocks on the disk; reads a bounded part of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore.tracking.file import FILE
from gcore.tracking.lines import Line, decode

MOST_BYTES = 4 << 20
"""Of the file's end."""
MOST_POINTS = 400
NAMES = (
    "reward",
    "accuracy",
    "kl",
    "kl_reference",
    "entropy",
    "response_length",
    "clip_fraction",
    "grad_norm",
    "loss",
    "mismatch_kl",
    "staleness",
    "filter_rate",
    "tokens_per_second",
    "seconds",
    "publish_s",
    "collect_s",
    "exchange_s",
    "train_s",
)


@dataclass
class Curves:
    """Points by number: `step` and `value`, ascending. `newest`: the last step; `partial`: earlier ones were not looked at."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    newest: int = 0
    partial: bool = False


def read(run_dir: Path, most_bytes: int = MOST_BYTES) -> Curves:
    """Of a run's folder; empty where there is no file yet. Raises OSError."""
    try:
        with (run_dir / FILE).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - most_bytes, 0))
            lines = file.read(most_bytes).split(b"\n")
    except FileNotFoundError:
        return Curves()
    partial = size > most_bytes
    return curves_of((line for one in lines[partial:] if (line := decode(one)) is not None), partial=partial)


def stamp(run_dir: Path) -> object:
    """Differs when there is anything new to read. Raises OSError, but for a file that is not there."""
    try:
        return (run_dir / FILE).stat().st_size
    except FileNotFoundError:
        return None


def curves_of(lines: Iterable[Line], *, partial: bool = False) -> Curves:
    """The curves of a run's lines. Pure."""
    steps: dict[int, dict[str, float]] = {}
    evals: dict[int, float] = {}
    for line in lines:
        kind, step = line["kind"], line.get("step", 0)
        if kind == "rollback":
            steps = {at: one for at, one in steps.items() if at <= step}
            evals = {at: one for at, one in evals.items() if at <= step}
        elif kind == "step":
            steps[step] = _numbers(line)
        elif kind == "eval" and "accuracy" in (found := _numbers(line)):
            evals[step] = found["accuracy"]
    curves = Curves(newest=max(steps, default=0), partial=partial)
    for name in NAMES:
        points = [(at, one[name]) for at, one in sorted(steps.items()) if name in one]
        if name == "accuracy":
            points = sorted(evals.items())
        if points:
            curves.points[name] = thinned(points)
    return curves


def _numbers(line: Line) -> dict[str, float]:
    metrics: Any = line.get("metrics")
    told = metrics if isinstance(metrics, dict) else {}
    return {name: value for name, value in told.items() if math.isfinite(value)}


def thinned(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most so many of them, evenly, with the last."""
    every = -(-len(points) // most)
    return list(points[(len(points) - 1) % every :: every]) if every > 1 else list(points)
