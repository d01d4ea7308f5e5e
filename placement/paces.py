"""Since when a pool's engines have been as fast as they are. Pure but for what it remembers.

Engines may become slower or faster from one step to the next: judges that were moved to other hardware, or whose prompts are other ones.
What was measured before such a jump tells nothing of the pace there is, only of how it depends on the load. A jump is one that is plain
beside how uneven the times of tokens were until then, at the loads there were; what the pace is, is for `placement.laws` to fit, and
nothing here looks ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from placement.laws import SPEEDS, Floats, line_through, points_of
from placement.measured import Measured
from placement.trends import plainly_off

POOLS = ("rollout", "reward")
"""Whose engines have a pace."""
FEWEST = 3
"""Steps before a jump of speed without which none is seen."""
LEAST_UNEVEN = 0.05
"""What the times of tokens at one load are taken to differ by from step to step, at least."""


class Paces:
    """Since which step a pool's engines are as fast as they are. Mutable: it is shown each step, for a jump is only seen while it is new."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._shown: tuple[Measured, ...] = ()

    def see(self, history: Sequence[Measured]) -> None:
        """What was measured until now, oldest first."""
        newest = self._shown[-1].step if self._shown else -1
        if history and history[-1].step < newest:  # steps were given up, and the pace that they told of with them
            self._since, newest = {}, -1
        for at, step in enumerate(history):
            is_told_anew = at == len(history) - 1 and (not self._shown or step is not self._shown[-1])
            if step.step > newest or is_told_anew:
                for pool in POOLS:
                    self._since[pool] = paced_since(history[: at + 1], pool, self.since(pool))
        self._shown = tuple(history)

    def since(self, pool: str) -> int:
        """The step; 0: always."""
        return self._since.get(pool, 0)


def paced_since(history: Sequence[Measured], pool: str, since: int) -> int:
    """The step from which on a pool's engines have the pace that they have now: `since`, or one of the newest, where tokens plainly take
    longer or less long there than before. Neither what they took before explains it, nor another load."""
    told = [(one.step, points) for one in history[-SPEEDS:] if one.step >= since and (points := points_of([one], pool))]
    if len(told) <= FEWEST:
        return since
    of_each = [np.array(points).T for _, points in told]
    begins = np.cumsum([0, *(one.shape[1] for one in of_each)])
    every = np.concatenate(of_each, axis=1)
    together = _level(every, every, begins)
    for newest in range(1, min(3, len(of_each) - FEWEST) + 1):
        before = _level(every[:, : begins[-1 - newest]], every, begins)
        if all(plainly_off(offs[:-newest], offs[-newest:], LEAST_UNEVEN) for offs in (before, together)):
            return told[-newest][0]
    return since


def _level(points: Floats, every: Floats, begins: NDArray[np.int64]) -> list[float]:
    """The mean logarithm of what each step's tokens took beside the line through `points`, [2, n]; `begins`: where each step's points do
    in `every`."""
    running, seconds = points
    line = line_through(running, seconds) if float(running.max()) > 1.2 * float(running.min()) else None
    start, rise = line or (1.0, 0.03)
    logs = np.log(every[1] / (start + rise * every[0]))
    found: list[float] = (np.add.reduceat(logs, begins[:-1]) / np.diff(begins)).tolist()
    return found
