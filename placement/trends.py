"""Of a row of numbers, oldest first: whether the newest are plainly others than those before, and what they rise by. Pure.

A row is one of logarithms, so that what is twice as much is as far off as what is half. Nothing here knows what is measured: lengths,
judgements, times of tokens, errors of forecasts. A jump that is not plain is taken as luck, and nothing is foretold of jumps to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

PLAIN = 4.0
"""A jump is plain when the newest steps are off by so many standard deviations."""
LEAST_SPREAD = 0.03
"""What logarithms of means are taken to differ by from step to step, at least."""


def plainly_off(before: Sequence[float], after: Sequence[float], least: float, times: float = PLAIN) -> float:
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
        if plainly_off(logs[max(at - 16, 0) : at], logs[at:], LEAST_SPREAD):
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
