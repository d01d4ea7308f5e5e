"""A daemon's copy of the cluster's records in the store: nodes, workers, unfinished jobs, shares of slots, schema
versions. Watches keep it current."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from controllers.changes import ChangeSignal
from controllers.cluster.rules import compatible_nodes, incompatible_nodes, parse_version
from controllers.rules.view import Memo
from gcore.ledger.records.cluster import Claim, KnownShare, QueuePosition, Quotas, Shares, SickSlots
from gcore.ledger.records.job import NodeRecord
from gcore.ledger.transactions import Versioned
from gcore.schema import FIRST_VERSION, Record, UnreadableRecord, written_version
from gcore.store import keys
from gcore.store.types import KeyValue, Store, WatchBatch
from gcore.system.concurrency import limit_time
from gcore.worker.records import WorkerRecord
from placement.shares import ClusterSlots, explain_surplus, queue_jobs

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)
T = TypeVar("T")

CATCH_UP_S = 1.0
"""Maximum seconds to wait until the watch shows a change that was just written."""

NO_SHARES = Versioned(Shares(), 0)


class ClusterMirror:
    """The copy of the cluster's records. It may lag behind the store, but contains no state that the store did not
    have. All collections are replaced and never changed, so that results can be cached by identity."""

    def __init__(self, store: Store, changes: ChangeSignal) -> None:
        self._store = store
        self._changes = changes
        self.nodes: dict[str, NodeRecord] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.active: frozenset[str] = frozenset()
        self.claims: dict[str, Claim] = {}
        """The claims on slots of the jobs that have not ended, by job ID."""
        self.claimed: dict[str, int] = {}
        """The store revision in which each of these claims was created, by job ID."""
        self.shares: Versioned[Shares] | None = None
        """The division of the slots between the jobs; None: not received yet."""
        self.drained: frozenset[str] = frozenset()
        """The draining nodes, on which nothing may be placed."""
        self.sick: dict[str, SickSlots] = {}
        """The unhealthy slots, by node."""
        self.quotas: Mapping[str, int] = {}
        """The maximum number of slots of all jobs of a namespace together, by namespace."""
        self.reads: dict[str, int] = {}
        """The newest schema version that each node can read, by node."""
        self.written = FIRST_VERSION
        """The newest schema version that was ever written to this store."""
        self._remembered = Memo()
        self.listened: set[str] = set()
        """The key prefixes whose records were received at least once."""
        self.revisions: dict[str, int] = {}
        """The store revision up to which the records of each key prefix were received."""

    def able(self, version: int) -> Mapping[str, NodeRecord]:
        """The registered nodes that can read records of schema `version`. Returns the same object while nothing
        changes."""
        sources = (self.nodes, self.reads)
        return self._remembered.get(
            ("able", version), sources, lambda: compatible_nodes(self.nodes, self.reads, version)
        )

    def unable(self, version: int) -> Mapping[str, int]:
        """The registered nodes that cannot read records of schema `version`, with the newest version that each can
        read."""
        sources = (self.nodes, self.reads)
        return self._remembered.get(
            ("unable", version), sources, lambda: incompatible_nodes(self.nodes, self.reads, version)
        )

    @property
    def working(self) -> frozenset[str]:
        """The IDs of the jobs that need a runner: those that have slots or were asked to end; all unfinished jobs until
        shares are received. The others only wait for slots, and there may be very many."""
        if self.shares is None:
            return self.active
        shares = self.shares.record.jobs
        return frozenset(uid for uid, claim in self.claims.items() if uid in shares or claim.ends)

    @property
    def is_complete(self) -> bool:
        """Whether all records were received at least once."""
        return self.listened >= self.watches.keys() and self.shares is not None

    @property
    def watches(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """The coroutines that must run while this mirror is in use, by the key prefix that each watches."""
        return {
            keys.NODES: self.watch_nodes,
            keys.WORKERS: self.watch_workers,
            keys.SCHEMAS: self.watch_schemas,
            keys.ACTIVE: self.watch_active,
            keys.SHARES: self.watch_shares,
            keys.POOL: self.watch_pool,
        }

    async def watch_nodes(self) -> None:
        """Keep `nodes` current; never returns."""
        await self._watch(
            keys.NODES, lambda batch: self._set("nodes", _fold(self.nodes, batch, keys.NODES, NodeRecord))
        )

    async def watch_workers(self) -> None:
        """Keep `workers` current; never returns."""
        await self._watch(
            keys.WORKERS, lambda batch: self._set("workers", _fold(self.workers, batch, keys.WORKERS, WorkerRecord))
        )

    async def watch_schemas(self) -> None:
        """Keep `reads` and `written` current; never returns."""

        def fold(batch: WatchBatch) -> None:
            reads = {} if batch.reset else dict(self.reads)
            for event in batch.events:
                version = parse_version(event.kv.value) if event.kind == "put" else None
                if event.kv.key == keys.WRITTEN:
                    self._set("written", max(self.written, version or FIRST_VERSION))
                    continue
                node = event.kv.key.removeprefix(keys.READS)
                reads.pop(node, None)
                if version is not None:
                    reads[node] = version
            self._set("reads", reads)

        # Started after the nodes are received: a registered node has then reported what it reads, if it ever does.
        await self._changes.until(lambda: keys.NODES in self.listened)
        await self._watch(keys.SCHEMAS, fold)

    async def watch_active(self) -> None:
        """Keep `active` current; never returns."""

        def fold(batch: WatchBatch) -> None:
            claims = _fold(self.claims, batch, keys.ACTIVE, Claim, Claim())
            created = {event.kv.key.removeprefix(keys.ACTIVE): event.kv.create_revision for event in batch.events}
            self._set("claimed", {uid: created.get(uid) or self.claimed.get(uid, 0) for uid in claims})
            self._set("claims", claims)
            if claims.keys() != self.active:
                self._set("active", frozenset(claims))

        await self._watch(keys.ACTIVE, fold)

    async def watch_shares(self) -> None:
        """Keep `shares` current; never returns. If the record cannot be read, the old value stays, because that does
        not mean that no job has slots."""

        def fold(batch: WatchBatch) -> None:
            now: Versioned[Shares] | None = NO_SHARES if batch.reset else self.shares or NO_SHARES
            for event in batch.events:
                if event.kind == "delete":
                    now = NO_SHARES
                else:
                    read = read_record(Shares, event.kv, None)
                    now = self.shares if read is None else Versioned(read, event.kv.mod_revision)
            self._set("shares", now)

        await self._watch(keys.SHARES, fold)

    async def watch_pool(self) -> None:
        """Keep `drained`, `quotas` and `sick` current; never returns."""

        def fold(batch: WatchBatch) -> None:
            drained = set() if batch.reset else set(self.drained)
            quotas = {} if batch.reset else self.quotas
            for event in batch.events:
                if event.kv.key.startswith(keys.DRAINED):
                    node = event.kv.key.removeprefix(keys.DRAINED)
                    (drained.add if event.kind == "put" else drained.discard)(node)
                elif event.kv.key == keys.QUOTAS:
                    said = read_record(Quotas, event.kv, Quotas()) if event.kind == "put" else Quotas()
                    quotas = said.slots
            self._set("quotas", quotas)
            self._set("drained", frozenset(drained))
            of_sick = tuple(event for event in batch.events if event.kv.key.startswith(keys.SICK))
            sick = WatchBatch(of_sick, batch.revision, batch.reset)
            self._set("sick", _fold(self.sick, sick, keys.SICK, SickSlots))

        await self._watch(keys.POOL, fold)

    def share_of(self, uid: str) -> KnownShare | None:
        """The slots of a job; None until shares are received."""
        if self.shares is None:
            return None
        shares = self.shares
        return self._remembered.get(("share", uid), (shares,), lambda: KnownShare(uid, shares.record, shares.revision))

    @property
    def there(self) -> ClusterSlots:
        """The slots of the cluster that jobs may get, as input of `placement.shares`. All daemons compute the same.
        Returns the same object while nothing changes."""
        nodes = self.able(written_version())

        def found() -> ClusterSlots:
            sick = {name: one.slots for name, one in self.sick.items()}
            return ClusterSlots.of({name: node.slots for name, node in nodes.items()}, self.drained, sick, self.quotas)

        return self._remembered.get("there", (nodes, self.drained, self.sick, self.quotas), found)

    @property
    def queue(self) -> Mapping[str, QueuePosition]:
        """The jobs that wait for slots, by job ID, with position and reason. Empty until all records are received."""
        if not self.is_complete or self.shares is None:
            return {}
        there, shares = self.there, self.shares.record
        return self._remembered.get(
            "queue", (there, self.claims, self.shares), lambda: queue_jobs(there, self.claims, shares)
        )

    def surplus_reasons(self, uid: str) -> tuple[str, ...]:
        """Why a job must give back slots, one sentence for each reason. Empty until everything is received."""
        if not self.is_complete or self.shares is None:
            return ()
        there, shares = self.there, self.shares.record
        return self._remembered.get(
            ("surplus", uid),
            (there, self.claims, self.shares),
            lambda: explain_surplus(there, self.claims, shares, uid, self.drained),
        )

    async def queue_with(self, revision: int) -> Mapping[str, QueuePosition]:
        """The queue including all claims up to store revision `revision`, for a caller that has just changed one. After
        `CATCH_UP_S`, the queue as it is."""
        with contextlib.suppress(TimeoutError):
            async with limit_time(CATCH_UP_S):
                await self._changes.until(lambda: self.is_complete and self.revisions.get(keys.ACTIVE, 0) >= revision)
        return self.queue

    async def _watch(self, prefix: str, fold: Callable[[WatchBatch], None]) -> None:
        async for batch in self._store.watch(prefix):
            fold(batch)
            self.listened.add(prefix)
            self.revisions[prefix] = batch.revision
            self._changes.notify()

    def _set(self, name: str, value: object) -> None:
        setattr(self, name, value)


def _fold(
    known: dict[str, R], batch: WatchBatch, prefix: str, record: type[R], instead: R | None = None
) -> dict[str, R]:
    result = {} if batch.reset else dict(known)
    for event in batch.events:
        name = event.kv.key.removeprefix(prefix)
        read = read_record(record, event.kv, instead) if event.kind == "put" else None
        if read is not None:
            result[name] = read
        else:
            result.pop(name, None)
    return result


def read_record(record: type[R], kv: KeyValue, instead: T) -> R | T:
    """Decode a record. If this version cannot read it, log that and return `instead`, because a record of a node of
    another version must not end all daemons."""
    try:
        return record.decode(kv.value, kv.key)
    except UnreadableRecord as error:
        log.error("ignoring an unreadable record: %s", error)
        return instead
