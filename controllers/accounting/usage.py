"""Usage records in the store, one per job, node and day (`gcore.ledger.usage`): each node adds its closed steps;
readers get the records of all nodes; very old records are deleted.

There may be very many records, so only those of the requested days are read, and they are decoded page by page. The
first daemon to run the deletion on a day deletes old records for all nodes. One run deletes a limited number of days,
so that a wrong clock cannot delete everything.

One write may add several steps, but not more than the record remembers by name. The transaction compares the record's
revision, and after a missing response the record is read again, so that no step is counted twice. No step of training
waits for a write. If a daemon is killed, at most `EVERY_S` seconds of work are not counted.
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
"""Number of records in a page. Decoding one takes some milliseconds."""

SWEPT_DAYS = 32
"""Maximum number of days by which one run moves the limit of deletion forward."""

MOST_DIGITS = 9
"""Maximum digits of the stored day of the last deletion; a longer value is damaged."""

EVERY_S = 2.0
"""Minimum seconds between two writes."""

TRIES = 3
"""Attempts of a write whose compare fails."""

MOST_WAITING = 1000
"""Maximum number of steps that are kept in memory while the store is unavailable; the oldest are dropped."""


async def read_usage(store: Store, first_day: int, last_day: int) -> AsyncGenerator[Sequence[NodeUsage], None]:
    """Yield the usage records of these days, both included, in pages; also those of deleted jobs. Days are numbered
    from the epoch. Raises StoreUnavailable."""
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
    """Delete the usage records of all nodes that are older than `KEPT_DAYS`, unless another daemon has done so today.
    If the store is unavailable, the rest is deleted another day."""
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
    """Yield the stored records of all nodes on these days, in pages. The keys of a node's days are adjacent, so records
    of other days are not read."""
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
    """Yield the names of the nodes that have usage records."""
    at = keys.USAGE
    while kvs := (await store.between(at, keys.prefix_end(keys.USAGE), 1)).kvs:
        node = kvs[0].key.removeprefix(keys.USAGE).partition("/")[0]
        yield node
        at = keys.prefix_end(keys.usage_of(node))


@dataclass
class UsageWriter:
    """Adds the closed steps of one job on one node to its usage record of the day."""

    store: Store
    job: JobRecord
    node: str
    clock: Clock
    _waiting: list[StepAccount] = field(default_factory=list)
    _written: float | None = None

    async def add(self, step: StepAccount) -> None:
        """Add a closed step; write all waiting steps if the last write is at least `EVERY_S` ago."""
        self._waiting = [*self._waiting, step][-MOST_WAITING:]
        now = self.clock.monotonic()
        if self._written is None or now - self._written >= EVERY_S:
            self._written = now
            await self.write()

    async def write(self) -> None:
        """Write the waiting steps. Those that cannot be written, because the store is unavailable, wait on."""
        with contextlib.suppress(StoreUnavailable):
            for day in sorted({end_day(book) for book in self._waiting}):
                of_day = [book for book in self._waiting if end_day(book) == day]
                for first in range(0, len(of_day), NEWEST_STEPS):
                    some = of_day[first : first + NEWEST_STEPS]
                    if not await self._write(day, some):
                        break
                    self._waiting = [book for book in self._waiting if book not in some]

    async def _write(self, day: int, books: list[StepAccount]) -> bool:
        """Add steps to the record of a day. Return whether they need not be written again."""
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
