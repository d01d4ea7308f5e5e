"""What a step's waits say, in words: who waited for whom, and so what would make steps shorter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from controllers.cli.view_points import StepPoint
from controllers.cli.view_text import seconds

WAITS = {
    "wait_for_batch_s": "ranks {} for a batch",
    "wait_for_weights_s": "engines {} for weights",
    "tail_s": "{} for others' responses",
}
"""By their names in a step's statistics."""


def usual_waits(points: Sequence[StepPoint]) -> dict[str, float]:
    """Medians of the waits, over those of the steps that tell them."""
    told = {name: [point.stats[name] for point in points if name in point.stats] for name in WAITS}
    return {name: median(values) for name, values in told.items() if values}


def waits_line(waits: Mapping[str, float]) -> str:
    """One line; empty if nothing is known."""
    said = ", ".join(words.format(seconds(waits[name])) for name, words in WAITS.items() if name in waits)
    bottleneck = bottleneck_of(waits)
    return f"{said}: {bottleneck} holds steps up" if bottleneck else said


def bottleneck_of(waits: Mapping[str, float]) -> str:
    """Whom the others wait for the longest; empty if that is not known. Ranks and engines that share a slot take turns."""
    batch, weights = waits.get("wait_for_batch_s"), waits.get("wait_for_weights_s")
    if batch is None or weights is None:
        return ""
    if weights >= batch:
        return "training"
    return "the tail of generation" if waits.get("tail_s", 0.0) > batch / 2 else "generation"
