"""What engines of a pool take longer for a token in one mode than in the other. Pure but for what it remembers.

Where all slots are had in turn, engines of several pools may be awake on one slot, and what computes there at once holds one another up. By
their times alone that looks as if the engines had become slower, and every split would be forecast with that pace. So what engines are
slower by in the mode that was not measured first is learned from its first steps, and taken out of their times: laws and paces are those
of the mode that was measured first. What a mode is slower by as a whole is seen by `placement.policies.errors`, as that of its mode.

A pool that changes its pace in the very steps in which the mode changes is taken to be held up by it, until the mode changes again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from placement.laws import Law
from placement.measured import EngineSpeed, Measured
from placement.paces import POOLS
from placement.split import Mode

LEARNED = 3
"""First steps of the other mode from which it is learned."""
LEAST = 1.25
"""Times longer, or shorter, below which nothing is taken out: engines differ, and so do steps."""


@dataclass
class Hindered:
    """Of one job."""

    _first: Mode | None = None
    """The mode in which engines were measured first."""
    _times: dict[str, dict[int, float]] = field(default_factory=dict)
    """By pool, and step of the other mode: how many times as long tokens took as the law of the first says."""

    def righted(self, step: Measured, law: Callable[[str], Law | None]) -> Measured:
        """The step with times as if in the mode that was measured first; the same one, where nothing is to be taken out. `law`: a pool's,
        by the steps before; None: they do not have it."""
        if not step.speed:
            return step
        self._first = self._first or step.split.mode
        if step.split.mode == self._first:
            return step
        for pool in POOLS:
            self._learn(step, pool, law)
        times = {pool: self.times(pool) for pool in POOLS}
        if all(one == 1.0 for one in times.values()):
            return step
        speed = tuple(replace(one, token_s=one.token_s / times.get(one.pool, 1.0)) for one in step.speed)
        return replace(step, speed=speed)

    def times(self, pool: str) -> float:
        """How many times as long its tokens take in the other mode."""
        seen = [times for _, times in sorted(self._times.get(pool, {}).items())]
        found = median(seen[:LEARNED]) if seen else 1.0
        return found if not 1 / LEAST <= found <= LEAST else 1.0

    def forget(self, since: int) -> None:
        """Steps from that one on were given up."""
        self._times = {
            pool: {step: times for step, times in of.items() if step < since} for pool, of in self._times.items()
        }

    def _learn(self, step: Measured, pool: str, law: Callable[[str], Law | None]) -> None:
        seen, known = [one for one in step.speed if one.pool == pool], self._times.setdefault(pool, {})
        if not seen or (step.step not in known and len(known) >= LEARNED):
            return
        before = law(pool)
        if before is not None:
            known[step.step] = _times_as_long(seen, before)


def _times_as_long(seen: list[EngineSpeed], law: Law) -> float:
    said = law.at(np.array([one.running for one in seen]))
    return float(median((np.array([one.token_s for one in seen]) / np.maximum(said, 1e-9)).tolist()))
