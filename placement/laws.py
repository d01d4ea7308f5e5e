"""Speed laws (seconds per token by load, seconds of training by tokens and slots), and the detection of jumps and
trends in measurements.

`DecodeLaw` and `TrainLaw` are lines fitted to the newest steps by least squares of relative errors. If the loads hardly
differ, or the fitted line does not rise, only the level comes from the measurements, and the slope is a prior. A pool
without measurements gets a pessimistic law.

Jumps and trends are found in series of logarithms, oldest first, so that doubling and halving are equally large. A jump
counts only if it exceeds the noise of the series. Jumps are not predicted. Engines may become slower or faster from one
step to the next; `PaceTracker` finds the step since which a pool's engines have had their present speed. Measurements
from before that step only show how the speed depends on the load.
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
"""Number of newest steps that speeds are fitted to."""


@dataclass(frozen=True, slots=True)
class DecodeLaw:
    """Law of an engine's speed: `token_s + sequence_s * running` seconds per token of each of its `running` requests.
    `most`: maximum of concurrent requests; further ones wait."""

    token_s: float
    sequence_s: float
    most: int

    def at(self, running: Floats) -> Floats:
        """Return the seconds per token at these numbers of requests per engine, [n]."""
        return self.token_s + self.sequence_s * np.clip(running, 1.0, self.most)


@dataclass(frozen=True, slots=True)
class TrainLaw:
    """Law of training time: `fixed_s + slot_s * tokens / slots` seconds for a step."""

    fixed_s: float
    slot_s: float


def fit_decode_law(history: Sequence[MeasuredStep], pool: str, most: int, since: int = 0) -> DecodeLaw:
    """Fit a pool's `DecodeLaw` to the steps from `since` on. If their loads hardly differ, the ratio of slope to level
    comes from earlier steps, or else from a prior. `most`: maximum of concurrent requests per engine."""
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
    # The prior: each additional request adds 3 % of the time of a token.
    base = median((seconds / (1 + 0.03 * running)).tolist())
    return DecodeLaw(base, 0.03 * base, most)


def pool_points(steps: Sequence[MeasuredStep], pool: str) -> list[tuple[float, float]]:
    """Return a pool's measured points: mean running requests per engine, and seconds per token at that load."""
    return [(s.running, s.token_s) for one in steps for s in one.speed if s.pool == pool and s.token_s > 0]


def fit_train_law(history: Sequence[MeasuredStep]) -> TrainLaw:
    """Fit the `TrainLaw` to the newest steps. If the tokens per slot hardly varied, a tenth of the median time counts
    as fixed."""
    measured = [(one.train_tokens / one.split.train, one.train_s) for one in history[-64:] if one.train_s is not None]
    if not measured:
        return TrainLaw(0.0, 1e-3)
    shares, seconds = np.array(measured).T
    if shares.size >= 4 and float(shares.max()) > 1.8 * float(shares.min()):
        line = fit_line(shares, seconds)
        if line is not None:
            return TrainLaw(*line)
    ratio = float(np.median(seconds / shares))
    return TrainLaw(0.1 * ratio * float(np.median(shares)), 0.9 * ratio)


def fit_line(at: Floats, seconds: Floats) -> tuple[float, float] | None:
    """Fit a line by least squares of relative errors. Return its intercept and slope, or None if the slope or the
    intercept is not positive."""
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
"""Number of standard deviations by which the newest steps must differ from the earlier ones to be a jump."""

LEAST_SPREAD = 0.03
"""Minimum standard deviation of logarithms of means from step to step."""


def plain_offset(before: Sequence[float], after: Sequence[float], least: float, times: float = PLAIN) -> float:
    """Return the difference of the mean of `after` from the median of `before`; 0 if it is not significant, that is
    below about `times` standard deviations of `before`. The fewer values `after` has, the higher the threshold.
    `least`: lower limit of the standard deviation that is used."""
    middle, count = median(before), len(after)
    spread = max(sqrt(sum((one - middle) ** 2 for one in before) / len(before)), least)
    off = sum(after) / count - middle
    return off if abs(off) > (times + 1.5 / count) * spread / sqrt(min(count, 2)) else 0.0


