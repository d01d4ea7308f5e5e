"""When is a child that still lives a hung one? Pure.

A child tells its phase and a number that grows whenever it gets anywhere. A phase of work in which the number stands
still for `limit_s` is a hang: collective libraries wait without end for a rank that is gone, and no time-out inside
the process can be trusted. Phases that wait for work (`PATIENT`) may last for ever; loading has a limit of its own. A
child that was stopped by a signal (SIGSTOP) hangs in any phase, for it would not take work either.

Does not decide what follows from a hang, and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PATIENT = frozenset({"waiting"})
LOADING = "loading"
STOPPED = "stopped by a signal"
"""The phase named in the verdict on a child in process state T."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing is wrong. `until`: the monotonic second at which it would be, if nothing is heard; None: never."""

    until: float | None


@dataclass(frozen=True, slots=True)
class Hung:
    """No progress in `phase` since the monotonic second `since`."""

    phase: str
    since: float

    def reason(self, now: float) -> str:
        """The verdict as a sentence for people."""
        return f"no progress in phase {self.phase!r} for {now - self.since:.0f} s"


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What is known of the child's progress. Times are monotonic seconds.

    `since`: when `phase` was entered or `progress` last changed. `stopped_since`: from when on it was seen stopped.
    """

    limit_s: float
    loading_limit_s: float
    phase: str
    since: float
    progress: int = 0
    stopped_since: float | None = None

    def note(self, phase: str, progress: int, now: float) -> Watchdog:
        """The child was heard. The same phase with the same number is no progress."""
        if phase == self.phase and progress == self.progress:
            return self
        return replace(self, phase=phase, progress=progress, since=now)

    def note_stopped(self, *, stopped: bool, now: float) -> Watchdog:
        """Whether the child's process was just seen stopped by a signal."""
        if stopped == (self.stopped_since is not None):
            return self
        return replace(self, stopped_since=now if stopped else None)

    @property
    def due(self) -> float | None:
        """The monotonic second from which on the verdict is `Hung`, if nothing is heard; None: never."""
        return min((suspicion.at for suspicion in self._suspicions()), default=None)

    def verdict(self, now: float) -> Alive | Hung:
        """Whether it hangs, as of `now`."""
        hung = next((suspicion.hung for suspicion in self._suspicions() if suspicion.at <= now), None)
        return hung or Alive(self.due)

    def _suspicions(self) -> list[_Suspicion]:
        return [suspicion for suspicion in (self._stopped(), self._stalled()) if suspicion is not None]

    def _stopped(self) -> _Suspicion | None:
        if self.stopped_since is None:
            return None
        return _Suspicion(self.stopped_since + self.limit_s, Hung(STOPPED, self.stopped_since))

    def _stalled(self) -> _Suspicion | None:
        if self.phase in PATIENT:
            return None
        limit = self.loading_limit_s if self.phase == LOADING else self.limit_s
        return _Suspicion(self.since + limit, Hung(self.phase, self.since))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """If nothing is heard, the verdict is `hung` from `at` on."""

    at: float
    hung: Hung
