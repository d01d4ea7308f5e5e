"""The daemons and workers of the cluster, and the jobs that have not ended, as last heard from the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from controllers.changes import Changes
from controllers.remembered import Remembered
from controllers.versions import able, unable
from gcore.ledger.job import NodeRecord
from gcore.schema import Record, UnreadableRecord
from gcore.store import keys
from gcore.store.types import Store, WatchBatch
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)


class ClusterMirror:
    """Late at worst, never wrong. `nodes`, `workers` and `active` are replaced, never changed."""

    def __init__(self, store: Store, changes: Changes) -> None:
        self._store = store
        self._changes = changes
        self.nodes: dict[str, NodeRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.active: frozenset[str] = frozenset()
        self.reads: dict[str, int] = {}
        """By node: the newest schema version that it reads, where it says so."""
        self._remembered = Remembered()
        self.listened: set[str] = set()
        """The prefixes that were heard at least once."""

    def able(self, version: int) -> Mapping[str, NodeRecord]:
        """The nodes that read what is written in `version`; the same object while nothing changes."""
        sources = (self.nodes, self.reads)
        return self._remembered.get(("able", version), sources, lambda: able(self.nodes, self.reads, version))

    def unable(self, version: int) -> Mapping[str, int]:
        """The nodes that are there and do not: by node, the newest version that it reads."""
        sources = (self.nodes, self.reads)
        return self._remembered.get(("unable", version), sources, lambda: unable(self.nodes, self.reads, version))

    @property
    def is_complete(self) -> bool:
        """Whether everything was heard at least once."""
        return len(self.listened) == 4

    async def watch_nodes(self) -> None:
        """Keep `nodes` current, for ever."""
        await self._watch(
            keys.NODES, lambda batch: self._set("nodes", _fold(self.nodes, batch, keys.NODES, NodeRecord))
        )

    async def watch_workers(self) -> None:
        """Keep `workers` current, for ever."""
        await self._watch(
            keys.WORKERS, lambda batch: self._set("workers", _fold(self.workers, batch, keys.WORKERS, WorkerRecord))
        )

    async def watch_schemas(self) -> None:
        """Keep `reads` current, for ever."""

        def fold(batch: WatchBatch) -> None:
            reads = {} if batch.reset else dict(self.reads)
            for event in batch.events:
                node, said = event.kv.key.removeprefix(keys.SCHEMAS), event.kv.value
                reads.pop(node, None)
                if event.kind == "put" and said.isdigit():
                    reads[node] = int(said)
            self._set("reads", reads)

        await self._watch(keys.SCHEMAS, fold)

    async def watch_active(self) -> None:
        """Keep `active` current, for ever."""

        def fold(batch: WatchBatch) -> None:
            active = set() if batch.reset else set(self.active)
            for event in batch.events:
                uid = event.kv.key.removeprefix(keys.ACTIVE)
                (active.add if event.kind == "put" else active.discard)(uid)
            self._set("active", frozenset(active))

        await self._watch(keys.ACTIVE, fold)

    async def _watch(self, prefix: str, fold: Callable[[WatchBatch], None]) -> None:
        async for batch in self._store.watch(prefix):
            fold(batch)
            self.listened.add(prefix)
            self._changes.notify()

    def _set(self, name: str, value: object) -> None:
        setattr(self, name, value)


def _fold(known: dict[str, R], batch: WatchBatch, prefix: str, record: type[R]) -> dict[str, R]:
    """What this version cannot read is passed over: one node of another version must not end all daemons."""
    result = {} if batch.reset else dict(known)
    for event in batch.events:
        name = event.kv.key.removeprefix(prefix)
        if event.kind == "put":
            try:
                result[name] = record.decode(event.kv.value, event.kv.key)
            except UnreadableRecord as error:
                log.error("passed over: %s", error)
                result.pop(name, None)
        else:
            result.pop(name, None)
    return result
