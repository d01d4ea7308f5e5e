"""`ChangeSignal` wakes waiting tasks when the state that they read has changed; `rest_s` limits how often they then
re-evaluate it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gcore.system.concurrency import limit_time

REST = 2.0
"""Pause between two evaluations of the state, as a multiple of the time that the first took; at most `LONGEST_REST_S`
seconds."""
LONGEST_REST_S = 0.05

OFF_DUTY = 4.0
"""Factor of the pause for a loop that only acts if another controller does not."""


def rest_s(took: float, *, off_duty: bool = False) -> float:
    """The pause in seconds before a loop evaluates the state again, if the last evaluation took `took` seconds.

    `off_duty`: whether the loop only acts if another controller does not; then the pause is longer.

    If evaluations are slow, because there is much data or many processes share a core, one evaluation then covers several changes.
    """
    return min(REST * took, LONGEST_REST_S) * (OFF_DUTY if off_duty else 1.0)


class ChangeSignal:
    """Wakes tasks when something has changed. It does not say what; each task reads the state itself.

    In one event loop, no change is lost between reading the state and a `wait` that follows without another await.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """The number of changes. A result that was computed at another count is outdated."""

    def notify(self) -> None:
        """Wake all tasks that wait now."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for the next change, at most `timeout` seconds."""
        event = self._event
        if timeout is None:
            await event.wait()
            return
        try:
            async with limit_time(timeout):
                await event.wait()
        except TimeoutError:
            return

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true; it is evaluated after each change."""
        while not condition():
            await self.wait()


LOOK_AGAIN_S = 0.2
"""Seconds before an action is retried whose store transaction failed its compare or has an unknown result, if no change
arrives earlier."""
