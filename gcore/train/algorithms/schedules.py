"""The learning rate of an update, as a function of its number alone, so that a resumed run goes on where it was.

Rises linearly over the warm-up, then stays, or falls to zero at the job's last update along a line or half a cosine. The
first update already has a rate above zero, and the last too: no update is made for nothing.
"""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    update: int,
    *,
    peak: float,
    warmup_updates: int,
    schedule: Literal["constant", "linear", "cosine"],
    total_updates: int,
) -> float:
    """The rate of optimizer update number `update` (from 0) of `total_updates`; 0 beyond them unless constant.

    In the warm-up peak·(update + 1)/warmup_updates; the first update after it has `peak`. Raises ValueError for a
    negative number.
    """
    if update < 0:
        raise ValueError(f"update {update}; updates are counted from 0")
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    left = max(0.0, (total_updates - update) / max(1, total_updates - warmup_updates))
    return peak * (left if schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)
