"""Several pieces of asynchronous work that stand and fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from gcore.clock import Clock

T = TypeVar("T")

LOOK_AGAIN_S = 0.1
"""At least, until a limit that was held up is looked at again."""


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails, the others are cancelled, and have ended, before its error is raised.

    Left to themselves they would load the engines beside the next try, or wait for a version that nobody serves again.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel them, and wait until they have ended, however that is."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_cancelled() -> bool:
    """Whether the task that runs was told to end. A CancelledError without that is not meant for it: a task of somebody else's was
    cancelled, or somebody raised it."""
    me = asyncio.current_task()
    return me is not None and me.cancelling() > 0


class Hold:
    """Time that is not somebody's doing, and so does not count: while anybody is within `held`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders = 0
        self._since = 0.0
        self._past_s = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Time stands still within."""
        if not self._holders:
            self._since = self._clock.monotonic()
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._past_s += self._clock.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """For how long it has stood still, in all."""
        return self._past_s + (self._clock.monotonic() - self._since if self._holders else 0.0)


async def in_time(work: Coroutine[Any, Any, T], seconds: float, clock: Clock, hold: Hold | None = None) -> T:
    """Its result, if it comes within `seconds` of `clock`, in which `hold` does not count. Raises TimeoutError otherwise; the work is
    cancelled, and has ended."""
    hold = hold or Hold(clock)
    doing, before = asyncio.ensure_future(work), hold.seconds
    limit = asyncio.ensure_future(clock.sleep(seconds))
    try:
        while True:
            await asyncio.wait((doing, limit), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            more, before = hold.seconds - before, hold.seconds
            if more <= 0:
                raise TimeoutError(f"nothing within {seconds:g} s")
            limit = asyncio.ensure_future(clock.sleep(max(more, LOOK_AGAIN_S)))
    finally:
        await end_all((doing, limit))