def since_jump(logs: Sequence[float]) -> int:
    """Return the index of the first value after the newest significant jump; 0 if there is none among the last four.
    `logs`: logarithms of a quantity's mean in each step, oldest first."""
    for newest in (1, 2, 3, 4):
        at = len(logs) - newest
        if at < 4:
            break
        if plain_offset(logs[max(at - 16, 0) : at], logs[at:], LEAST_SPREAD):
            return at
    return 0


def slope(logs: NDArray[np.float64]) -> float:
    """Return the fitted slope of a series of logarithms per step, shrunk towards 0 by its uncertainty; 0 for a short
    series."""
    if logs.size < 8:
        return 0.0
    at = np.arange(logs.size) - (logs.size - 1) / 2
    spread = float((at**2).sum())
    rise = float((at * logs).sum()) / spread
    error = float(np.sum((logs - logs.mean() - rise * at) ** 2)) / (logs.size - 2) / spread
    return rise * max(1.0 - error / max(rise**2, 1e-18), 0.0)


POOLS = ("rollout", "reward")
"""Pools whose engines have a tracked speed."""

FEWEST = 3
"""Number of measured steps that a jump of speed must have before it; with fewer no jump is detected."""

LEAST_UNEVEN = 0.05
"""Lower limit of the assumed standard deviation of the logarithm of the token time from step to step at one load."""


class PaceTracker:
    """Tracks since which step a pool's engines have had their present speed. Mutable: call `see` after each step,
    because a jump is only detected while it is new."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._shown: tuple[MeasuredStep, ...] = ()

    def see(self, history: Sequence[MeasuredStep]) -> None:
        """Detect jumps of speed in the new steps of the history, oldest first. Steps that a rollback removed from the
        history are forgotten."""
        newest = self._shown[-1].step if self._shown else -1
        if (
            history and history[-1].step < newest
        ):  # a rollback discarded steps; discard the speed jumps measured in them too
            self._since, newest = {}, -1
        for at, step in enumerate(history):
            is_told_anew = at == len(history) - 1 and (not self._shown or step is not self._shown[-1])
            if step.step > newest or is_told_anew:
                for pool in POOLS:
                    self._since[pool] = pace_start(history[: at + 1], pool, self.since(pool))
        self._shown = tuple(history)

    def since(self, pool: str) -> int:
        """Return the number of the step since which `pool` has had its present speed; 0: since the beginning."""
        return self._since.get(pool, 0)


def pace_start(history: Sequence[MeasuredStep], pool: str, since: int) -> int:
    """Return the step since which a pool's engines have had their present speed. `since`: the step known so far. It is
    replaced by one of the newest steps if the token time changed there significantly, and a change of the load does not
    explain it."""
    groups = [
        (one.step, points) for one in history[-SPEEDS:] if one.step >= since and (points := pool_points([one], pool))
    ]
    if len(groups) <= FEWEST:
        return since
    of_each = [np.array(points).T for _, points in groups]
    begins = np.cumsum([0, *(one.shape[1] for one in of_each)])
    every = np.concatenate(of_each, axis=1)
    together = _level(every, every, begins)
    for newest in range(1, min(3, len(of_each) - FEWEST) + 1):
        before = _level(every[:, : begins[-1 - newest]], every, begins)
        if all(plain_offset(offs[:-newest], offs[-newest:], LEAST_UNEVEN) for offs in (before, together)):
            return groups[-newest][0]
    return since


def _level(points: Floats, every: Floats, begins: NDArray[np.int64]) -> list[float]:
    """Return for each step the mean logarithm of its token times relative to a line fitted to `points`, [2, n] (load
    and seconds per token). `every`: the points of all steps, [2, m]. `begins`: index in `every` at which the points of
    each step begin, and their total number."""
    running, seconds = points
    line = fit_line(running, seconds) if float(running.max()) > 1.2 * float(running.min()) else None
    start, rise = line or (1.0, 0.03)
    logs = np.log(every[1] / (start + rise * every[0]))
    found: list[float] = (np.add.reduceat(logs, begins[:-1]) / np.diff(begins)).tolist()
    return found
