"""The blob store of this node, as a child process of the daemon.

Blobs are the bytes of pictures and of other large arrays (`gcore.media`). They never pass through this process: the
store makes blobs from picture files, engines and train ranks read them, and stores fetch them from one another.

The store starts when the first job needs it, and again when it ends; it gets the addresses of the other nodes' stores
from the node records. Its port stays the same across restarts, because train ranks know the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.api.tls import PLAIN, Connector
from gcore.config.node import NodeConfig
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.records.job import NodeRecord
from gcore.media.blobs import is_in_use
from gcore.media.protocol import BlobMissing, StoreUnreachable, blob_path, job_key
from gcore.observability.metrics import BlobMetrics
from gcore.store import keys
from gcore.store.types import Compare, Put, Store
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import cancel_all
from gcore.system.files import replace_file
from gcore.system.network import join_host_port, listen
from gcore.types import Medium
from gcore.worker.control import ChildProcess
from gcore.worker.lifecycle import ChildFailed, ChildServes, WorkerEvent
from gcore.worker.records import LaunchSpec

if TYPE_CHECKING:
    from gcore.media.client import BlobClient, BlobHttp
    from gcore.train.rank.launch import RankBlobs

log = logging.getLogger(__name__)

COMMAND = ("-P", "-m", "gcore.media")

WORLDS = "worlds"
"""Folder in the daemon's home with the blobs of train worlds: WORLDS/JOB/WORLD-RANK."""

LASTING_S = 60.0
"""Seconds after which a store counts as started successfully."""

SECRET_BYTES = 32

LOOK_S = 5.0
"""Seconds between two readings of the store's counters."""

SLOW_S = 5.0
"""Seconds without an answer after which a store counts as slow."""

TROUBLE_S = 60.0
"""Seconds for which a problem of the store is reported after it was last seen."""


class StoreProblems:
    """The recent problems of a blob store, as a sentence. Pure: the caller passes monotonic seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, str]] = {}

    def note(self, kind: str, sentence: str, now: float) -> None:
        """Record a problem. While one of this kind lasts, its first sentence stays, so that it is one event."""
        self._seen = self._lasting(now)
        self._seen[kind] = now, self._seen[kind][1] if kind in self._seen else sentence

    def note_counters(self, counters: Mapping[str, int], more: Mapping[str, int], took_s: float, now: float) -> None:
        """Record what the counters of a store show. `more`: their increase since the last reading; `took_s`: how long
        the store took to answer."""
        if more["refused_full"]:
            sentence = (
                f"the blob store is full and refused {more['refused_full']} requests: of {counters['bound'] / 1e6:.0f} MB, "
                f"{counters['pinned'] / 1e6:.0f} MB are pinned and {counters['reserved'] / 1e6:.0f} MB reserved"
            )
            self.note("full", f"{sentence}; raise blob_gib of the node, or lower flow.groups_per_step", now)
        if more["failed_disk"]:
            self.note(
                "disk",
                f"the disk of the blob store failed {more['failed_disk']} requests; free space and check the disk",
                now,
            )
        if more["blobs_damaged"]:
            self.note("damaged", f"the blob store removed {more['blobs_damaged']} blobs whose bytes had changed", now)
        if took_s > SLOW_S:
            self.note("slow", f"the blob store took {took_s:.0f} s to answer", now)

    def sentence(self, now: float) -> str:
        """The problems of the last `TROUBLE_S` seconds; empty if there are none."""
        return "; ".join(sentence for _, sentence in self._lasting(now).values())

    def _lasting(self, now: float) -> dict[str, tuple[float, str]]:
        return {kind: seen for kind, seen in self._seen.items() if now - seen[0] < TROUBLE_S}


def counter_increase(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each counter has increased. A counter that is smaller than before has begun again at 0."""
    return {name: value - before.get(name, 0) if value >= before.get(name, 0) else value for name, value in now.items()}


