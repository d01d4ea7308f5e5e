"""Reads jobs, nodes, claims and namespaces from the store on demand.

A namespace exists while a job that was not deleted, usage, a quota, a token or the caller's certificate names it. `default` always
exists. A namespace that the caller may not see does not exist for that caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import JobNotFound, NamespaceNotFound, NotFound
from controllers.api.run_reader import audit_of_records, known_tokens
from controllers.cluster.mirror import ClusterMirror, read_record
from controllers.storage.peer_files import FetchFailed
from controllers.storage.run_folder import (
    LocalRunFolder,
    LocalRunFolders,
    collect_records,
    has_own_folder,
    localize_mirror,
    run_folder,
)
from gcore.api.tls import PLAIN, Connector
from gcore.api.tokens import TokenRecord
from gcore.errors import did_you_mean
from gcore.ledger import archive
from gcore.ledger.archive import mirror_of
from gcore.ledger.audit.chain import Audit
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Claim, QueuePosition, Quotas, Shares, SickSlots
from gcore.ledger.records.job import JobRecord, JobStatus, NodeRecord
from gcore.ledger.transactions import TransactionExecutor, Versioned
from gcore.models.layout import checkpoints_in
from gcore.schema import Record, UnreadableRecord
from gcore.store import keys
from gcore.store.keys import DEFAULT_NAMESPACE, JobKeys
from gcore.store.types import KeyListing, KeyValue, Store, WatchBatch, WatchEvent
from gcore.types import Token
from gcore.worker.records import WorkerRecord

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class ClusterListing:
    """The daemons and workers that are registered now."""

    nodes: tuple[NodeRecord, ...]
    workers: tuple[WorkerRecord, ...]


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """The run folders of this node, for jobs whose nodes share no folder."""

    node: str
    run_root: Path
    folders: LocalRunFolders


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A job with a record that is damaged or of an unknown version; `name` may be empty."""

    uid: str
    name: str
    why: str


