"""What a rank's time was, summed up by phase as it passes: every second is of the phase that was told last. Pure; the caller says what
time it is.

Sums only grow, so whoever hears two of its words knows all that was between, also of phases that came and went meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """Until `at`, monotonic seconds: seconds by phase since the rank began."""

    at: float
    seconds: Mapping[str, float]


class Phases:
    """One thread tells, any may read: what they share is replaced, never changed."""

    def __init__(self, phase: str, now: float) -> None:
        self._state: tuple[str, Told] = phase, Told(now, {})

    def tell(self, phase: str, now: float) -> None:
        """It is in this phase from now on."""
        if phase != self._state[0]:
            self._state = phase, self.read(now)

    def read(self, now: float) -> Told:
        """Everything until now."""
        phase, told = self._state
        passed = max(now - told.at, 0.0)
        return Told(told.at + passed, {**told.seconds, phase: told.seconds.get(phase, 0.0) + passed})
