"""Jobs as they stand in the store, read on demand. Writes nothing to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from controllers.service.audits import audit_of_records
from gcore.ledger import store_copy
from gcore.ledger.audit import Audit
from gcore.ledger.job import NodeRecord
from gcore.ledger.mirror import JobMirror
from gcore.ledger.store_copy import mirror_of
from gcore.schema import Record, UnreadableRecord
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Listing, Store, WatchBatch, WatchEvent
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class ClusterListing:
    """The daemons and workers that are registered now."""

    nodes: tuple[NodeRecord, ...]
    workers: tuple[WorkerRecord, ...]


class StoredJobs:
    """Reads. Raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, name: str) -> str | None:
        """The uid of a job's name, or of its uid."""
        if not name:
            return None
        named = await self._store.get(keys.name(name))
        if named is not None:
            return named.value.decode(errors="replace")
        return name if await self._store.get(JobKeys(name).job) is not None else None

    async def batch(self, uid: str) -> WatchBatch:
        """All records of a job, as if just heard."""
        return _as_heard(await self._store.list(JobKeys(uid).prefix))

    async def mirror(self, uid: str) -> JobMirror:
        """A job as it stands."""
        return JobMirror(JobKeys(uid)).fold(await self.batch(uid))

    async def summaries(self) -> list[JobMirror]:
        """Every job, oldest first. One that this version cannot read is passed over: it must not hide all the others."""
        uids = set()
        for kv in (await self._store.list(keys.NAMES)).kvs:
            uids.add(kv.value.decode(errors="replace"))
        for kv in (await self._store.list(keys.REQUESTS)).kvs:
            uids.add(kv.value.decode(errors="replace"))
        mirrors = await asyncio.gather(*(self._readable(uid) for uid in sorted(uids)))
        there = [mirror for mirror in mirrors if mirror is not None and mirror.job is not None]
        return sorted(there, key=lambda m: m.job.record.created if m.job else 0.0)

    async def _readable(self, uid: str) -> JobMirror | None:
        try:
            return await self.mirror(uid)
        except UnreadableRecord as error:
            log.error("job %s is not listed: %s", uid, error)
            return None

    async def cluster(self) -> ClusterListing:
        """Daemons and workers, but for those that this version cannot read."""
        nodes = _read(NodeRecord, await self._store.list(keys.NODES))
        return ClusterListing(tuple(nodes), tuple(_read(WorkerRecord, await self._store.list(keys.WORKERS))))

    async def audit(self, uid: str) -> Audit:
        """Recompute a job's accounts from its log and the ranks' receipts. One that has ended leaves a copy of its records
        in its folder, if there is none yet."""
        listing = await self._store.list(JobKeys(uid).prefix)
        batch = _as_heard(listing)
        found = await asyncio.to_thread(audit_of_records, uid, batch)
        await asyncio.to_thread(_leave_copy, uid, listing)
        return found


def _read(kind: type[R], listing: Listing) -> Iterator[R]:
    for kv in listing.kvs:
        try:
            yield kind.decode(kv.value, kv.key)
        except UnreadableRecord as error:
            log.error("passed over: %s", error)


def _as_heard(listing: Listing) -> WatchBatch:
    return WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)


def _leave_copy(uid: str, listing: Listing) -> None:
    """An audit is an answer, whether or not the folder takes the copy."""
    with contextlib.suppress(OSError, UnreadableRecord):
        mirror = mirror_of(uid, _as_heard(listing))
        if mirror.job is None or mirror.status is None or not mirror.status.record.phase.ended:
            return
        run_dir = Path(mirror.job.record.run_dir)
        if not store_copy.is_left(run_dir):
            store_copy.leave(run_dir, "audit", uid, listing)
