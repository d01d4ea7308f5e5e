"""Verdicts by question, so that the same question is not asked twice: neither later, nor by two at the same moment.

Whoever asks what somebody is asking waits for that verdict. If the other is cancelled, one of those who wait asks in its
place; if the other fails, each of them asks for itself: what failed for one need not fail for all, and one after another
would take as many times as long. Failures are not remembered. What was asked for least recently goes first.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from gcore.config.judges import JudgeSpec

T = TypeVar("T")


def spec_digest(spec: JudgeSpec) -> bytes:
    """All that a judge is told, as a hash."""
    return hashlib.blake2b(spec.model_dump_json().encode(), digest_size=16).digest()


def question_key(digest: bytes, question: str) -> bytes:
    """The name of a question to the judge of that digest."""
    return hashlib.blake2b(digest + question.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _End(Enum):
    CANCELLED = auto()
    FAILED = auto()


@dataclass(eq=False, slots=True)
class _Asking(Generic[T]):
    """A question under way. `end`: how it ended, once `over` is set; a list holds the verdict."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    end: list[T] | _End = _End.FAILED


class Remembered(Generic[T]):
    """`most` verdicts. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._under_way: dict[bytes, _Asking[T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self, key: bytes) -> None:
        """Whoever asks `key` next asks anew."""
        self._kept.pop(key, None)

    async def get(self, key: bytes, ask: Callable[[], Awaitable[T]], known: Callable[[], None]) -> T:
        """The verdict of the question `key`; `known` is called if it did not have to be asked. Raises what `ask` raises."""
        while True:
            if key in self._kept:
                self._kept.move_to_end(key)
                known()
                return self._kept[key]
            other = self._under_way.get(key)
            if other is None:
                return await self._asked(key, ask)
            await other.over.wait()
            if isinstance(other.end, list):
                known()
                return other.end[0]
            if other.end is _End.FAILED:
                return await self._asked(key, ask)

    async def _asked(self, key: bytes, ask: Callable[[], Awaitable[T]]) -> T:
        mine: _Asking[T] = _Asking()
        self._under_way.setdefault(key, mine)  # after a failure others may ask beside; later ones wait for the first
        try:
            value = await ask()
            mine.end = [value]
            self._keep(key, value)
            return value
        except asyncio.CancelledError:
            mine.end = _End.CANCELLED
            raise
        finally:
            if self._under_way.get(key) is mine:
                del self._under_way[key]
            mine.over.set()

    def _keep(self, key: bytes, value: T) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
