"""The registrations of all engines of a process, under one lease.

Each engine has its own record in the store, as a real one has; what is one is the lease, because they live and die together.
(A thousand leases, each renewed three times in its life, would take more of one machine than everything that is to be
looked at here.) Written level by level: whatever the records should say last is written until the store has it, each write
comparing the keys' revisions, so that a write whose answer never came undoes nothing. That of an engine that has ended alone is
taken away. Does not decide what they say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gcore.clock import Clock
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store import keys
from gcore.store.limits import MAX_OPERATIONS
from gcore.store.session import Session
from gcore.store.types import Compare, Delete, Put, Store
from gcore.worker.records import WorkerRecord

RETRY_S = 1.0
SETTLE_S = 0.05
"""After a change, for more of them: engines of a process come up within a moment."""

log = logging.getLogger("gcore.emulated")


class Registration:
    """Of one process's engines."""

    def __init__(self, store: Store, clock: Clock, ttl: int) -> None:
        self._store = store
        self._clock = clock
        self._ttl = ttl
        self._wanted: dict[str, WorkerRecord] = {}
        self._changed = asyncio.Event()
        self._session: Session | None = None

    def show(self, record: WorkerRecord) -> None:
        """From now on the store shall show `record`."""
        if self._wanted.get(record.instance) != record:
            self._wanted[record.instance] = record
            self._changed.set()

    def forget(self, instance: str) -> None:
        """The store shall show nothing of it any more."""
        if self._wanted.pop(instance, None) is not None:
            self._changed.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                self._session = await Session.open(self._store, clock=self._clock, ttl=self._ttl)
            except StoreUnavailable:
                await self._clock.sleep(RETRY_S)
                continue
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._session.run())
                    tasks.create_task(self._write(self._session.lease))
            except* LeaseLost:
                log.warning("the store ended the lease; registering again")

    async def leave(self) -> None:
        """End the lease, and with it all registrations."""
        if self._session is not None:
            await self._session.close()

    async def _write(self, lease: int) -> None:
        shown: dict[str, WorkerRecord] = {}
        tried: set[str] = set()
        """What may stand in the store: whether a write took place is not always known."""
        self._changed.set()  # under a new lease everything is to be written again
        while True:
            await self._changed.wait()
            await self._clock.sleep(SETTLE_S)
            self._changed.clear()
            due = {name: record for name, record in self._wanted.items() if shown.get(name) != record}
            names = sorted(due)
            try:
                gone = sorted(tried - self._wanted.keys())
                for start in range(0, len(gone), MAX_OPERATIONS):
                    former = gone[start : start + MAX_OPERATIONS]
                    await self._store.transact((), [Delete(keys.worker(name)) for name in former])
                    tried -= set(former)
                    shown = {name: record for name, record in shown.items() if name in tried}
                for start in range(0, len(names), MAX_OPERATIONS):
                    part = {name: due[name] for name in names[start : start + MAX_OPERATIONS]}
                    tried |= part.keys()
                    if await self._put(lease, part):
                        shown |= part
                    else:
                        self._changed.set()
            except StoreUnavailable:
                self._changed.set()
                await self._clock.sleep(RETRY_S)

    async def _put(self, lease: int, records: Mapping[str, WorkerRecord]) -> bool:
        revisions = {}
        for name in records:
            there = await self._store.get(keys.worker(name))
            revisions[name] = there.mod_revision if there else 0
        compares = [Compare(keys.worker(name), revision) for name, revision in revisions.items()]
        puts = [Put(keys.worker(name), record.encode(), lease) for name, record in records.items()]
        return (await self._store.transact(compares, puts)).won
