"""One life of a daemon, which is one incarnation: from a granted lease to its loss.

It registers its node, listens to who else is there and which jobs have not ended, and has a runner for each of these. What only
jobs need (data, tokens, engines' clients) is imported with the first job, in a thread, so that a daemon without one is small
and quickly there, and its lease is renewed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.footprint import give_back
from controllers.identity import Identity, new_incarnation
from controllers.machine import node_facts
from controllers.own_files import OwnFolders
from controllers.retaking import work_on
from controllers.versions import version_for
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.fault_points import At, point
from gcore.ledger.facts import NodeFacts
from gcore.ledger.job import NodeRecord
from gcore.metrics import Metrics
from gcore.schema import NEWEST_VERSION, SCHEMA_VERSION, speak, spoken
from gcore.store import keys
from gcore.store.session import Session
from gcore.store.types import Compare, Put, Store
from gcore.weights.copies import sweep_memory
from gcore.worker.process import send_signal

if TYPE_CHECKING:
    from controllers.job import JobRunner

log = logging.getLogger(__name__)

RETRY_S = 0.5
WAITS_FOR_ANOTHER = (
    "%s is registered by another life of it, under lease %x, whose end is waited for; if it does not end, another daemon "
    "has this node's name"
)


@dataclass
class Belongings:
    """What a daemon keeps from one life to the next."""

    config: NodeConfig
    clock: Clock
    metrics: Metrics = field(default_factory=Metrics)
    folders: OwnFolders = field(default_factory=OwnFolders)
    runners: dict[str, JobRunner] = field(default_factory=dict)
    """Of the jobs that this life works on, by uid."""
    spoken: int = 0
    """The schema version that is written; 0: it is not known yet which everybody reads."""
    facts: NodeFacts | None = None
    """What the node is."""
    looked: bool = False
    """Whether that was looked at: once."""


class Life:
    """Of one daemon. `address` and `metrics_address` are told to everybody; `ready` is called when that has been done, and when
    it is over."""

    def __init__(
        self,
        own: Belongings,
        store: Store,
        address: str,
        metrics_address: str,
        ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._own = own
        self._config = own.config
        self._clock = own.clock
        self._store = store
        self._address = address
        self._metrics_address = metrics_address
        self._ready = ready
        self._changes = Changes()
        self._cluster = ClusterMirror(store, self._changes)

    async def run(self) -> None:
        """Until the lease is lost, or could not be had."""
        try:
            lease = self._config.lease_times
            session = await Session.open(self._store, ttl=lease.ttl_s, interval_s=lease.tick_s, clock=self._clock)
        except StoreUnavailable as error:
            log.warning("%s", error)
            await self._clock.sleep(RETRY_S)
            return
        identity = Identity(self._config.node, new_incarnation(self._config.node), self._address, session.lease)
        log.info("%s begins", identity.incarnation)
        cluster = self._cluster
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.run(), name="lease")
                group.create_task(cluster.watch_nodes(), name="watch nodes")
                group.create_task(cluster.watch_workers(), name="watch workers")
                group.create_task(cluster.watch_schemas(), name="watch schemas")
                group.create_task(cluster.watch_active(), name="watch jobs")
                group.create_task(self._register(identity), name="register")
                group.create_task(self._run_jobs(identity), name="jobs")
        except* LeaseLost:
            log.warning("%s lost its lease; a new incarnation begins", identity.incarnation)
        finally:
            self._own.runners.clear()
            await self._ready(False)
            # On a clean end peers need not wait for the lease to run out.
            with contextlib.suppress(StoreUnavailable):
                await session.close()

    async def _register(self, identity: Identity) -> None:
        """Put the node's registration in place, after an earlier life's has gone; then say that the daemon is ready.

        It is written anew when another schema version is spoken: the version after that must be able to read it.
        """
        config, store = self._config, self._store
        if not self._own.looked:
            self._own.facts, self._own.looked = await node_facts(config.slots, config.host_memory_gib), True
        record = NodeRecord(
            name=config.node,
            incarnation=identity.incarnation,
            address=identity.address,
            metrics_address=self._metrics_address,
            slots=config.slots,
            pid=os.getpid(),
            started=self._clock.wall(),
            sglang=config.sglang_python is not None,
            facts=self._own.facts,
        )
        key = keys.node(config.node)
        # First of all who else is there, and in which version they are to be spoken to.
        await self._changes.until(lambda: self._cluster.is_complete)
        self._speak()
        waited_for = 0
        reads = Put(keys.schema(config.node), str(SCHEMA_VERSION).encode(), lease=identity.lease)
        while True:
            with contextlib.suppress(StoreUnavailable):
                put = Put(key, record.encode(), lease=identity.lease)
                point(At.NODE, "before")
                result = await store.transact((Compare(key, 0),), (put, reads))
                point(At.NODE, "after")
                if result.won:
                    break
                holder = await store.get(key)
                if holder is not None and holder.lease == identity.lease:
                    break
                if holder is not None and holder.lease != waited_for:
                    waited_for = holder.lease
                    log.warning(WAITS_FOR_ANOTHER, config.node, waited_for)
            await self._clock.sleep(RETRY_S)
        await self._ready(True)
        written = spoken()
        while True:
            await self._changes.until(functools.partial(_speaks_other_than, written))
            with contextlib.suppress(StoreUnavailable):
                own = await store.get(key)
                compare = Compare(key, own.mod_revision if own is not None else 0)
                version = spoken()
                if (await store.transact((compare,), (Put(key, record.encode(), lease=identity.lease),))).won:
                    written = version
                    continue
            await self._clock.sleep(RETRY_S)

    def _speak(self) -> bool:
        """Write what every node of the cluster reads; whether that is another version than before. Never an older one: what
        stands there could not be taken back, and that a node is heard of before what it reads is no reason."""
        version = version_for(self._cluster.nodes.keys() - {self._config.node}, self._cluster.reads)
        if version <= self._own.spoken:
            return False
        speak(version)
        log.info("writes schema version %d of %d from now on", version, NEWEST_VERSION)
        self._own.spoken = version
        return True

    async def _run_jobs(self, identity: Identity) -> None:
        """A runner for every job that has not ended; workers of jobs that have are stopped."""
        cluster = self._cluster
        # A job looked at before the workers were heard of would seem to have lost all of them.
        await self._changes.until(lambda: cluster.is_complete)
        running: dict[str, asyncio.Task[None]] = {}
        asked: set[str] = set()
        swept: frozenset[str] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                if self._speak():
                    self._changes.notify()
                self._forget_ended(running)
                self._show()
                if cluster.active - running.keys():
                    await asyncio.to_thread(importlib.import_module, "controllers.job")
                for uid in cluster.active - running.keys():
                    begin = functools.partial(self._begin, uid, identity)
                    is_active = functools.partial(self._is_active, uid)
                    running[uid] = group.create_task(work_on(begin, is_active, self._changes), name=f"job {uid}")
                    running[uid].add_done_callback(lambda _: self._changes.notify())
                for runner in self._own.runners.values():
                    runner.changes.notify()
                self._sweep(asked)
                if swept != cluster.active:
                    swept = cluster.active
                    memory = Path(self._config.memory_dir)
                    await asyncio.to_thread(sweep_memory, memory, self._config.home, self._config.node, swept)
                await self._changes.wait()

    # Small methods on purpose: a variable of the loop above would keep the last job's memory.

    def _begin(self, uid: str, identity: Identity) -> JobRunner:
        new = self._own.runners[uid] = self._new_runner(uid, identity)
        return new

    def _new_runner(self, uid: str, identity: Identity) -> JobRunner:
        from controllers.job import JobRunner

        own = self._own
        return JobRunner(
            uid, identity, self._store, self._cluster, Changes(), own.metrics, self._clock, self._config, own.folders
        )

    def _is_active(self, uid: str) -> bool:
        return uid in self._cluster.active

    def _show(self) -> None:
        cluster = self._cluster
        mine = [worker for worker in cluster.workers.values() if worker.node == self._config.node]
        self._own.metrics.show_cluster(len(cluster.nodes), Counter((worker.role, worker.state) for worker in mine))

    def _forget_ended(self, running: dict[str, asyncio.Task[None]]) -> None:
        ended = [uid for uid, task in running.items() if task.done() and not self._is_active(uid)]
        for uid in ended:
            del running[uid]
            self._own.runners.pop(uid, None)
        if ended:
            give_back()

    def _sweep(self, asked: set[str]) -> None:
        """Stop this node's workers of jobs that have ended, once: asked twice, a worker does not drain."""
        workers = self._cluster.workers
        asked &= workers.keys()
        for worker in workers.values():
            good = worker.state in ("starting", "serving") and worker.instance not in asked
            if worker.node == self._config.node and not self._is_active(worker.job_uid) and good:
                asked.add(worker.instance)
                log.info("stop %s: its job has ended", worker.instance)
                send_signal(worker.process, signal.SIGTERM)


def _speaks_other_than(version: int) -> bool:
    return spoken() != version
