"""How long engines take for a token, and ranks for a step: lines through what was measured of the newest steps. Pure.

By least squares of relative errors. Where a line does not rise, or loads hardly differed, only its level is what was measured, and its
shape is a prior; a pool that was never measured has a pessimistic one. Since when the pace has been what it is, whoever asks knows
(`placement.paces`); nothing here looks for jumps, or ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from placement.measured import Measured

Floats = NDArray[np.float64]

SPEEDS = 24
"""Newest steps that speeds are fitted to."""


@dataclass(frozen=True, slots=True)
class Law:
    """Seconds of a token beside `running` requests on one engine, at most `most` of them."""

    token_s: float
    sequence_s: float
    most: int

    def at(self, running: Floats) -> Floats:
        """Of each of so many, [n]."""
        return self.token_s + self.sequence_s * np.clip(running, 1.0, self.most)


@dataclass(frozen=True, slots=True)
class TrainLaw:
    """Of a step with so many tokens on so many slots."""

    fixed_s: float
    slot_s: float


def law_of(history: Sequence[Measured], pool: str, most: int, since: int = 0) -> Law:
    """Through what was measured from step `since` on; a pool that ran at one load only has the share of what a request adds from before
    that, or else the prior's."""
    newest = history[-SPEEDS:]
    points = points_of([one for one in newest if one.step >= since], pool)
    if not points:
        return Law(0.03, 0.0015, most) if since == 0 else law_of(history, pool, most)
    running, seconds = np.array(points).T
    if running.size >= 3 and float(running.max()) > 2.0 * float(running.min()):
        line = line_through(running, seconds)
        if line is not None:
            return Law(line[0], line[1], most)
    before = [one for one in newest if one.step < since]
    if since > 0 and points_of(before, pool):
        shape = law_of(before, pool, most)
        times = median((seconds / shape.at(running)).tolist())
        return Law(shape.token_s * times, shape.sequence_s * times, most)
    # The share of the prior: a thirtieth of a token's own time for each request more.
    base = median((seconds / (1 + 0.03 * running)).tolist())
    return Law(base, 0.03 * base, most)


def points_of(steps: Sequence[Measured], pool: str) -> list[tuple[float, float]]:
    """What was seen of a pool: how many requests an engine ran, and seconds of a token."""
    return [(s.running, s.token_s) for one in steps for s in one.speed if s.pool == pool and s.token_s > 0]


def train_law(history: Sequence[Measured]) -> TrainLaw:
    """By least squares; while the share of a slot hardly varied, a tenth of it is taken as what no slot shares."""
    told = [(one.train_tokens / one.split.train, one.train_s) for one in history[-64:] if one.train_s is not None]
    if not told:
        return TrainLaw(0.0, 1e-3)
    shares, seconds = np.array(told).T
    if shares.size >= 4 and float(shares.max()) > 1.8 * float(shares.min()):
        line = line_through(shares, seconds)
        if line is not None:
            return TrainLaw(*line)
    ratio = float(np.median(seconds / shares))
    return TrainLaw(0.1 * ratio * float(np.median(shares)), 0.9 * ratio)


def line_through(at: Floats, seconds: Floats) -> tuple[float, float] | None:
    """Where the line begins and what it rises by, least squares of relative errors; None: it does not rise from above 0."""
    weight = 1.0 / seconds**2
    total = weight.sum()
    mean, mean_s = (weight * at).sum() / total, (weight * seconds).sum() / total
    spread = float((weight * (at - mean) ** 2).sum())
    if not total > 0 or spread <= 0:
        return None
    rise = float((weight * (at - mean) * (seconds - mean_s)).sum()) / spread
    start = float(mean_s - rise * mean)
    return (start, rise) if start > 0 and rise > 0 else None
