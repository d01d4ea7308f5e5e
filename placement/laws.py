"""Times of tokens and steps as functions of load, and jumps and trends in what was measured.

`DecodeLaw` and `TrainLaw` are lines fitted to the newest steps, by least squares of relative errors. Where a line does not rise, or loads
hardly differed, only its level counts as measured, and its shape is a prior; a pool that was never measured has a pessimistic law.

Jumps and trends are found in series of logarithms, oldest first, so that twice as much is as far off as half as much. A jump counts only
where it is larger than the noise of the series; no jump is predicted. `PaceTracker` finds since when a pool's engines have had their
present pace: engines may become slower or faster from one step to the next, and measurements from before a jump only show how the pace
depends on the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from placement.measurements import MeasuredStep

Floats = NDArray[np.float64]

SPEEDS = 24
"""Newest steps that speeds are fitted to."""


@dataclass(frozen=True, slots=True)
class DecodeLaw:
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


def fit_decode_law(history: Sequence[MeasuredStep], pool: str, most: int, since: int = 0) -> DecodeLaw:
    """Through what was measured from step `since` on; a pool that ran at one load only has the share of what a request adds from before
    that, or else the prior's."""
    newest = history[-SPEEDS:]
    points = pool_points([one for one in newest if one.step >= since], pool)
    if not points:
        return DecodeLaw(0.03, 0.0015, most) if since == 0 else fit_decode_law(history, pool, most)
    running, seconds = np.array(points).T
    if running.size >= 3 and float(running.max()) > 2.0 * float(running.min()):
        line = fit_line(running, seconds)
        if line is not None:
            return DecodeLaw(line[0], line[1], most)
    before = [one for one in newest if one.step < since]
    if since > 0 and pool_points(before, pool):
        shape = fit_decode_law(before, pool, most)
        times = median((seconds / shape.at(running)).tolist())
        return DecodeLaw(shape.token_s * times, shape.sequence_s * times, most)
    # The share of the prior: a thirtieth of a token's own time for each request more.
    base = median((seconds / (1 + 0.03 * running)).tolist())
    return DecodeLaw(base, 0.03 * base, most)


def pool_points(steps: Sequence[MeasuredStep], pool: str) -> list[tuple[float, float]]:
    """What was seen of a pool: how many requests an engine ran, and seconds of a token."""
    return [(s.running, s.token_s) for one in steps for s in one.speed if s.pool == pool and s.token_s > 0]


def fit_train_law(history: Sequence[MeasuredStep]) -> TrainLaw:
    """By least squares; while the share of a slot hardly varied, a tenth of it is taken as what no slot shares."""
    told = [(one.train_tokens / one.split.train, one.train_s) for one in history[-64:] if one.train_s is not None]
    if not told:
        return TrainLaw(0.0, 1e-3)
    shares, seconds = np.array(told).T
    if shares.size >= 4 and float(shares.max()) > 1.8 * float(shares.min()):
        line = fit_line(shares, seconds)
        if line is not None:
            return TrainLaw(*line)
    ratio = float(np.median(seconds / shares))
    return TrainLaw(0.1 * ratio * float(np.median(shares)), 0.9 * ratio)


def fit_line(at: Floats, seconds: Floats) -> tuple[float, float] | None:
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


PLAIN = 4.0
"""A jump is plain when the newest steps are off by so many standard deviations."""

LEAST_SPREAD = 0.03
"""What logarithms of means are taken to differ by from step to step, at least."""


def plain_offset(before: Sequence[float], after: Sequence[float], least: float, times: float = PLAIN) -> float:
    """What the mean of `after` is off the median of `before` by; 0: not plainly, which is by so many `times` the spread of `before`, and by
    more while `after` is but one or two. `least`: that spread at least."""
    middle, count = median(before), len(after)
    spread = max(sqrt(sum((one - middle) ** 2 for one in before) / len(before)), least)
    off = sum(after) / count - middle
    return off if abs(off) > (times + 1.5 / count) * spread / sqrt(min(count, 2)) else 0.0


def since_jump(logs: Sequence[float]) -> int:
    """Where the newest stretch without a plain jump begins; logarithms of means, oldest first."""
    for newest in (1, 2, 3, 4):
        at = len(logs) - newest
        if at < 4:
            break
        if plain_offset(logs[max(at - 16, 0) : at], logs[at:], LEAST_SPREAD):
            return at
    return 0


def slope(logs: NDArray[np.float64]) -> float:
    """What the logarithm rises by in a step, made smaller by what it is uncertain by."""
    if logs.size < 8:
        return 0.0
    at = np.arange(logs.size) - (logs.size - 1) / 2
    spread = float((at**2).sum())
    rise = float((at * logs).sum()) / spread
    error = float(np.sum((logs - logs.mean() - rise * at) ** 2)) / (logs.size - 2) / spread
    return rise * max(1.0 - error / max(rise**2, 1e-18), 0.0)


POOLS = ("rollout", "reward")
"""Whose engines have a pace."""

FEWEST = 3
"""Steps before a jump of speed without which none is seen."""

LEAST_UNEVEN = 0.05
"""What the times of tokens at one load are taken to differ by from step to step, at least."""


class PaceTracker:
    """Since which step a pool's engines are as fast as they are. Mutable: it is shown each step, for a jump is only seen while it is new."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._shown: tuple[MeasuredStep, ...] = ()

    def see(self, history: Sequence[MeasuredStep]) -> None:
        """What was measured until now, oldest first."""
        newest = self._shown[-1].step if self._shown else -1
        if history and history[-1].step < newest:  # steps were given up, and the pace that they told of with them
            self._since, newest = {}, -1
        for at, step in enumerate(history):
            is_told_anew = at == len(history) - 1 and (not self._shown or step is not self._shown[-1])
            if step.step > newest or is_told_anew:
                for pool in POOLS:
                    self._since[pool] = pace_start(history[: at + 1], pool, self.since(pool))
        self._shown = tuple(history)

    def since(self, pool: str) -> int:
        """The step; 0: always."""
        return self._since.get(pool, 0)


def pace_start(history: Sequence[MeasuredStep], pool: str, since: int) -> int:
    """The step from which on a pool's engines have the pace that they have now: `since`, or one of the newest, where tokens plainly take
    longer or less long there than before. Neither what they took before explains it, nor another load."""
    told = [
        (one.step, points) for one in history[-SPEEDS:] if one.step >= since and (points := pool_points([one], pool))
    ]
    if len(told) <= FEWEST:
        return since
    of_each = [np.array(points).T for _, points in told]
    begins = np.cumsum([0, *(one.shape[1] for one in of_each)])
    every = np.concatenate(of_each, axis=1)
    together = _level(every, every, begins)
    for newest in range(1, min(3, len(of_each) - FEWEST) + 1):
        before = _level(every[:, : begins[-1 - newest]], every, begins)
        if all(plain_offset(offs[:-newest], offs[-newest:], LEAST_UNEVEN) for offs in (before, together)):
            return told[-newest][0]
    return since


def _level(points: Floats, every: Floats, begins: NDArray[np.int64]) -> list[float]:
    """The mean logarithm of what each step's tokens took beside the line through `points`, [2, n]; `begins`: where each step's points do
    in `every`."""
    running, seconds = points
    line = fit_line(running, seconds) if float(running.max()) > 1.2 * float(running.min()) else None
    start, rise = line or (1.0, 0.03)
    logs = np.log(every[1] / (start + rise * every[0]))
    found: list[float] = (np.add.reduceat(logs, begins[:-1]) / np.diff(begins)).tolist()
    return found
