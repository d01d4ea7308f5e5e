"""Groups of asynchronous tasks that end together, and time limits.

Every process of agents and tools loads this module. Few ever have a task that does not end, so `_leave` imports ctypes only when needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from gcore.system.clock import Clock

T = TypeVar("T")

LOOK_AGAIN_S = 0.1
"""Shortest wait, in seconds, after excluded time has extended the limit of `wait_within`."""

END_S = 5.0
"""Seconds in which a cancelled task must end. After that it is abandoned."""


class TaskHung(TimeoutError):
    """A task did not finish in time and ignores its cancellation."""


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines concurrently and return their results. If one fails, cancel the others and wait for their end before raising its error.

    Otherwise the others would keep loading engines during the next try, or wait for a version that is never served again.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait until all have ended, with any result."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_cancelled() -> bool:
    """Return whether the current task itself was cancelled.

    If not, a CancelledError comes from the cancellation of another task that this one awaits, or from foreign code.
    """
    me = asyncio.current_task()
    return me is not None and me.cancelling() > 0


@asynccontextmanager
async def limit_time(seconds: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout` that also works for cleanup in a cancelled task. None: no limit. Raises TimeoutError.

    Before Python 3.11.3, `asyncio.timeout` ends with CancelledError in a task that was cancelled before.
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
    """Measures time that does not count towards a time limit (`wait_within`): the time while at least one caller is in a block `held`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holders = 0
        self._since = 0.0
        self._past_s = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Exclude the time of the `with` block from limits. Blocks may overlap; overlapping time counts once."""
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
        """Total excluded time in seconds, including that of blocks that still run."""
        return self._past_s + (self._clock.monotonic() - self._since if self._holders else 0.0)


async def wait_within(work: Coroutine[Any, Any, T], seconds: float, clock: Clock, hold: Pausable | None = None) -> T:
    """Return the work's result if it comes within `seconds` of `clock`, not counting time that `hold` excludes. Otherwise cancel the work and raise
    TimeoutError, or TaskHung if it ignores its cancellation."""
    doing = asyncio.ensure_future(work)
    try:
        if await _is_done_within(doing, seconds, clock, hold or Pausable(clock)):
            return doing.result()
    finally:
        has_ended = await cancel_task(doing, clock)
    late = f"nothing within {seconds:g} s"
    raise TimeoutError(late) if has_ended else TaskHung(late)


async def cancel_task(task: asyncio.Task[Any], clock: Clock) -> bool:
    """Cancel the task and return whether it has ended within END_S. Foreign code may suppress its cancellation; then the task is abandoned, and the
    end of the event loop does not wait for it either."""
    if task.done():
        _not_asked_for(task)
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
    """Make sure that neither the event loop nor the process waits at its end for a task that does not end."""
    import ctypes

    asyncio._unregister_task(task)  # asyncio.run cancels and awaits registered tasks
    # Freeing a coroutine throws GeneratorExit into it, and code that suppresses this too would loop forever. So the task is never
    # freed.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def _not_asked_for(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
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
