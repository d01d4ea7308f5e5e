"""All wiring: which parts a daemon is made of, and who knows whom.

What only jobs need (data, tokens, engines' clients) is imported with the first job, in a thread, so that a daemon without
one is small and quickly there, and its lease is renewed meanwhile.
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
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.footprint import give_back
from controllers.identity import Identity, new_incarnation
from controllers.keeper import STOPPING, Keeper
from controllers.leaving import LEAVE_WITHIN_S
from controllers.own_files import OwnFolders
from controllers.retaking import work_on
from controllers.service.capability import most_slots
from controllers.service.files import FilesService
from controllers.service.jobs import JobsService
from controllers.service.records import OwnStorage, StoredJobs
from controllers.versions import version_for
from gcore.api.v1 import files_pb2_grpc, jobs_pb2_grpc
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.errors import LeaseLost, StoreUnavailable, UsageError
from gcore.fault_points import At, point
from gcore.ledger.job import NodeRecord
from gcore.metrics import Metrics, serve_metrics
from gcore.rpc_schema import VersionGate
from gcore.schema import NEWEST_VERSION, SCHEMA_VERSION, speak, spoken
from gcore.store import keys
from gcore.store.client import EtcdStore
from gcore.store.measured import MeasuredStore
from gcore.store.server_version import doubt
from gcore.store.session import Session
from gcore.store.types import Compare, Put, Store
from gcore.weights.copies import sweep_memory
from gcore.worker.process import send_signal

if TYPE_CHECKING:
    from controllers.job import JobRunner
    from controllers.service.submission import Submissions

log = logging.getLogger(__name__)

RETRY_S = 0.5
LEAVE_LOOK_S = 0.05


WAITS_FOR_ANOTHER = (
    "%s is registered by another life of it, under lease %x, whose end is waited for; if it does not end, another daemon "
    "has this node's name"
)


class Daemon:
    """A node's controller."""

    def __init__(self, config: NodeConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._metrics = Metrics()
        self._runners: dict[str, JobRunner] = {}
        self._health = health.HealthServicer()
        self._keeper: Keeper | None = None
        self._folders = OwnFolders()
        self._spoken = 0
        """The schema version that is written; 0: it is not known yet which everybody reads."""

    async def run(self) -> None:
        """Serve until cancelled."""
        config = self._config
        metrics = serve_metrics(self._metrics, config.listen_host, config.metrics_port)
        lease = config.lease_times
        etcd = await EtcdStore.connect(config.etcd_endpoints, clock=self._clock, lease_call_s=lease.call_s)
        store = MeasuredStore(etcd, self._metrics, self._clock)
        server, address = await self._serve(store)
        log.info("%s answers on %s, metrics on %s", config.node, address, metrics.address)
        try:
            async with asyncio.TaskGroup() as group:
                if config.local_cluster:
                    self._keeper = Keeper(config, store, self._clock)
                    group.create_task(self._keeper.run(), name="keeper")
                else:
                    group.create_task(self._doubt(etcd), name="etcd's version")
                while True:
                    await self._life(store, address, metrics.address)
        finally:
            await server.stop(grace=0.5)
            metrics.close()
            await store.close()

    async def _doubt(self, store: EtcdStore) -> None:
        """Warn, once, of an etcd that is known to lose data. Whoever runs the local cluster's was told by `doctor`."""
        while not (versions := await store.versions()):
            await self._clock.sleep(RETRY_S)
        if sentence := doubt(versions):
            log.warning("%s", sentence)

    async def depart(self) -> None:
        """Hand over what the jobs' runners have, for a bounded time; at once if the whole local cluster is being ended."""
        runners = list(self._runners.values())
        for runner in runners:
            runner.leave()
        end = self._clock.monotonic() + LEAVE_WITHIN_S
        stopping = Path(self._config.home) / STOPPING
        while self._clock.monotonic() < end and not (self._config.local_cluster and stopping.exists()):
            if all(runner.has_handed_over for runner in runners):
                log.info("handed over")
                return
            await self._clock.sleep(LEAVE_LOOK_S)

    async def _serve(self, store: Store) -> tuple[grpc.aio.Server, str]:
        config = self._config
        server = grpc.aio.server(interceptors=[VersionGate()], options=[("grpc.so_reuseport", 0)])
        jobs = StoredJobs(store, OwnStorage(config.node, Path(config.run_root), self._folders))

        async def submissions() -> Submissions:
            await asyncio.to_thread(importlib.import_module, "controllers.service.submission")
            from controllers.service.submission import Submissions

            cache, slots = Path(config.home) / "cache", functools.partial(most_slots, config)
            return Submissions(store, jobs, Path(config.run_root), cache, self._clock, slots)

        service = JobsService(jobs, submissions, self._runners.get, self._clock, self._trouble)
        jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
        files_pb2_grpc.add_FilesServicer_to_server(FilesService(jobs.own_folder, self._trouble), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = server.add_insecure_port(f"{config.listen_host}:{config.listen_port}")
        except RuntimeError as error:
            raise UsageError(
                f"cannot listen on {config.listen_host}:{config.listen_port}: the port is in use, or the address is not this machine's",
                fix="Choose another port in the configuration",
            ) from error
        await server.start()
        return server, f"{config.listen_host}:{port}"

    def _trouble(self) -> str:
        return self._keeper.trouble if self._keeper is not None else ""

    async def _life(self, store: Store, address: str, metrics_address: str) -> None:
        """One incarnation: from a granted lease to its loss."""
        config = self._config
        incarnation = new_incarnation(config.node)
        try:
            lease = config.lease_times
            session = await Session.open(store, ttl=lease.ttl_s, interval_s=lease.tick_s, clock=self._clock)
        except StoreUnavailable as error:
            log.warning("%s", error)
            await self._clock.sleep(RETRY_S)
            return
        identity = Identity(config.node, incarnation, address, session.lease)
        log.info("%s begins", incarnation)
        changes = Changes()
        cluster = ClusterMirror(store, changes)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.run(), name="lease")
                group.create_task(cluster.watch_nodes(), name="watch nodes")
                group.create_task(cluster.watch_workers(), name="watch workers")
                group.create_task(cluster.watch_schemas(), name="watch schemas")
                group.create_task(cluster.watch_active(), name="watch jobs")
                group.create_task(self._register(store, identity, metrics_address, cluster, changes), name="register")
                group.create_task(self._run_jobs(store, identity, cluster, changes), name="jobs")
        except* LeaseLost:
            log.warning("%s lost its lease; a new incarnation begins", incarnation)
        finally:
            self._runners.clear()
            await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            # On a clean end peers need not wait for the lease to run out.
            with contextlib.suppress(StoreUnavailable):
                await session.close()

    async def _register(
        self, store: Store, identity: Identity, metrics_address: str, cluster: ClusterMirror, changes: Changes
    ) -> None:
        """Put the node's registration in place, after an earlier life's has gone; then say that the daemon is ready.

        It is written anew when another schema version is spoken: the version after that must be able to read it.
        """
        config = self._config
        record = NodeRecord(
            name=config.node,
            incarnation=identity.incarnation,
            address=identity.address,
            metrics_address=metrics_address,
            slots=config.slots,
            pid=os.getpid(),
            started=self._clock.wall(),
            sglang=config.sglang_python is not None,
        )
        key = keys.node(config.node)
        # First of all who else is there, and in which version they are to be spoken to.
        await changes.until(lambda: cluster.is_complete)
        self._speak(cluster)
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
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        written = spoken()
        while True:
            await changes.until(functools.partial(_speaks_other_than, written))
            with contextlib.suppress(StoreUnavailable):
                own = await store.get(key)
                compare = Compare(key, own.mod_revision if own is not None else 0)
                version = spoken()
                if (await store.transact((compare,), (Put(key, record.encode(), lease=identity.lease),))).won:
                    written = version
                    continue
            await self._clock.sleep(RETRY_S)

    async def _run_jobs(self, store: Store, identity: Identity, cluster: ClusterMirror, changes: Changes) -> None:
        """A runner for every job that has not ended; workers of jobs that have are stopped."""
        # A job looked at before the workers were heard of would seem to have lost all of them.
        await changes.until(lambda: cluster.is_complete)
        running: dict[str, asyncio.Task[None]] = {}
        asked: set[str] = set()
        swept: frozenset[str] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                if self._speak(cluster):
                    changes.notify()
                self._forget_ended(running, cluster)
                self._show(cluster)
                if cluster.active - running.keys():
                    await asyncio.to_thread(importlib.import_module, "controllers.job")
                for uid in cluster.active - running.keys():
                    begin = functools.partial(self._begin, uid, store, identity, cluster)
                    is_active = functools.partial(_is_active, cluster, uid)
                    running[uid] = group.create_task(work_on(begin, is_active, changes), name=f"job {uid}")
                    running[uid].add_done_callback(lambda _: changes.notify())
                self._notify_runners()
                self._sweep(cluster, asked)
                if swept != cluster.active:
                    swept = cluster.active
                    memory = Path(self._config.memory_dir)
                    await asyncio.to_thread(sweep_memory, memory, self._config.home, self._config.node, swept)
                await changes.wait()

    def _speak(self, cluster: ClusterMirror) -> bool:
        """Write what every node of the cluster reads; whether that is another version than before. Never an older one: what
        stands there could not be taken back, and that a node is heard of before what it reads is no reason."""
        version = version_for(cluster.nodes.keys() - {self._config.node}, cluster.reads)
        if version <= self._spoken:
            return False
        speak(version)
        log.info("writes schema version %d of %d from now on", version, NEWEST_VERSION)
        self._spoken = version
        return True

    # Small methods on purpose: a variable of the loop above would keep the last job's memory.

    def _begin(self, uid: str, store: Store, identity: Identity, cluster: ClusterMirror) -> JobRunner:
        new = self._runners[uid] = self._new_runner(uid, store, identity, cluster)
        return new

    def _new_runner(self, uid: str, store: Store, identity: Identity, cluster: ClusterMirror) -> JobRunner:
        from controllers.job import JobRunner

        return JobRunner(
            uid, identity, store, cluster, Changes(), self._metrics, self._clock, self._config, self._folders
        )

    def _show(self, cluster: ClusterMirror) -> None:
        mine = [worker for worker in cluster.workers.values() if worker.node == self._config.node]
        self._metrics.show_cluster(len(cluster.nodes), Counter((worker.role, worker.state) for worker in mine))

    def _notify_runners(self) -> None:
        for runner in self._runners.values():
            runner.changes.notify()

    def _forget_ended(self, running: dict[str, asyncio.Task[None]], cluster: ClusterMirror) -> None:
        ended = [uid for uid, task in running.items() if task.done() and uid not in cluster.active]
        for uid in ended:
            del running[uid]
            self._runners.pop(uid, None)
        if ended:
            give_back()

    def _sweep(self, cluster: ClusterMirror, asked: set[str]) -> None:
        """Stop this node's workers of jobs that have ended, once: asked twice, a worker does not drain."""
        asked &= cluster.workers.keys()
        for worker in cluster.workers.values():
            ended = worker.job_uid not in cluster.active
            good = worker.state in ("starting", "serving") and worker.instance not in asked
            if worker.node == self._config.node and ended and good:
                asked.add(worker.instance)
                log.info("stop %s: its job has ended", worker.instance)
                send_signal(worker.process, signal.SIGTERM)


def _is_active(cluster: ClusterMirror, uid: str) -> bool:
    return uid in cluster.active


def _speaks_other_than(version: int) -> bool:
    return spoken() != version
