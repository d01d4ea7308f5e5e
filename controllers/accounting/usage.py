"""Usage per job, node and day: written as steps are accounted for, read and deleted for all nodes.

Records (`gcore.ledger.usage`) are read for a range of days, including those of nodes that have left, and deleted when
they are very old. There may be very many, one per job, node and day, so other days are not read, and records are
decoded page by page. The first daemon to run the deletion on a day deletes old records for all. One run deletes a
limited number of days, so a wrong clock cannot delete everything.

One write may add several steps, but no more than its record remembers by name. A compare guards it, and a write without
a response is read again before a retry, so nothing is counted twice. No step waits for it: when a daemon is killed, at
most `EVERY_S` of work is not counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from gcore.errors import StoreUnavailable
from gcore.ledger.records.job import JobRecord
from gcore.ledger.records.slot_accounting import StepAccount
from gcore.ledger.usage import KEPT_DAYS, NEWEST_STEPS, NodeUsage, end_day
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Compare, Delete, KeyValue, Put, Store
from gcore.system.clock import Clock

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Records in a page. Decoding one takes some milliseconds."""

SWEPT_DAYS = 32
"""Maximum number of days that one run deletes, counted from the previous run."""

MOST_DIGITS = 9
"""Maximum digits of the stored day of the last run."""

EVERY_S = 2.0
TRIES = 3

MOST_WAITING = 1000
"""Maximum number of steps that wait while the store is unavailable; the oldest are dropped."""


async def read_usage(store: Store, first_day: int, last_day: int) -> AsyncGenerator[Sequence[NodeUsage], None]:
    """Yield usage on these days, both included, in pages; also that of deleted jobs. Raises StoreUnavailable."""
    async with aclosing(_records(store, first_day, last_day)) as pages:
        async for kvs in pages:
            found = []
            for kv in kvs:
                try:
                    found.append(NodeUsage.decode(kv.value, kv.key))
                except UnreadableRecord as error:
                    log.error("skipped a usage record: %s", error)
            yield found


async def forget_old_usage(store: Store, today: int) -> None:
    """Delete old usage of all nodes as far as the store is available, unless a daemon has done it today."""
    with contextlib.suppress(StoreUnavailable):
        kv = await store.get(keys.USAGE_SWEPT)
        stored = b"" if kv is None else kv.value
        swept = int(stored) if stored.isdigit() and len(stored) <= MOST_DIGITS else None
        if swept == today:
            return
        until = today if swept is None else min(today, swept + SWEPT_DAYS)
        mark = Put(keys.USAGE_SWEPT, str(until).encode())
        if not (await store.transact((Compare(keys.USAGE_SWEPT, 0 if kv is None else kv.mod_revision),), (mark,))).won:
            return
        async with aclosing(_records(store, 0, until - KEPT_DAYS - 1)) as pages:
            async for kvs in pages:
                await store.transact((), [Delete(kv.key) for kv in kvs])


async def _records(store: Store, first_day: int, last_day: int) -> AsyncGenerator[Sequence[KeyValue], None]:
    """Yield records of all nodes on these days, in pages. A node's days are adjacent keys, so other days are not
    read."""
    async for node in _nodes(store):
        at, behind = keys.usage_of_day(node, max(first_day, 0)), keys.usage_of_day(node, last_day + 1)
        while last_day >= 0:
            kvs = (await store.between(at, behind, AT_ONCE)).kvs
            if kvs:
                yield kvs
            if len(kvs) < AT_ONCE:
                break
            at = f"{kvs[-1].key}\0"


async def _nodes(store: Store) -> AsyncIterator[str]:
    """Yield the nodes with any record."""
    at = keys.USAGE
    while kvs := (await store.between(at, keys.prefix_end(keys.USAGE), 1)).kvs:
        node = kvs[0].key.removeprefix(keys.USAGE).partition("/")[0]
        yield node
        at = keys.prefix_end(keys.usage_of(node))


@dataclass
class UsageWriter:
    """Writes the usage of one job on one node."""

    store: Store
    job: JobRecord
    node: str
    clock: Clock
    _waiting: list[StepAccount] = field(default_factory=list)
    _written: float | None = None

    async def add(self, step: StepAccount) -> None:
        """Add a step, and write if a write is due."""
        self._waiting = [*self._waiting, step][-MOST_WAITING:]
        now = self.clock.monotonic()
        if self._written is None or now - self._written >= EVERY_S:
            self._written = now
            await self.write()

    async def write(self) -> None:
        """Write the waiting steps, as far as the store is available."""
        with contextlib.suppress(StoreUnavailable):
            for day in sorted({end_day(book) for book in self._waiting}):
                of_day = [book for book in self._waiting if end_day(book) == day]
                for first in range(0, len(of_day), NEWEST_STEPS):
                    some = of_day[first : first + NEWEST_STEPS]
                    if not await self._write(day, some):
                        break
                    self._waiting = [book for book in self._waiting if book not in some]

    async def _write(self, day: int, books: list[StepAccount]) -> bool:
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
                    log.error("cannot read the usage record, so usage is not added: %s", error)
                    return True
            new = known
            for book in books:
                new = new.plus(book)
            compare = Compare(key, 0 if stored is None else stored.mod_revision)
            if (await self.store.transact((compare,), (Put(key, new.encode()),))).won:
                return True
        return False
