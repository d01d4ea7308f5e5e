"""The records of what was used (`gcore.ledger.usage`), of all nodes, also those that have left: read for some days, and forgotten when they
are very old.

There may be very many: a day of a job on a node is one. So the days that nobody asked for are not read at all, a few records at a time are
decoded, and whoever waits for the next few lets everything else go on.

Forgetting is nobody's task in particular: the first daemon that comes to it on a day does it for all. What is forgotten at once is bounded, so
that one whose clock has run away does not take everything.
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
"""Records that are read, and decoded without a rest: some milliseconds."""


SWEPT_DAYS = 32
"""So many days further than the last time the oldest are forgotten, at most."""


MOST_DIGITS = 9
"""Of the day that stands in the store."""


async def read_usage(store: Store, first_day: int, last_day: int) -> AsyncGenerator[Sequence[NodeUsage], None]:
    """What jobs used on these days, both included, some at a time; those too of which nothing else is known any more. Raises
    StoreUnavailable."""
    async with aclosing(_records(store, first_day, last_day)) as pages:
        async for kvs in pages:
            found = []
            for kv in kvs:
                try:
                    found.append(NodeUsage.decode(kv.value, kv.key))
                except UnreadableRecord as error:
                    log.error("passed over: %s", error)
            yield found


async def forget_old_usage(store: Store, today: int) -> None:
    """Of every node, as far as the store takes it, unless somebody has done it today."""
    with contextlib.suppress(StoreUnavailable):
        kv = await store.get(keys.USAGE_SWEPT)
        told = b"" if kv is None else kv.value
        swept = int(told) if told.isdigit() and len(told) <= MOST_DIGITS else None
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
    """Of all nodes on these days, some at a time. A node's days follow one another, so the others are passed over."""
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
    """Those of which there is any record."""
    at = keys.USAGE
    while kvs := (await store.between(at, keys.prefix_end(keys.USAGE), 1)).kvs:
        node = kvs[0].key.removeprefix(keys.USAGE).partition("/")[0]
        yield node
        at = keys.prefix_end(keys.usage_of(node))


# -------------------- using
# Writes down what a job uses of this node (`gcore.ledger.usage`), as steps are booked.
#
# Several steps may go into one write, but no more than its record remembers by name; what is not written yet when a daemon is killed, at most `EVERY_S` of work, is not counted. A
# write compares what it adds to, and one whose answer never came is looked at again before it is made once more, so nothing is counted
# twice. Nothing waits for it.

EVERY_S = 2.0


TRIES = 3


MOST_WAITING = 1000
"""Steps that wait for a store that is away; the oldest are given up."""


@dataclass
class UsageWriter:
    """Of one job on one node."""

    store: Store
    job: JobRecord
    node: str
    clock: Clock
    _waiting: list[StepAccount] = field(default_factory=list)
    _written: float | None = None

    async def add(self, book: StepAccount) -> None:
        """A step was booked."""
        self._waiting = [*self._waiting, book][-MOST_WAITING:]
        now = self.clock.monotonic()
        if self._written is None or now - self._written >= EVERY_S:
            self._written = now
            await self.write()

    async def write(self) -> None:
        """Write what waits, as far as the store takes it."""
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
                    log.error("what was used so far cannot be read, and is not added to: %s", error)
                    return True
            new = known
            for book in books:
                new = new.plus(book)
            compare = Compare(key, 0 if stored is None else stored.mod_revision)
            if (await self.store.transact((compare,), (Put(key, new.encode()),))).won:
                return True
        return False
