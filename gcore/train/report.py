"""What comes out of a step, and how long its phases took. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gcore.clock import Clock


@dataclass(frozen=True, slots=True)
class StepResult:
    """The report of an applied step, the same on every rank. `weights_file`: relative to the run's folder."""

    metrics: Mapping[str, float]
    weights_file: str


class PhaseTimer:
    """Seconds by phase."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the block's time on `name`."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock.monotonic() - began
