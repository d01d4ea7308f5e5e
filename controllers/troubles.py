"""What goes wrong beside a job's steps, or stands still, told once in its events: from one controller to the store.

A sentence is written under its topic, over the one before; an event tells each. While the store is away they wait, as many as
there is room for, and come late. Whoever notes something sees to it that it does so once. What follows is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.ledger.job import Trouble
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store

log = logging.getLogger(__name__)

RETRY_S = 1.0
MOST_WAITING = 64
"""Sentences that the store has not taken yet: the newest."""


class TroubleBook:
    """Of one job, on one controller."""

    def __init__(self, store: Store, keys: JobKeys, node: str, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._clock = clock
        self._waiting: deque[Trouble] = deque(maxlen=MOST_WAITING)
        self._held: dict[str, str] = {}
        self._news = asyncio.Event()

    def note(self, topic: str, sentence: str) -> None:
        """To be told. `topic`: one of few, a word."""
        log.warning("%s", sentence)
        now = self._clock.wall()
        self._waiting.append(Trouble(topic=topic, node=self._node, sentence=sentence, time=now))
        self._news.set()

    def hold(self, topic: str, sentence: str) -> None:
        """As `note`, once for as long as it is what holds of `topic`. Nothing: it is over."""
        if sentence and self._held.get(topic) != sentence:
            self.note(topic, sentence)
        self._held[topic] = sentence

    async def run(self) -> None:
        """For ever: write down what was noted, and what was left."""
        self._news.set()
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                trouble = self._waiting[0]  # which it stays until it is written, also if this is cancelled
                if not await self._is_written(trouble):
                    await self._clock.sleep(RETRY_S)
                elif self._waiting and self._waiting[0] is trouble:
                    self._waiting.popleft()

    async def _is_written(self, trouble: Trouble) -> bool:
        # An unknown answer is asked again: an event twice is better than none.
        try:
            await self._store.transact((), (Put(self._keys.trouble(trouble.topic), trouble.encode()),))
        except StoreUnavailable:
            return False
        return True