class NodeBlobs:
    """The blob store of this node. `nodes`: returns the records of the cluster's nodes."""

    def __init__(
        self,
        config: NodeConfig,
        clock: Clock,
        nodes: Callable[[], Mapping[str, NodeRecord]],
        metrics: BlobMetrics,
        connector: Connector = PLAIN,
    ) -> None:
        self._config = config
        self._clock = clock
        self._nodes = nodes
        self._metrics = metrics
        self._connector = connector
        self._problems = StoreProblems()
        self._home = Path(config.home)
        self._needed = asyncio.Event()
        self._secret: bytes | None = None
        self._known = asyncio.Event()
        """Whether the secret is known."""
        self._serving = asyncio.Event()
        """Whether the process of the store accepts requests."""
        self._http: BlobHttp | None = None
        self._child: ChildProcess | None = None
        self._told: dict[str, str] = {}
        self._failure = ""
        """Why the process of the store failed; empty: it has not, since it was started."""
        self._found = {name for name in _folders_in(self.folder) | _folders_in(self._home / WORLDS) if name[0] != "."}
        """Jobs of which this node had blobs when the daemon started, without those that have ended."""
        self._listen_port = self._port() if can_serve() else 0
        scheme = "https" if connector.secure else "http"
        at = join_host_port(config.workers_listen_on, self._listen_port)
        self.address = f"{scheme}://{at}" if self._listen_port else ""
        """Base URL of the store, also before it runs; empty: packages are missing (gcore[vision])."""

    @property
    def node(self) -> str:
        """The name of this node."""
        return self._config.node

    @property
    def folder(self) -> Path:
        """The folder of the store."""
        return self._home / "blobs" / self._config.node

    def _port(self) -> int:
        """The port of the store: that of the last run, which train ranks know that outlived it. A new one if a process has
        taken that port, other than the store of the last run, which may still be ending."""
        file = self._home / "blobs" / f"{self._config.node}.port"
        with contextlib.suppress(OSError, ValueError, OverflowError):
            known, host = int(file.read_text()), self._config.workers_listen_on
            if not _is_taken(host, known) or is_in_use(self.folder) or not _is_taken(host, known):
                return known
            log.warning("another process uses port %d of the blob store, which gets a new one", known)
        with listen(self._config.workers_listen_on) as free:
            port = int(free.getsockname()[1])
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, str(port).encode())
        return port

    def need(self) -> None:
        """Start the store, if it does not run: a job of this node has pictures."""
        self._needed.set()

    async def run(self, store: Store) -> None:
        """Run the store from the time at which a job needs it; never returns."""
        await self._needed.wait()
        self._secret = await shared_secret(store, self._clock)
        self._known.set()
        failures = 0
        while True:
            began = self._clock.monotonic()
            self._failure = ""
            try:
                await self._run_once()
                reason = f" ({self._failure})" if self._failure else ""
                why = f"the process of the blob store ended{reason} and is started again"
            except GcoreError as error:
                why = f"the blob store cannot be started: {error}"
            log.warning("%s", why)
            self._problems.note("gone", why, self._clock.monotonic())
            self._metrics.count_blob_store_end()
            failures = 0 if self._clock.monotonic() - began > LASTING_S else failures + 1
            await self._clock.sleep(retry_delay(failures))

    async def _run_once(self) -> None:
        assert self._secret is not None
        config = self._config
        (self._home / WORLDS).mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            "kind": "blobs",
            "node": config.node,
            "folder": str(self.folder),
            "bound_bytes": config.blob_bytes,
            "secret": self._secret.hex(),
            "host": config.workers_listen_on,
            "port": self._listen_port,
            "nodes": self._others(),
            "link_roots": [str(self._home / WORLDS)],
        }
        if config.tls is not None:
            document["tls"] = {"ca": config.tls.ca, "cert": config.tls.cert, "key": config.tls.key}
        spec = LaunchSpec(
            instance=f"blobs-{config.node}",
            node=config.node,
            role="rollout",
            job_uid="",
            slot="",
            store=config.etcd,
            log_file=str(self._home / "logs" / f"blobs-{config.node}.log"),
            command=(sys.executable, *COMMAND),
            child=document,
        )
        child = await ChildProcess.start(spec)
        self._child, self._told = child, dict(document["nodes"])
        self._serving.clear()
        work = {"addresses of blob stores": self._tell(child), "counters of the blob store": self._read_counters()}
        tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
        try:
            await child.run(self._note)
        finally:
            self._child = None
            await cancel_all(tasks)

    def _note(self, event: WorkerEvent) -> None:
        if isinstance(event, ChildServes):
            self._serving.set()
        if isinstance(event, ChildFailed):
            self._failure = event.reason.rstrip(".")
            log.warning("the blob store failed: %s", event.reason)

    def _others(self) -> dict[str, str]:
        return {name: one.blobs for name, one in self._nodes().items() if one.blobs and name != self._config.node}

    async def _tell(self, child: ChildProcess) -> None:
        """Tell the store the addresses of the others whenever they change."""
        while True:
            if (others := self._others()) != self._told:
                self._told = others
                child.tell("nodes", nodes=others)
            await self._clock.sleep(1.0)

    async def _read_counters(self) -> None:
        """Read the counters of the store every `LOOK_S` seconds: for metrics, and for problems."""
        from gcore.media.client import read_counters

        before: Mapping[str, int] = {}
        await self._serving.wait()
        while True:
            await self._clock.sleep(LOOK_S)
            began = self._clock.monotonic()
            try:
                counters = await read_counters(self.address, self._connections())
            except StoreUnreachable as error:
                self._problems.note("slow", error.what, self._clock.monotonic())
                continue
            now, more = self._clock.monotonic(), counter_increase(before, counters)
            before = counters
            self._problems.note_counters(counters, more, now - began, now)
            worlds = await asyncio.to_thread(_bytes_below, self._home / WORLDS)
            self._metrics.show_blobs(counters, more, worlds)

    @property
    def trouble(self) -> str:
        """What is wrong with the store of this node, as a sentence; empty if nothing is."""
        return self._problems.sentence(self._clock.monotonic())

    def _connections(self) -> BlobHttp:
        from gcore.media.client import open_blob_http

        if self._http is None:
            self._http = open_blob_http(self._connector)
        return self._http

    async def wait_for_secret(self) -> None:
        """Wait until this node knows the secret, from which the keys of jobs are derived."""
        self.need()
        await self._known.wait()

    async def client(self, job: str, address: str = "") -> BlobClient:
        """The client of a store for one job. `address`: of the store; empty: this node's. Waits for the secret."""
        from gcore.media.client import BlobClient

        await self.wait_for_secret()
        return BlobClient(address or self.address, job, self.key_of(job), self._connections())

    async def client_of(self, job: str, node: str) -> BlobClient:
        """The client of a node's store for one job. Raises StoreUnreachable if the node has none."""
        record = self._nodes().get(node)
        if record is None or not record.blobs:
            raise StoreUnreachable(f"node {node} has no blob store")
        return await self.client(job, record.blobs)

    def job_folder(self, job: str) -> Path:
        """The folder of a job's blobs on this node, for its engines."""
        return self.folder / job

    async def find_lost(self, job: str, media: Sequence[Medium]) -> str | None:
        """The SHA-256 of a blob that is not in the folder of this node's store, or has another size there; None if there is none."""
        return await asyncio.to_thread(_find_lost, self.job_folder(job), media)

    def key_of(self, job: str) -> str:
        """The key of a job for blob stores. The secret must be known (`wait_for_secret`)."""
        assert self._secret is not None
        return job_key(self._secret, job)

    def of_rank(self, job: str, world: str, rank: int) -> RankBlobs:
        """Where a train rank of this node gets blobs. The secret must be known (`wait_for_secret`)."""
        from gcore.train.rank.launch import RankBlobs

        folder = self._home / WORLDS / job / f"{world}-{rank}"
        return RankBlobs(store=self.address, key=self.key_of(job), folder=str(folder))

    def nodes_with_stores(self) -> list[str]:
        """The nodes that have a blob store, this one included."""
        return sorted(name for name, record in self._nodes().items() if record.blobs)

    async def sweep_worlds(self, job: str, needed: Callable[[], Collection[str]]) -> None:
        """Delete the folders of a job's train worlds that no rank needs. `needed`: returns the names of the other
        worlds. It is called after the folders were listed, so that the folder of a new world is not deleted.
        """
        folder = self._home / WORLDS / job
        _, names, _ = await asyncio.to_thread(lambda: next(os.walk(folder), ("", [], [])))
        kept = needed()
        for name in names:
            if name.rpartition("-")[0] not in kept:
                await asyncio.to_thread(shutil.rmtree, folder / name, ignore_errors=True)

    async def forget(self, job: str) -> None:
        """Delete the blobs of a job that has ended, here and in the folders of its train worlds."""
        await asyncio.to_thread(shutil.rmtree, self._home / WORLDS / job, ignore_errors=True)
        if self._child is not None:
            with contextlib.suppress(GcoreError):
                return await (await self.client(job)).drop_job()
        await asyncio.to_thread(shutil.rmtree, self.job_folder(job), ignore_errors=True)  # the store does not run

    async def forget_ended(self, active: Collection[str]) -> None:
        """Delete the blobs of jobs that ended while this daemon did not run. `active`: the jobs that have not ended."""
        ended = self._found - set(active)
        self._found -= ended
        for job in sorted(ended):
            await self.forget(job)

    async def locate(self, job: str, blobs: Sequence[str]) -> Mapping[str, Collection[str]]:
        """The nodes whose stores have each blob. Nodes that do not answer, or cannot read a blob, are left out."""
        found: dict[str, set[str]] = {blob: set() for blob in blobs}
        for name, record in self._nodes().items():
            if record.blobs:
                client = await self.client(job, record.blobs)
                with contextlib.suppress(StoreUnreachable):
                    for blob in blobs:
                        try:
                            await client.stat(blob)
                        except StoreUnreachable:
                            raise
                        except GcoreError as error:
                            if not isinstance(error, BlobMissing):
                                log.warning("the blob store of %s cannot send blob %s: %s", name, blob, error)
                        else:
                            found[blob].add(name)
        return found


