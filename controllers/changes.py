"""Waking up: something that others look at has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gcore.system.concurrency import limit_time

REST = 2.0
LONGEST_REST_S = 0.05

OFF_DUTY = 4.0
"""So many times as long rests who has nothing to do before others have done what comes next."""


def rest_s(took: float, *, off_duty: bool = False) -> float:
    """Seconds that whoever needed `took` seconds to look at everything lets pass before the next look.

    Where one look takes long, because there is much to see or many processes share a core, what changes meanwhile is seen
    together, in place of one by one.
    """
    return min(REST * took, LONGEST_REST_S) * (OFF_DUTY if off_duty else 1.0)


class ChangeSignal:
    """Says that something changed; who waits looks for itself what it was.

    Within one event loop nothing is lost between a look and the wait that follows it without an await in between.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """How many changes there were: what was computed at another count is out of date."""

    def notify(self) -> None:
        """Wake all who wait now."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout: float | None = None) -> None:
        """Until the next change, or for `timeout` seconds."""
        event = self._event
        try:
            async with limit_time(timeout):
                await event.wait()
        except TimeoutError:
            return

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; it is looked at after each change."""
        while not condition():
            await self.wait()


LOOK_AGAIN_S = 0.2
"""After a lost compare or an unknown answer, until the action is tried again if nothing was heard."""
