"""Publishes what a job waits for: since when, as metrics, and as an event once a wait has stood still for too long.

Looked at by whoever drives the job, and before there is anything to drive, while the node prepares, by itself; what is waited
for is worked out once a second, for it is told to people, and a driver looks at its job many times in one.
Decides nothing: which waits there are is `controllers.waiting`'s to say, which are told `controllers.overdue`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from controllers.gauges import show_waits
from controllers.overdue import overdue, sentence
from controllers.troubles import TroubleBook
from controllers.turns import Waits
from controllers.view import JobView
from controllers.waiting import LOCAL, Wait, waiting_for
from gcore.clock import Clock
from gcore.metrics import Metrics

LOOK_S = 1.0


class Job(Protocol):
    """Whose waits these are."""

    waits: Waits
    troubles: TroubleBook

    def look(self) -> JobView:
        """The view now."""
        ...


class Telling:
    """Of one job, on one controller."""

    def __init__(self, job: Job, metrics: Metrics, clock: Clock) -> None:
        self._job = job
        self._metrics = metrics
        self._clock = clock
        self._told: set[str] = set()
        """Waits without progress that were told and last."""
        self._waiting: tuple[Wait, ...] = ()
        self._looked = -LOOK_S
        """When what is waited for was worked out last."""

    async def run(self) -> None:
        """Until cancelled, for a job that nobody drives yet."""
        while True:
            self.look(self._job.look(), (), self._clock.monotonic())
            await self._clock.sleep(LOOK_S)

    def look(self, view: JobView, others: Iterable[str], now: float) -> None:
        """Note since when everything holds that is waited for, and the conditions in `others`; tell what is to be told."""
        due = now >= self._looked + LOOK_S
        if due:
            self._looked, self._waiting = now, tuple(waiting_for(view))
        waiting = self._waiting
        held = [*others, *(w.key for w in waiting), *(w.stall for w in waiting)]
        self._job.waits = self._job.waits.note(held, now)
        if due:
            show_waits(self._metrics, view.mirror, waiting, self._job.waits, now)
            self._tell(view, waiting, now)

    def _tell(self, view: JobView, waiting: Sequence[Wait], now: float) -> None:
        due = {wait.stall: wait for wait in overdue(view, waiting, self._job.waits, now)}
        for stall, wait in due.items():
            if stall not in self._told:
                topic = f"wait-{wait.cause}" + (f"-{view.node}" if wait.cause in LOCAL else "")
                self._job.troubles.note(topic, sentence(wait))
                self._metrics.stalls.labels(wait.cause).inc()
        self._told &= {wait.stall for wait in waiting}
        self._told |= due.keys()


@asynccontextmanager
async def telling(job: Job, metrics: Metrics, clock: Clock) -> AsyncIterator[None]:
    """What the job waits for is told while the block runs. Raises what the telling raised, which is a defect."""
    tasks = [asyncio.create_task(work) for work in (Telling(job, metrics, clock).run(), job.troubles.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
