"""How long engines had nothing to do in the step until now, and why, for the step's log entry: the books (`controllers.booking`) are
closed after it is written. For people; nothing is decided by it. Pure.

wait_for_weights_s   nothing may begin: the batch is closed and the weights that it makes are not there yet (`barrier`), or an engine
                     does not serve head's weights (`waiting_weights`). What holds the step up is training, exchange or publication
tail_s               everything that is due was begun, an engine serves, and there is nothing for it: others have the last responses

The causes are those of the books (`controllers.booking_causes`). An engine counts while it owes nothing at all. Each is the mean over
the engines of this controller, in seconds. What a rank waits for is `controllers.stopwatch`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from controllers.booking_causes import cause_of
from controllers.view import JobView
from placement import books

Cause = Literal["wait_for_weights_s", "tail_s"]
TOLD: Mapping[books.Cause, Cause] = {
    "barrier": "wait_for_weights_s",
    "waiting_weights": "wait_for_weights_s",
    "tail": "tail_s",
}
"""Under which number a cause of the books counts; others hold no step up by themselves."""


@dataclass(frozen=True, slots=True)
class Idle:
    """What engines have nothing to do, and why: by instance, None where one is at work."""

    causes: Mapping[str, Cause | None]

    @classmethod
    def of(cls, view: JobView, busy: Collection[str], stage: books.Cause) -> Idle:
        """As it is now. `busy`: the engines that owe something; `stage`: what keeps those idle that have nothing to do."""
        awake = (name for name, engine in view.engines.items() if not engine.asleep)
        return cls({name: None if name in busy else TOLD.get(cause_of(view, stage, "rollout", name)) for name in awake})


class EngineWaits:
    """Seconds by cause, since it was begun. Mutable."""

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = {}
        self._last: tuple[float, Idle] | None = None

    def begin(self, now: float) -> None:
        """A step begins; engines are as they were."""
        self._seconds = {}
        self._last = (now, self._last[1]) if self._last is not None else None

    def note(self, idle: Idle, now: float) -> None:
        """As it is from now on."""
        self._add(now)
        self._last = (now, idle)

    def stats(self, now: float) -> dict[str, float]:
        """The numbers until now; nothing if no engine is known."""
        self._add(now)
        if self._last is None or not self._last[1].causes:
            return {}
        return {"wait_for_weights_s": 0.0, "tail_s": 0.0} | {cause: self._seconds[cause] for cause in self._seconds}

    def _add(self, now: float) -> None:
        if self._last is None:
            return
        since, idle = self._last
        for cause in idle.causes.values():
            if cause is not None:
                share = max(now - since, 0.0) / len(idle.causes)
                self._seconds[cause] = self._seconds.get(cause, 0.0) + share
        self._last = (now, idle)
