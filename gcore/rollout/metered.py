"""What an engine's time was, as it sums it up itself: no one has to look at the right moment. Pure; the caller says what time it is.

An engine is at one thing at a time: it works on what it was given, has nothing to do, is paused (its weights are being changed), or
sleeps. While it works it is busy by the share of its rows that are wanted, those that run and those that wait for one, `min(1,
wanted / rows)`, and idle by the rest; so busy, idle, paused and asleep seconds add up to the time that passed. Sums only grow:
whoever reads them twice knows all that was between, however much that was.

Told in the words of Prometheus (`told`), beside the engine's other metrics. Why an engine is idle it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Doing = Literal["working", "paused", "asleep"]
"""An engine that works on nothing is idle."""
PREFIX = "gcore_engine_"


@dataclass(frozen=True, slots=True)
class Sums:
    """Until `at`, monotonic seconds of the engine's clock, since it began.

    `active_s`: seconds in which there was anything to work on; `running_s`: the same, times the requests that had a row.
    """

    at: float
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    asleep_s: float = 0.0
    active_s: float = 0.0
    running_s: float = 0.0

    def until(self, now: float, doing: Doing, wanted: int, rows: int) -> Sums:
        """With the time until `now`, in which it was `doing` that."""
        passed = now - self.at
        if passed <= 0:
            return self
        if doing == "paused":
            return replace(self, at=now, paused_s=self.paused_s + passed)
        if doing == "asleep":
            return replace(self, at=now, asleep_s=self.asleep_s + passed)
        running = min(wanted, rows)
        busy = passed * (running / rows)
        return replace(
            self,
            at=now,
            busy_s=self.busy_s + busy,
            idle_s=self.idle_s + (passed - busy),
            active_s=self.active_s + (passed if running else 0.0),
            running_s=self.running_s + passed * running,
        )


class Meter:
    """Of one engine. One thread notes, any may read: what they share is replaced, never changed."""

    def __init__(self, rows: int, now: float) -> None:
        """`rows`: requests that saturate it."""
        self.rows = rows
        self._state: tuple[Sums, Doing, int] = Sums(now), "working", 0

    def note(self, doing: Doing, wanted: int, now: float) -> None:
        """It is at this from now on."""
        sums, before, had = self._state
        if (before, had) != (doing, wanted):
            self._state = sums.until(now, before, had, self.rows), doing, wanted

    def read(self, now: float) -> Sums:
        """Everything until now."""
        sums, doing, wanted = self._state
        return sums.until(now, doing, wanted, self.rows)


def doing_of(*, paused: bool, asleep: bool) -> Doing:
    """What an engine is at that is so."""
    return "asleep" if asleep else "paused" if paused else "working"


def told(sums: Sums, *, scale: float = 1.0) -> str:
    """As Prometheus reads it. `scale`: seconds that one of the sums' is."""
    lines = []
    for name, words in NAMES.items():
        metric, value = f"{PREFIX}{name}", getattr(sums, _FIELDS[name]) * scale
        kind = "gauge" if name == CLOCK else "counter"
        lines.append(f"# HELP {metric} {words}\n# TYPE {metric} {kind}\n{metric} {value!r}\n")
    return "".join(lines)


CLOCK = "clock_seconds"
NAMES = {
    CLOCK: "The engine's monotonic clock, at which the sums were read.",
    "busy_seconds_total": "Seconds, times the share of the engine's rows that was wanted.",
    "idle_seconds_total": "Seconds, times the share of the engine's rows that nobody wanted.",
    "paused_seconds_total": "Seconds in which it was paused: its weights were being changed.",
    "asleep_seconds_total": "Seconds in which it had given its memory back.",
    "active_seconds_total": "Seconds in which there was anything to work on.",
    "running_seconds_total": "The same, times the requests that were worked on.",
}
_FIELDS = {CLOCK: "at"} | {name: name.removesuffix("econds_total") for name in NAMES if name != CLOCK}