class StoreReader:
    """Reads jobs, claims and registrations for the API. Raises StoreUnavailable."""

    def __init__(
        self,
        store: Store,
        own: LocalStorage | None = None,
        cluster: Callable[[], ClusterMirror | None] = lambda: None,
    ) -> None:
        """`cluster`: returns the mirror of the cluster in this daemon, or None without one."""
        self._store = store
        self._own = own
        self._cluster = cluster

    async def find(self, name: str, namespace: str = keys.DEFAULT_NAMESPACE) -> str | None:
        """The uid of a job: by its uid, by `NAMESPACE/NAME`, or by its name in `namespace`.

        A uid that the caller may see takes precedence over a name: a user can name a job with another job's uid, and a pause or delete by
        uid must reach the job with that uid. A job that the caller may not see hides no job of the same name.
        """
        if not name:
            return None
        said, slash, short = name.partition("/")
        if not slash and await self._is_seen(name):
            return name
        named = await self._store.get(keys.name(short, said) if slash else keys.name(name, namespace))
        return None if named is None else named.value.decode(errors="replace")

    async def _is_seen(self, uid: str) -> bool:
        """Whether there is a job with that uid and the caller may see it."""
        job_keys = JobKeys(uid)
        if (kv := await self._store.get(job_keys.job)) is not None:
            return may_see(_namespace_of(kv))
        return may_see("") and await self._store.get(job_keys.state) is not None

    async def check_record(self, uid: str) -> None:
        """Raise JobNotFound if the job's own record is missing from the store; the error includes the job's status if that is left."""
        job_keys = JobKeys(uid)
        if await self._store.get(job_keys.job) is not None:
            return
        kv = await self._store.get(job_keys.state)
        status = None if kv is None else read_record(JobStatus, kv, None)
        state = "" if status is None else f"; it is {status.phase}: {status.reason}"
        fix = "Restore etcd from a backup, or start a new job"
        raise JobNotFound(f"the store has lost {job_keys.job}, the record of job {uid}{state}", fix=fix)

    async def batch(self, uid: str) -> WatchBatch:
        """All records of a job, as a watch batch."""
        return _as_watch_batch(await self._store.list(JobKeys(uid).prefix))

    async def mirror(self, uid: str) -> JobMirror:
        """The mirror of a job with its current records."""
        return self._here(JobMirror(JobKeys(uid)).fold(await self.batch(uid)))

    def ledger(self, uid: str) -> TransactionExecutor:
        """Return an executor that runs transactions on the records of one job."""
        return TransactionExecutor(self._store, JobKeys(uid))

    @property
    def store(self) -> Store:
        """The store, for callers that change records."""
        return self._store

    @property
    def node(self) -> str:
        """The name of this node; empty if it has no run folders of its own."""
        return "" if self._own is None else self._own.node

    def _here(self, mirror: JobMirror) -> JobMirror:
        return mirror if self._own is None else localize_mirror(mirror, self._own.run_root)

    async def own_folder(self, uid: str) -> Path:
        """This node's own folder of a run, from which it serves files. Raises NotFound if the job's nodes share one folder."""
        kv = await self._store.get(JobKeys(uid).job)
        job = None if kv is None else JobRecord.decode(kv.value, kv.key)
        if job is None or not may_see(job.namespace) or self._own is None or not has_own_folder(job):
            raise NotFound(
                f"there is no job {uid[:40]!r} whose nodes have separate run folders", fix="Check the job's uid"
            )
        return run_folder(job, self._own.run_root)

    async def collect(
        self, mirror: JobMirror, what: Callable[[LocalRunFolder, Mapping[str, str]], Awaitable[None]]
    ) -> None:
        """Copy files of a run from peers to this node, if nodes share no folder. Ignores peers that fail."""
        own = self._own_of(mirror)
        if own is not None:
            await what(own, await self.peers())

    async def holders(self, mirror: JobMirror) -> Mapping[str, Collection[str]]:
        """The nodes that have each checkpoint's folder, by folder name, if nodes share no folder. Omits nodes that do not respond."""
        own = self._own_of(mirror)
        found: dict[str, list[str]] = {}
        if own is None or self._own is None:
            return found
        for version in await asyncio.to_thread(checkpoints_in, own.files.run_dir):
            found.setdefault(f"{version.lineage}-{version.step}", []).append(self._own.node)
        for node, address in sorted((await self.peers()).items()):
            with contextlib.suppress(FetchFailed):
                names = await own.files.list(address, "checkpoints")
                for folder in sorted({name.partition("/")[0] for name in names}):
                    found.setdefault(folder, []).append(node)
        return found

    def _own_of(self, mirror: JobMirror) -> LocalRunFolder | None:
        if mirror.job is None or self._own is None or not has_own_folder(mirror.job.record):
            return None
        return self._own.folders.of(mirror.keys.uid, mirror.run_dir)

    async def peers(self) -> Mapping[str, str]:
        """The addresses of the daemons of other nodes, by node."""
        me = "" if self._own is None else self._own.node
        return {node.name: node.for_peers for node in (await self.cluster()).nodes if node.name != me}

    async def newest(self, limit: int, before: int | None) -> list[tuple[str, int]]:
        """The uids of the newest jobs, with the revision of their creation. `before`: only jobs older than that revision."""
        listing = await self._store.newest(keys.REQUESTS, limit, before)
        return [(kv.value.decode(errors="replace"), kv.create_revision) for kv in listing.kvs]

    async def summary(self, uid: str) -> JobMirror | UnreadableJob | None:
        """The few records of a job that an entry in a list needs; of the evaluations, only the newest. None: there is
        no such job."""
        job_keys = JobKeys(uid)
        names = (job_keys.job, job_keys.state, job_keys.head, job_keys.assign, job_keys.checkpoints)
        reading = asyncio.gather(*(self._store.get(name) for name in names))
        found, evaluated = await asyncio.gather(reading, self._store.newest(job_keys.eval_prefix, 1))
        there = (*(kv for kv in found if kv is not None), *evaluated.kvs)
        try:
            mirror = self._here(JobMirror(job_keys).fold(_as_watch_batch(KeyListing(there, 0))))
        except UnreadableRecord as error:
            return UnreadableJob(uid, _name_of(found[0]), str(error))
        return mirror if mirror.job is not None else None

    async def namespace(self, uid: str) -> str:
        """The job's namespace. Empty if its record is missing or unreadable; then only callers with access to all namespaces see it."""
        kv = await self._store.get(JobKeys(uid).job)
        return "" if kv is None else _namespace_of(kv)

    @property
    def connector(self) -> Connector:
        """Connects to the daemons of other nodes."""
        return PLAIN if self._own is None else self._own.folders.connector

    def is_apart(self, mirror: JobMirror) -> bool:
        """Whether other nodes may have files of the run that this node lacks."""
        return self._own_of(mirror) is not None

    async def cluster(self) -> ClusterListing:
        """The registered daemons and workers, without those whose records this version cannot read."""
        nodes = _readable(NodeRecord, await self._store.list(keys.NODES))
        return ClusterListing(nodes, _readable(WorkerRecord, await self._store.list(keys.WORKERS)))

    async def claim(self, uid: str) -> Versioned[Claim] | None:
        """The claim on slots of a job that has not ended. An unreadable claim counts as the default claim."""
        kv = await self._store.get(JobKeys(uid).active)
        return None if kv is None else Versioned(read_record(Claim, kv, Claim()), kv.mod_revision)

    async def claims(self) -> dict[str, Claim]:
        """The claims of all jobs that have not ended, by uid."""
        listing = await self._store.list(keys.ACTIVE)
        return {kv.key.removeprefix(keys.ACTIVE): read_record(Claim, kv, Claim()) for kv in listing.kvs}

    async def shares(self) -> Shares | None:
        """The slots of each job; None if slots are not divided between jobs yet."""
        kv = await self._store.get(keys.SHARES)
        return None if kv is None else read_record(Shares, kv, None)

    async def queue(self, *claims: Versioned[Claim]) -> Mapping[str, QueuePosition]:
        """The queue of jobs that wait for slots, as computed by this daemon after it has seen `claims`. Empty while the daemon does not watch
        the cluster."""
        cluster = self._cluster()
        newest = max((one.revision for one in claims), default=0)
        return {} if cluster is None else await cluster.queue_with(newest)

    async def pool(self) -> tuple[frozenset[str], dict[str, SickSlots]]:
        """The drained nodes, and the unhealthy slots by node."""
        listing = await self._store.list(keys.POOL)
        drained = {kv.key.removeprefix(keys.DRAINED) for kv in listing.kvs if kv.key.startswith(keys.DRAINED)}
        of_sick = KeyListing(tuple(kv for kv in listing.kvs if kv.key.startswith(keys.SICK)), listing.revision)
        sick = {}
        for kv in of_sick.kvs:
            with contextlib.suppress(UnreadableRecord):
                sick[kv.key.removeprefix(keys.SICK)] = SickSlots.decode(kv.value, kv.key)
        return frozenset(drained), sick

    async def audit(self, uid: str) -> Audit:
        """Audit a job from its log and the ranks' receipts. For a job that has ended, also write a copy of its records into its folder if there
        is none yet."""
        known = await self._known_tokens(uid)
        listing = await self._store.list(JobKeys(uid).prefix)
        batch = _as_watch_batch(listing)
        run_dir: Path | None = None
        with contextlib.suppress(UnreadableRecord):  # the audit reports it
            mirror = self._here(mirror_of(uid, batch))
            run_dir = None if mirror.job is None else mirror.run_dir
            await self.collect(mirror, collect_records)
        found = await asyncio.to_thread(audit_of_records, uid, batch, run_dir, known)
        if run_dir is not None:
            await asyncio.to_thread(_leave_copy, uid, listing, run_dir)
        return found

    async def _known_tokens(self, uid: str) -> Collection[tuple[str, Token]]:
        """The worlds and tokens of the receipts that the run's folder has now."""
        with contextlib.suppress(UnreadableRecord, OSError):  # the audit reports them
            mirror = self._here(mirror_of(uid, _as_watch_batch(await self._store.list(JobKeys(uid).job))))
            if mirror.job is not None:
                return await asyncio.to_thread(known_tokens, mirror.run_dir)
        return ()


