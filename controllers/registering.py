"""A node's registration in the store, under the lease of one life of its daemon: its record, and which of its slots are sick.

It is put in place after an earlier life's has gone, and written anew when another schema version is spoken: the version after that
must be able to read it. Whether the daemon can work follows: it can while its lease surely lives and its node is registered.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable

from controllers.belongings import Belongings
from controllers.changes import Changes
from controllers.identity import Identity
from controllers.machine import node_facts
from gcore.errors import StoreUnavailable
from gcore.fault_points import At, point
from gcore.ledger.claims import SickSlots
from gcore.ledger.job import NodeRecord
from gcore.schema import SCHEMA_VERSION, spoken
from gcore.store import keys
from gcore.store.session import Session
from gcore.store.types import Compare, Delete, Put, Store

log = logging.getLogger(__name__)

RETRY_S = 0.5
READINESS_S = 1.0
"""Between two looks at whether the lease lives."""
WAITS_FOR_ANOTHER = (
    "%s is registered by another life of it, under lease %x, whose end is waited for; if it does not end, another daemon "
    "has this node's name"
)


class Registration:
    """Of one life. `ready` is told whether the daemon can work, with a sentence, whenever that changes."""

    def __init__(
        self,
        own: Belongings,
        store: Store,
        identity: Identity,
        metrics_address: str,
        changes: Changes,
        session: Session,
        ready: Callable[[bool, str], Awaitable[None]],
    ) -> None:
        self._own = own
        self._store = store
        self._identity = identity
        self._metrics_address = metrics_address
        self._changes = changes
        self._session = session
        self._ready = ready
        self._registered = False
        self._told: tuple[bool, str] | None = None
        self._written = 0
        """The schema version of what stands there."""
        self._sick: dict[str, str] = {}
        """The sick slots that are told there."""
        self._key = keys.node(own.config.node)

    async def run(self) -> None:
        """For ever."""
        own = self._own
        await own.health.check()
        if not own.looked:
            own.facts, own.looked = await node_facts(own.config.slots, own.config.host_memory_gib), True
        record = self._record()
        # First of all who else is there, and in which version they are to be spoken to.
        await self._changes.until(lambda: own.spoken > 0)
        await self._register(record)
        self._registered = True
        await self._tell_readiness()
        while True:
            await self._changes.until(lambda: spoken() != self._written or own.health.sick != self._sick)
            if not await self._is_written_anew(record):
                await own.clock.sleep(RETRY_S)

    async def watch_readiness(self) -> None:
        """For ever. That the store does not answer shows in the lease, which is not renewed any more."""
        while True:
            await self._tell_readiness()
            await self._own.clock.sleep(READINESS_S)

    async def _tell_readiness(self) -> None:
        alive = self._session.alive(self._own.clock.monotonic())
        ready = alive and self._registered
        if ready:
            status = f"ready: {len(self._own.config.slots)} slots, {len(self._own.health.sick)} of them sick"
        else:
            status = "waits for the store: its lease is not renewed" if not alive else "registers its node"
        if (ready, status) != self._told:
            self._told = ready, status
            await self._ready(ready, status)

    async def _register(self, record: NodeRecord) -> None:
        config, lease, store = self._own.config, self._identity.lease, self._store
        waited_for = 0
        reads = Put(keys.reads(config.node), str(SCHEMA_VERSION).encode(), lease=lease)
        while True:
            with contextlib.suppress(StoreUnavailable):
                self._written, self._sick = spoken(), dict(self._own.health.sick)
                put = Put(self._key, record.encode(), lease=lease)
                point(At.NODE, "before")
                # With the registration: no job may be given a slot that is known to be sick.
                sick = self._sick_now() if self._sick else ()
                result = await store.transact((Compare(self._key, 0),), (put, reads, *sick))
                point(At.NODE, "after")
                if result.won:
                    return
                holder = await store.get(self._key)
                if holder is not None and holder.lease == lease:
                    # By a try whose answer never came: what it wrote of versions and of sick slots may be out of date.
                    self._written = 0
                    return
                if holder is not None and holder.lease != waited_for:
                    waited_for = holder.lease
                    log.warning(WAITS_FOR_ANOTHER, config.node, waited_for)
            await self._own.clock.sleep(RETRY_S)

    async def _is_written_anew(self, record: NodeRecord) -> bool:
        """Whether all of it stands there as it is now; False: look again."""
        with contextlib.suppress(StoreUnavailable):
            there = await self._store.get(self._key)
            compare = Compare(self._key, there.mod_revision if there is not None else 0)
            version, sick = spoken(), dict(self._own.health.sick)
            put = Put(self._key, record.encode(), lease=self._identity.lease)
            if (await self._store.transact((compare,), (put, *self._sick_now()))).won:
                self._written, self._sick = version, sick
                return True
        return False

    def _sick_now(self) -> tuple[Put | Delete, ...]:
        key, sick = keys.sick(self._own.config.node), dict(self._own.health.sick)
        return (Put(key, SickSlots(slots=sick).encode(), lease=self._identity.lease) if sick else Delete(key),)

    def _record(self) -> NodeRecord:
        config, identity = self._own.config, self._identity
        return NodeRecord(
            name=config.node,
            incarnation=identity.incarnation,
            address=identity.address,
            peer_address=identity.peer_address,
            metrics_address=self._metrics_address,
            slots=config.slots,
            pid=os.getpid(),
            started=self._own.clock.wall(),
            sglang=config.sglang_python is not None,
            facts=self._own.facts,
        )
