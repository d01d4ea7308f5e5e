"""Writes down what a job uses of this node (`gcore.ledger.usage`), as steps are booked.

Several steps may go into one write, but no more than its record remembers by name; what is not written yet when a daemon is killed, at most `EVERY_S` of work, is not counted. A
write compares what it adds to, and one whose answer never came is looked at again before it is made once more, so nothing is counted
twice. Nothing waits for it.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.ledger.books import StepBook
from gcore.ledger.job import JobRecord
from gcore.ledger.usage import NEWEST_STEPS, NodeUsage, day_of
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Compare, Put, Store

log = logging.getLogger(__name__)

EVERY_S = 2.0
TRIES = 3
MOST_WAITING = 1000
"""Steps that wait for a store that is away; the oldest are given up."""


@dataclass
class UsageBook:
    """Of one job on one node."""

    store: Store
    job: JobRecord
    node: str
    clock: Clock
    _waiting: list[StepBook] = field(default_factory=list)
    _written: float | None = None

    async def add(self, book: StepBook) -> None:
        """A step was booked."""
        self._waiting = [*self._waiting, book][-MOST_WAITING:]
        now = self.clock.monotonic()
        if self._written is None or now - self._written >= EVERY_S:
            self._written = now
            await self.write()

    async def write(self) -> None:
        """Write what waits, as far as the store takes it."""
        with contextlib.suppress(StoreUnavailable):
            for day in sorted({day_of(book) for book in self._waiting}):
                of_day = [book for book in self._waiting if day_of(book) == day]
                for first in range(0, len(of_day), NEWEST_STEPS):
                    some = of_day[first : first + NEWEST_STEPS]
                    if not await self._write(day, some):
                        break
                    self._waiting = [book for book in self._waiting if book not in some]

    async def _write(self, day: int, books: list[StepBook]) -> bool:
        key = keys.usage(self.node, day, self.job.uid)
        for _ in range(TRIES):
            stored = await self.store.get(key)
            known = NodeUsage(
                day=day,
                uid=self.job.uid,
                job=self.job.name,
                namespace=self.job.namespace,
                owner=self.job.owner,
            )
            if stored is not None:
                try:
                    known = NodeUsage.decode(stored.value, stored.key)
                except UnreadableRecord as error:
                    log.error("what was used so far cannot be read, and is not added to: %s", error)
                    return True
            new = known
            for book in books:
                new = new.plus(book)
            compare = Compare(key, 0 if stored is None else stored.mod_revision)
            if (await self.store.transact((compare,), (Put(key, new.encode()),))).won:
                return True
        return False
