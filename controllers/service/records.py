"""Jobs as they stand in the store, read on demand. Writes nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.ledger import archive
from gcore.ledger.audit import Audit, audit, read_receipts
from gcore.ledger.job import NodeRecord
from gcore.ledger.mirror import JobMirror
from gcore.ledger.stream import rules_of
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch, WatchEvent
from gcore.worker.records import WorkerRecord


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
            return named.value.decode()
        return name if await self._store.get(JobKeys(name).job) is not None else None

    async def batch(self, uid: str) -> WatchBatch:
        """All records of a job, as if just heard."""
        listing = await self._store.list(JobKeys(uid).prefix)
        return WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)

    async def mirror(self, uid: str) -> JobMirror:
        """A job as it stands."""
        return JobMirror(JobKeys(uid)).fold(await self.batch(uid))

    async def summaries(self) -> list[JobMirror]:
        """Every job, oldest first."""
        uids = set()
        for kv in (await self._store.list(keys.NAMES)).kvs:
            uids.add(kv.value.decode())
        for kv in (await self._store.list(keys.REQUESTS)).kvs:
            uids.add(kv.value.decode())
        mirrors = await asyncio.gather(*(self.mirror(uid) for uid in sorted(uids)))
        there = [mirror for mirror in mirrors if mirror.job is not None]
        return sorted(there, key=lambda m: m.job.record.created if m.job else 0.0)

    async def cluster(self) -> ClusterListing:
        """Daemons and workers."""
        nodes = [NodeRecord.decode(kv.value, kv.key) for kv in (await self._store.list(keys.NODES)).kvs]
        workers = [WorkerRecord.decode(kv.value, kv.key) for kv in (await self._store.list(keys.WORKERS)).kvs]
        return ClusterListing(tuple(nodes), tuple(workers))

    async def audit(self, uid: str) -> Audit:
        """Recompute a job's accounts from its log and the ranks' receipts."""
        job_keys = JobKeys(uid)
        batch = await self.batch(uid)
        mirror = JobMirror(job_keys).fold(batch)
        if mirror.job is None or mirror.head is None:
            return Audit(())
        run_dir = Path(mirror.job.record.run_dir)
        try:
            receipts = read_receipts(await asyncio.to_thread(_receipt_lines, run_dir))
            log = await asyncio.to_thread(archive.read, run_dir)
        except (ValueError, OSError) as error:
            return Audit((f"the run's folder cannot be read: {error}",))
        # What was archived and is still in the store is the same entry; the store's word counts.
        log |= {seq: stored.record for seq, stored in mirror.log.items()}
        return audit(rules_of(mirror.job.record), mirror.head.record, log, receipts)


def _receipt_lines(run_dir: Path) -> list[dict[str, Any]]:
    lines = []
    for file in sorted((run_dir / "receipts").glob("*.jsonl")):
        *whole, last = file.read_text(encoding="utf-8").split("\n")
        # What stands after the last line's end was being written when its rank died: it was never reported.
        del last
        for number, line in enumerate(whole, 1):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file.name}:{number} is not JSON") from error
    return lines
