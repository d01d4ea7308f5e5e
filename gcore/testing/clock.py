"""A clock that advances only when a test calls `advance`.

`advance` moves time from one sleeper to the next, and lets everything triggered by a wake-up run until it waits again
before time moves on. So a program under this clock behaves the same in every run, and hours take milliseconds. The
clock knows only tasks that sleep on it: do not use sockets, threads or asyncio's own timers with it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class FakeClock:
    """A `gcore.system.clock.Clock` whose time only the test moves. `monotonic`, `wall`: its times at the start, in seconds."""

    def __init__(self, *, monotonic: float = 1_000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = monotonic
        self._wall_offset = wall - monotonic
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """The clock's time in seconds; only `advance`, `jump` and `run` change it."""
        return self._now

    def wall(self) -> float:
        """The clock's time in seconds since the Unix epoch."""
        return self._now + self._wall_offset

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has advanced by `seconds`. With zero or less, only yield to other tasks."""
        if seconds <= 0:
            await asyncio.sleep(0)  # noqa: TID251 - this is a clock
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), future))
        await future

    def next_wake(self) -> float | None:
        """Return the time (`monotonic`) at which the next sleeping task wakes; None if no task sleeps on this clock."""
        while self._sleepers and self._sleepers[0][2].done():  # cancelled
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def advance(self, seconds: float) -> None:
        """Advance by `seconds`, and let the tasks that are due wake on the way.

        They wake in the order of their times; at the same time, in the order in which they began to sleep.
        """
        end = self._now + seconds
        await self.settle()
        while (wake := self.next_wake()) is not None and wake <= end:
            self._now = max(self._now, wake)
            _, _, future = heapq.heappop(self._sleepers)
            future.set_result(None)
            await self.settle()
        self._now = end
        await self.settle()

    def jump(self, seconds: float) -> None:
        """Advance the time by `seconds` at once, as a process sees it that was stopped (SIGSTOP) and continues.

        Tasks that are due wake at the next `advance`, even one by 0.
        """
        self._now += seconds

    async def run(self, awaitable: Awaitable[T], *, limit_s: float = 86_400.0) -> T:
        """Advance the time from one sleeping task to the next until `awaitable` is done, and return its result.

        Raises TimeoutError if it still waits after `limit_s` seconds of this clock, or when no task sleeps on the clock.
        """
        task = asyncio.ensure_future(awaitable)
        end = self._now + limit_s
        try:
            await self.settle()
            while not task.done():
                wake = self.next_wake()
                if wake is None or wake > end:
                    why = "and no task sleeps on this clock" if wake is None else f"after {limit_s:g} s"
                    raise TimeoutError(f"the awaitable is still waiting, {why}")
                await self.advance(max(0.0, wake - self._now))
            return await task
        finally:
            task.cancel()

    async def settle(self) -> None:
        """Let every task run until it waits for something."""
        loop = asyncio.get_running_loop()
        # The loop's queue of ready tasks is private, but a fixed number of turns would be a guess: a chain of n
        # awaiting tasks needs n turns. Other loops, without such a queue, get a fixed number.
        ready = getattr(loop, "_ready", None)
        if ready is None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)  # noqa: TID251 - this is a clock
            return
        await asyncio.sleep(0)  # noqa: TID251 - this is a clock
        while ready:  # noqa: ASYNC110 - there is no event for "nothing can run"
            await asyncio.sleep(0)  # noqa: TID251 - this is a clock


_TURNS = 100
"""Turns of the event loop in `settle`, if the loop does not show its queue of ready tasks."""
