"""Requests on one side, changes of weights on the other: they do not mix unless the engine is paused.

As in SGLang, a change that comes while requests are under way waits until they have their answers; requests that come
meanwhile wait until it is done. Whoever wants it at once pauses the engine first, or has everything aborted. An engine that
is paused or asleep is changed at once, whatever it holds. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Gate:
    """`still()`: whether the engine makes no tokens now, so that a change need not wait."""

    def __init__(self, still: Callable[[], bool]) -> None:
        self._still = still
        self._inside = 0
        self._wanting = 0
        """Changes that wait or are under way; at most one is under way."""
        self._moved = asyncio.Event()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """While a request is under way."""
        while self._wanting:
            await self._moved.wait()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.look_again()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While weights are changed: one change at a time, or a slow reader's older weights could be installed last."""
        async with self._one:
            if self._still():
                yield
                return
            self._wanting += 1
            try:
                while self._inside and not self._still():
                    await self._moved.wait()
                yield
            finally:
                self._wanting -= 1
                self.look_again()

    def look_again(self) -> None:
        """Whoever waits looks whether it may go on; for one, because the engine has been paused or put to sleep."""
        self._moved.set()
        self._moved = asyncio.Event()