def _namespace_of(kv: KeyValue) -> str:
    try:
        return JobRecord.decode(kv.value, kv.key).namespace
    except UnreadableRecord:
        return ""


def _name_of(kv: KeyValue | None) -> str:
    """A job's name from a record that this version cannot read."""
    try:
        tree = json.loads(kv.value) if kv is not None else None
    except (ValueError, RecursionError):
        return ""
    return str(tree.get("name", ""))[:256] if isinstance(tree, dict) else ""


def _readable(kind: type[R], listing: KeyListing) -> tuple[R, ...]:
    return tuple(record for kv in listing.kvs if (record := read_record(kind, kv, None)) is not None)


def _as_watch_batch(listing: KeyListing) -> WatchBatch:
    return WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)


def _leave_copy(uid: str, listing: KeyListing, run_dir: Path) -> None:
    """Write a copy of an ended job's records into its run's folder, so that the run can be audited without a cluster.
    Errors are ignored, because they must not fail the audit."""
    with contextlib.suppress(OSError, UnreadableRecord):
        mirror = mirror_of(uid, _as_watch_batch(listing))
        if mirror.job is None or not mirror.has_ended:
            return
        if not archive.has_copy(run_dir, mirror.head.record if mirror.head else None):
            archive.write_copy(run_dir, "audit", uid, listing)


async def check_namespace(store: Store, namespace: str, used: Collection[str] = ()) -> None:
    """Raise NamespaceNotFound if the namespace does not exist. `used`: namespaces with known usage."""
    fix = "`gcore quota` and `gcore usage` list namespaces"
    if not may_see(namespace):
        raise NamespaceNotFound(f"there is no namespace {namespace[:80]!r}", fix=fix)
    if namespace in (DEFAULT_NAMESPACE, *used) or current_caller().namespaces is not None:
        return
    if (await store.newest(keys.NAMES + keys.full_name("", namespace), 1)).kvs:
        return
    others = {DEFAULT_NAMESPACE, *used, *await _with_quota(store), *await _with_token(store)}
    if namespace not in others:
        near = did_you_mean(namespace, others)
        raise NamespaceNotFound(f"there is no namespace {namespace[:80]!r}{near}", fix=fix)


async def _with_quota(store: Store) -> Collection[str]:
    kv = await store.get(keys.QUOTAS)
    with contextlib.suppress(UnreadableRecord):
        return () if kv is None else tuple(Quotas.decode(kv.value, kv.key).slots)
    return ()


async def _with_token(store: Store) -> Collection[str]:
    found: set[str] = set()
    for kv in (await store.list(keys.TOKENS)).kvs:
        with contextlib.suppress(UnreadableRecord):
            found.update(TokenRecord.decode(kv.value, kv.key).namespaces)
    return found