def _is_taken(host: str, port: int) -> bool:
    """Whether a process listens at the port. Raises OSError for an unusable host."""
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return True
    return False


def _find_lost(folder: Path, media: Iterable[Medium]) -> str | None:
    for one in media:
        try:
            size = (folder / blob_path(one.sha256)).stat().st_size
        except OSError:
            return one.sha256
        if size != one.size:
            return one.sha256
    return None


def _folders_in(folder: Path) -> set[str]:
    """The names of the folders in a folder; empty if it does not exist."""
    _, names, _ = next(os.walk(folder), ("", [], []))
    return set(names)


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder. Files and folders that are deleted meanwhile are left out."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(path, name)).st_size
    return total


def can_serve() -> bool:
    """Whether the packages of gcore[vision] are installed on this node."""
    return all(importlib.util.find_spec(name) is not None for name in ("PIL", "starlette", "uvicorn"))


async def shared_secret(store: Store, clock: Clock) -> bytes:
    """The secret from which the keys of blob stores are derived: created by the first controller that needs it."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            known = await store.get(keys.BLOB_SECRET)
            if known is not None:
                return known.value
            new = secrets.token_bytes(SECRET_BYTES)
            if (await store.transact((Compare(keys.BLOB_SECRET, 0),), (Put(keys.BLOB_SECRET, new),))).won:
                return new
        await clock.sleep(0.5)
