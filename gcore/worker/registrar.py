"""Keeps one worker's registration in the store as it should be.

The registration is under a session's lease (`gcore.store.session`). It is written level by level: whatever the
record should say last, is written until the store has it. Each write compares the key's revision, because a write
whose answer never came may be made later, and must not undo a newer one.

A train rank's first registration also takes `world/{world}/rank/{rank}`, in the same transaction and only if nobody
has it; that key is never deleted while the world matters, so a rank that lost its lease (the store was away for
longer) registers again only while the key still names it.

Once refused, it still shows the failure, but takes no rank; what another process has registered under this instance's
name is never touched. Does not decide what a refusal means (`gcore.worker.lifecycle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from gcore.clock import Clock
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.fault_points import At, point
from gcore.ledger.job import RankClaim
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.session import Session
from gcore.store.types import Compare, KeyValue, Put, Store
from gcore.worker.events import Event, Refused, Registered, Shown, StoreSeen
from gcore.worker.records import LaunchSpec, WorkerRecord

RETRY_S = 1.0
"""Between attempts while the store does not answer."""

log = logging.getLogger("gcore.worker")


@dataclass(frozen=True, slots=True)
class _Claim:
    """What holds a rank of a world."""

    compares: tuple[Compare, ...]
    puts: tuple[Put, ...]


class Registrar:
    """One worker's registration. `emit` is told what became of it."""

    def __init__(self, spec: LaunchSpec, store: Store, clock: Clock, emit: Callable[[Event], None]) -> None:
        self._spec = spec
        self._store = store
        self._clock = clock
        self._emit = emit
        self._key = keys.worker(spec.instance)
        self._wanted: WorkerRecord | None = None
        self._changed = asyncio.Event()
        self._session: Session | None = None
        self._registered = False
        self._refused = False
        self._mute = False

    def show(self, record: WorkerRecord) -> None:
        """From now on the store shall show `record`."""
        if record != self._wanted:
            self._wanted = record
            self._changed.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._session = await self._open()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._session.run())
                    tasks.create_task(self._report(self._session))
                    tasks.create_task(self._write(self._session.lease))
            except* LeaseLost:
                log.warning("the store ended the lease; registering again")

    async def leave(self) -> None:
        """End the lease, and with it the registration. If the store is away, it ends by itself."""
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        while True:
            try:
                return await Session.open(self._store, clock=self._clock, ttl=self._spec.lease_ttl_s)
            except StoreUnavailable:
                await self._away()

    async def _report(self, session: Session) -> None:
        """Whether the store answers, as the renewals tell."""
        while True:
            self._emit(StoreSeen(session.alive(self._clock.monotonic())))
            await self._clock.sleep(self._spec.lease_ttl_s)

    async def _write(self, lease: int) -> None:
        self._changed.set()  # under a new lease everything is to be written again
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._wanted is None:
                continue
            try:
                settled = await self._put(lease, self._wanted)
            except StoreUnavailable:
                settled = False
                await self._away()
            if not settled:
                self._changed.set()

    async def _put(self, lease: int, record: WorkerRecord) -> bool:
        """Whether the store shows `record` now, or never will; False: look again."""
        there = None if self._mute else await self._store.get(self._key)
        if there is not None and not _is_of(there, record):
            self._mute = True
            self._emit(Refused(f"another process is registered as worker {self._spec.instance}"))
        if self._mute:
            self._emit(Shown(record.state))  # as far as it can be: whoever waits for it may go on
            return True
        claim = _Claim((), ()) if self._refused else await self._claim()
        if isinstance(claim, Refused):
            self._refused = True
            self._emit(claim)
            return False
        compares = (Compare(self._key, there.mod_revision if there else 0), *claim.compares)
        point(At.WORKER, "before")
        result = await self._store.transact(compares, (Put(self._key, record.encode(), lease), *claim.puts))
        point(At.WORKER, "after")
        if not result.won:
            return False
        if not self._refused:
            self._registered = True
            self._emit(Registered())
        self._emit(Shown(record.state))
        return True

    async def _claim(self) -> _Claim | Refused:
        """What the registration of a train rank compares and writes besides."""
        spec = self._spec
        if spec.world is None or spec.rank is None:
            return _Claim((), ())
        key = keys.JobKeys(spec.job_uid).world_rank(spec.world, spec.rank)
        there = await self._store.get(key)
        if there is None:
            if self._registered:
                return Refused(f"world {spec.world} is gone from the store")
            return _Claim((Compare(key, 0),), (Put(key, RankClaim(instance=spec.instance).encode()),))
        holder = RankClaim.decode(there.value, key).instance
        if holder != spec.instance:
            return Refused(f"rank {spec.rank} of world {spec.world} is taken by worker {holder}")
        return _Claim((Compare(key, there.mod_revision),), ())

    async def _away(self) -> None:
        self._emit(StoreSeen(answers=False))
        await self._clock.sleep(RETRY_S)


def _is_of(there: KeyValue, record: WorkerRecord) -> bool:
    try:
        found = WorkerRecord.decode(there.value, there.key)
    except UnreadableRecord:
        return False
    return (found.node, found.process) == (record.node, record.process)
