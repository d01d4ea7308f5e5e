"""Several pieces of asynchronous work that stand and fall together.

Each process of agents and tools loads this module, and few have a task that does not end: `_leave` imports ctypes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from gcore.system.clock import Clock

T = TypeVar("T")

LOOK_AGAIN_S = 0.1
"""At least, until a limit that was held up is looked at again."""

END_S = 5.0
"""For work that was told to end. Then it is left to itself."""


class TaskHung(TimeoutError):
    """A task did not finish in time, and does not end when it is cancelled."""


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails, the others are cancelled, and have ended, before its error is raised.

    Left to themselves they would load the engines beside the next try, or wait for a version that nobody serves again.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
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


@asynccontextmanager
async def limit_time(seconds: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout`, also for work that a cancelled task finishes. None: no limit. Raises TimeoutError.

    Before Python 3.11.3 `asyncio.timeout` ends with CancelledError in a task that was cancelled before.
    """
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    limit = asyncio.timeout(seconds)  # noqa: TID251
    try:
        async with limit:
            yield
    except asyncio.CancelledError as error:
        if limit.expired() and task is not None and task.cancelling() <= cancelled:
            raise TimeoutError from error
        raise


class Pausable:
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


async def wait_within(work: Coroutine[Any, Any, T], seconds: float, clock: Clock, hold: Pausable | None = None) -> T:
    """Its result, if it comes within `seconds` of `clock`, in which `hold` does not count. Raises TimeoutError otherwise; the work is
    cancelled, and has ended, or is left to itself: that is an Unending."""
    doing = asyncio.ensure_future(work)
    try:
        if await _is_done_within(doing, seconds, clock, hold or Pausable(clock)):
            return doing.result()
    finally:
        has_ended = await cancel_task(doing, clock)
    late = f"nothing within {seconds:g} s"
    raise TimeoutError(late) if has_ended else TaskHung(late)


async def cancel_task(task: asyncio.Task[Any], clock: Clock) -> bool:
    """Cancel it; whether it has ended END_S later. Foreign code may keep its cancellation to itself: then nobody waits for it any more,
    at the end of the event loop either."""
    if task.done():
        return True
    task.cancel()
    limit = asyncio.ensure_future(clock.sleep(END_S))
    try:
        await asyncio.wait((task, limit), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all((limit,))
        task.add_done_callback(_not_asked_for)
        if not task.done():
            _leave(task)
    return task.done()


def _leave(task: asyncio.Task[Any]) -> None:
    """See to it that neither the end of the event loop nor that of the process waits for a task that does not end."""
    import ctypes

    asyncio._unregister_task(task)  # asyncio.run ends with those that are registered
    # Whoever frees a coroutine throws a GeneratorExit into it, and one that keeps that to itself too goes round for ever, with nothing
    # to wait for. So it is never freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _not_asked_for(task: asyncio.Task[Any]) -> None:
    """Whatever became of it."""
    if not task.cancelled():
        task.exception()


async def _is_done_within(doing: asyncio.Task[Any], seconds: float, clock: Clock, hold: Pausable) -> bool:
    before = hold.seconds
    limit = asyncio.ensure_future(clock.sleep(seconds))
    try:
        while True:
            await asyncio.wait((doing, limit), return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return True
            more, before = hold.seconds - before, hold.seconds
            if more <= 0:
                return False
            limit = asyncio.ensure_future(clock.sleep(max(more, LOOK_AGAIN_S)))
    finally:
        await cancel_all((limit,))
