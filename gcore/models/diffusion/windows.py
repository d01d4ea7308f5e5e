"""Which denoising steps are random and trained, and which states are kept for them: a window that moves with the training steps (MixGRPO, arXiv 2507.21802).

The steps of the window are sampled from the SDE and trained; all others follow the ODE, without noise and without a
log-probability. The window is a function of the training step alone, so that every controller computes the same one from
head, also after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

WindowStrategy = Literal["fixed", "progressive", "random", "decay", "exp_decay"]


@dataclass(frozen=True, slots=True)
class WindowSchedule:
    """Windows of `size` steps among the first `steps` denoising steps.

    `stay`: training steps until the window moves. `stride`: by how many denoising steps it moves; None: by its size.
    `start`: first denoising step of the first window. `strategy`:

    - "fixed": the first window stays.
    - "progressive": each window stays as long.
    - "decay": the stay falls linearly from `stay` to `least_stay` (None: a quarter) with the window's start.
    - "exp_decay": the stay is `stay`·exp(-`decay_rate`·max(0, start - `decay_after`)), rounded up, at least 1.
    - "random": the start of each training step is drawn by `seed`.

    `roll_back`: after the last window the first one follows; otherwise the last one stays.
    """

    size: int
    steps: int
    stay: int = 25
    strategy: WindowStrategy = "progressive"
    stride: int | None = None
    roll_back: bool = True
    start: int = 0
    least_stay: int | None = None
    decay_after: int = 13
    decay_rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a schedule with a window that is empty."""
        if not (1 <= self.size <= self.steps and 0 <= self.start < self.steps and self.stay >= 1):
            raise ValueError(
                f"a window of {self.size} from step {self.start} among {self.steps} steps, {self.stay} training steps each, is empty"
            )
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"the window must move by at least one step, not {self.stride}")

    def window(self, step: int) -> range:
        """The trained denoising steps of training step `step`, which counts from 0. Never empty."""
        if self.strategy == "fixed":
            return self._of(self.start)
        if self.strategy == "random":
            # The draw of another process for the same step must be the same.
            drawn = np.random.default_rng((self.seed, step)).integers(0, self.steps - self.size + 1)
            return range(int(drawn), int(drawn) + self.size)
        places = self.places()
        total = sum(stay for _, stay in places)
        if step >= total and not self.roll_back:
            return places[-1][0]
        step %= total
        for window, stay in places:
            if step < stay:
                return window
            step -= stay
        raise AssertionError("the stays add up to their total")

    def places(self) -> tuple[tuple[range, int], ...]:
        """The places of the window, in order, and for how many training steps it stays at each, at least one. Of windows that do not
        move, or move at random, one place stands for all, which have the same size."""
        if self.strategy == "fixed":
            return ((self._of(self.start), self.stay),)
        if self.strategy == "random":
            return ((self._of(0), self.stay),)
        starts = range(self.start, self.steps, self.stride or self.size)
        return tuple((self._of(start), self._stay_at(start)) for start in starts)

    def _of(self, start: int) -> range:
        return range(start, min(start + self.size, self.steps))

    def _stay_at(self, start: int) -> int:
        if self.strategy == "decay":
            least = max(1, self.stay // 4) if self.least_stay is None else self.least_stay
            done = start / self.steps
            return max(least, int(self.stay * (1 - done) + least * done))
        if self.strategy == "exp_decay":
            return max(1, math.ceil(self.stay * math.exp(-self.decay_rate * max(0, start - self.decay_after))))
        return self.stay


def kept_states(steps: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the states that are stored for the trained `steps`: before and after each, ascending, each once. State i
    is the one before step i."""
    return tuple(sorted({number for step in steps for number in (step, step + 1)}))
