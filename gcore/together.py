"""Several pieces of asynchronous work that stand and fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from gcore.clock import Clock

T = TypeVar("T")


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


async def in_time(work: Coroutine[Any, Any, T], seconds: float, clock: Clock) -> T:
    """Its result, if it comes within `seconds` of `clock`. Raises TimeoutError otherwise; the work is cancelled, and has ended."""
    doing, limit = asyncio.ensure_future(work), asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((doing, limit), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise TimeoutError(f"nothing within {seconds:g} s")
        return doing.result()
    finally:
        await end_all((doing, limit))
