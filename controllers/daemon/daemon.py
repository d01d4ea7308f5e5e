"""The daemon of a node: builds its parts and connects them.

`controllers.daemon.incarnation` contains what a daemon may do only while it has a lease. `ServiceNotifier` reports the
daemon's state to the health service and to systemd; `watch_certificates` exports as metrics when certificates expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from controllers.api.edge.access import AccessService
from controllers.api.edge.gate import AccessGate
from controllers.api.edge.server import (
    CallCounter,
    CallLimiter,
    HealthService,
    StreamLimiter,
    add_reflection,
    new_server,
)
from controllers.api.jobs import JobsService
from controllers.api.peers import FilesService, PlacementService
from controllers.api.store_reader import LocalStorage, StoreReader
from controllers.daemon.incarnation import RETRY_S, Addresses, DaemonState, Incarnation, import_in_thread
from controllers.daemon.keeper import STOPPING, ProcessKeeper
from controllers.daemon.security import Security, request_caller
from controllers.storage.garbage import GarbageCollector
from controllers.telemetry.gauges import watch_members
from controllers.web.app import PageApp
from gcore.api.rpc import VersionGate
from gcore.api.tls import ReloadingFiles
from gcore.api.v1 import access_pb2_grpc, files_pb2_grpc, jobs_pb2_grpc, placement_pb2_grpc
from gcore.config.local_cluster import LocalClusterState, read_owner_key
from gcore.config.node import NodeConfig
from gcore.errors import GcoreError, UsageError
from gcore.observability.metrics import InstrumentedStore, Metrics
from gcore.store.client import EtcdStore
from gcore.store.etcd import version_warning
from gcore.store.reference import StoreRef, connect_store, store_certificate_expiries, tls_endpoints
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.daemon import ServiceManager
from gcore.system.memory import trim_memory

if TYPE_CHECKING:
    from controllers.api.submission.submit import Submitter
    from controllers.web.content import PageContent

LEAVE_WITHIN_S = 8.0
"""Maximum seconds of the hand-over. Service managers often kill a process ten seconds after SIGTERM."""

FED_PER_LIMIT = 3.0
"""Number of messages to systemd's watchdog within its limit, so that one may be late."""

LOOK_EVERY_S = 60.0
"""Seconds between two readings of the certificates."""

log = logging.getLogger(__name__)

LEAVE_LOOK_S = 0.05


class Daemon:
    """A node's controller: serves the API, the metrics and the page, and runs one incarnation after the other."""

    def __init__(self, config: NodeConfig, clock: Clock, manager: ServiceManager | None = None) -> None:
        """`manager`: the service manager that started this process; None: there is none."""
        self._config = config
        self._clock = clock
        self._security = Security.of(config, clock)
        self._own = DaemonState(config, clock, connector=self._security.connector)
        self._health = HealthService()
        self._notifying = ServiceNotifier(manager or ServiceManager(), self._set_health, clock)
        self._keeper: ProcessKeeper | None = None
        self.reloads: list[Callable[[], None]] = [self._security.reload]
        """Functions that reload files at SIGHUP. Each raises GcoreError if it cannot, and keeps the old contents."""

    async def run(self) -> None:
        """Run the daemon until cancelled."""
        config = self._config
        lease = config.lease_times
        etcd = await connect_store(config.etcd, self._clock, lease.call_s)
        store = InstrumentedStore(etcd, self._own.metrics, self._clock)
        storage = LocalStorage(config.node, Path(config.run_root), self._own.folders)
        jobs = StoreReader(store, storage, lambda: self._own.cluster)

        def page_content() -> PageContent:
            from controllers.web import content  # at the first request, because a daemon without a job should be small

            return content.PageContent(config.node, jobs, self._own.runners.get, self._clock)

        page = PageApp(page_content, asyncio.get_running_loop(), request_caller)
        metrics = self._security.serve_http(self._own.metrics, config, page)
        server, address, for_peers = await self._serve(store, jobs)
        addresses = Addresses(address, metrics.address, for_peers)
        log.info("%s answers on %s, metrics and a page on %s", config.node, address, metrics.address)
        trim_memory()  # releases memory that imports have freed
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_members(etcd.standing, self._own.metrics, self._clock), name="store's size")
                group.create_task(self._notifying.feed_watchdog(), name="watchdog")
                group.create_task(self._own.blobs.run(store), name="blob store")
                group.create_task(GarbageCollector(config, store, self._clock).run(), name="clearing")
                if (watched := self._security.watched) is not None or tls_endpoints(config.etcd):
                    looking = watch_certificates(watched, config.etcd, self._own.metrics, self._clock)
                    group.create_task(looking, name="certificates")
                if config.local_cluster:
                    self._keeper = ProcessKeeper(Path(config.home), config.node, store, self._clock)
                    group.create_task(self._keeper.run(), name="keeper")
                else:
                    group.create_task(self._doubt(etcd), name="etcd's version")
                if config.tells_apart:
                    group.create_task(self._security.authenticator.watch(store), name="tokens")
                while True:
                    await Incarnation(self._own, store, addresses, self._notifying.say).run()
        finally:
            await server.stop(grace=0.5)
            metrics.close()
            self._security.journal.close()
            await store.close()
            if self._own.traces is not None:
                await asyncio.to_thread(self._own.traces.close)

    async def depart(self) -> None:
        """Hand over the work on all jobs to other daemons, within `LEAVE_WITHIN_S`. If the whole local cluster is
        stopping, only wait for slot accounting."""
        runners = list(self._own.runners.values())
        await self._notifying.stopping(f"handing over {len(runners)} jobs" if runners else "stopping")
        for runner in runners:
            runner.leave()
        end = self._clock.monotonic() + LEAVE_WITHIN_S
        stopping = Path(self._config.home) / STOPPING
        while self._clock.monotonic() < end:
            if self._config.local_cluster and stopping.exists() and not any(runner.is_ending for runner in runners):
                return
            if all(runner.has_handed_over for runner in runners):
                log.info("handed over")
                return
            await self._clock.sleep(LEAVE_LOOK_S)

    def reload(self) -> None:
        """Reload certificates (SIGHUP)."""
        self._notifying.reloading()
        problems = []
        for again in self.reloads:
            try:
                again()
            except GcoreError as error:
                problems.append(str(error))
        for problem in problems:
            log.error("reload failed, the old files stay in use: %s", problem)
        self._notifying.reloaded("; ".join(problems) or "reloaded its files")

    async def _doubt(self, store: EtcdStore) -> None:
        """Log a warning if etcd has a version that is known to lose data. For a local cluster, `gcore doctor` reports
        it."""
        while not (versions := await store.versions()):
            await self._clock.sleep(RETRY_S)
        if sentence := version_warning(versions):
            log.warning("%s", sentence)

    async def _serve(self, store: Store, jobs: StoreReader) -> tuple[grpc.aio.Server, str, str]:
        config = self._config
        counted = CallCounter(self._own.metrics, self._clock)
        gate = AccessGate(self._security.authenticator, self._security.journal, CallLimiter(config.api.calls))
        server = new_server([counted, gate, VersionGate()], config.api)

        async def submissions() -> Submitter:
            await import_in_thread("controllers.api.submission.submit")
            from controllers.api.submission.allowlist import Allowlist
            from controllers.api.submission.submit import Submitter

            cache, slots = Path(config.home) / "cache", functools.partial(most_slots, config)
            allowed = Allowlist.of(config)
            run_root, local = Path(config.run_root), config.local_cluster
            key = read_owner_key(Path(config.home)) if local and not config.tells_apart else ""
            return Submitter(
                store, jobs, run_root, cache, self._clock, slots, local=local, allowed=allowed, owner_key=key
            )

        room = StreamLimiter(config.api.streams)
        service = JobsService(jobs, submissions, self._own.runners.get, self._clock, self._trouble, room)
        jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
        placement = PlacementService(self._own.runners.get, self._trouble)
        placement_pb2_grpc.add_PlacementServicer_to_server(placement, server)
        files = FilesService(jobs.own_folder, self._trouble, StreamLimiter(config.api.streams))
        files_pb2_grpc.add_FilesServicer_to_server(files, server)
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(store, self._clock, self._trouble), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        add_reflection(server, config.api)
        address, for_peers = self._security.listen(server, config)
        await server.start()
        return server, address, for_peers

    async def _set_health(self, ready: bool) -> None:
        self._own.metrics.ready.set(float(ready))
        self._health.set(serving=ready)

    def _trouble(self) -> str:
        return self._keeper.trouble if self._keeper is not None else ""


class ServiceNotifier:
    """Reports to the health service and to systemd (`manager`) whether the daemon can work. `health`: sets the status
    of the health service.

    The daemon is *ready* while its lease is certainly valid (so the store was reached) and its node is registered;
    `controllers.daemon.incarnation` determines that. The health service then returns SERVING, otherwise NOT_SERVING.
    systemd gets READY when the daemon becomes ready for the first time (it has no message for the opposite, only a
    status line), and a message when the daemon stops or reloads its certificates. The event loop sends the messages to
    the watchdog, so systemd kills and restarts a daemon whose event loop hangs; its workers keep running.
    """

    def __init__(self, manager: ServiceManager, health: Callable[[bool], Awaitable[None]], clock: Clock) -> None:
        self._manager = manager
        self._health = health
        self._clock = clock
        self._reported_ready = False
        self._stopping = False
        self.ready = False
        """Whether the daemon can work, as last reported."""

    async def say(self, ready: bool, status: str) -> None:
        """Report whether the daemon can work, with a sentence for users."""
        self.ready = ready and not self._stopping
        await self._health(self.ready)
        if self._stopping:
            return
        if ready and not self._reported_ready:
            self._reported_ready = True
            self._manager.tell("READY=1", f"STATUS={status}")
        else:
            self._manager.tell(f"STATUS={status}")

    async def stopping(self, status: str) -> None:
        """Report that the daemon is ending and accepts no more calls."""
        self._stopping = True
        self._manager.tell("STOPPING=1", f"STATUS={status}")
        await self.say(False, status)

    def reloading(self) -> None:
        """Report that the daemon reloads its files; `reloaded` follows."""
        if self._reported_ready and not self._stopping:
            micros = int(self._clock.monotonic() * 1e6)
            self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={micros}")

    def reloaded(self, status: str) -> None:
        """Report that the reload has ended. `status`: its result as a sentence."""
        if self._reported_ready and not self._stopping:
            self._manager.tell("READY=1", f"STATUS={status}")

    async def feed_watchdog(self) -> None:
        """Send messages to systemd's watchdog; never returns, unless there is no watchdog."""
        limit = self._manager.watchdog_s
        while limit is not None:
            self._manager.tell("WATCHDOG=1")
            await self._clock.sleep(limit / FED_PER_LIMIT)


async def watch_certificates(watched: ReloadingFiles | None, store: StoreRef, metrics: Metrics, clock: Clock) -> None:
    """Export as metrics when the certificates of the daemon and of the store's members expire; never returns.

    With expired certificates, daemons cannot communicate. Certificates are read every `LOOK_EVERY_S`, because files are
    replaced while a daemon runs. This function renews nothing. `watched`: the certificate that the daemon serves with.
    """
    while True:
        metrics.certificate_ends.set(min(own_certificate_expiries(watched, store), default=0.0))
        metrics.show_store_certificates(await store_certificate_expiries(store))
        await clock.sleep(LOOK_EVERY_S)


def own_certificate_expiries(watched: ReloadingFiles | None, store: StoreRef) -> Iterator[float]:
    """Yield when the certificates of this process expire (seconds since the epoch): the one that it serves with, and
    its client certificate for the store. A file that cannot be read is left out."""
    if watched is not None and (pem := watched.pem.cert) is not None:
        yield certificate_expiry(pem)
    if store.tls is not None and store.tls.cert is not None:
        with contextlib.suppress(OSError, UsageError):
            yield certificate_expiry(Path(store.tls.cert).read_bytes())


def certificate_expiry(pem: bytes) -> float:
    """When a certificate expires, in seconds since the epoch. Raises UsageError."""
    from gcore.api.authority import read_certificate

    return read_certificate(pem).ends.timestamp()


def most_slots(config: NodeConfig) -> int | None:
    """The maximum number of slots that the cluster can have: that of a local cluster is fixed at its start; other
    clusters may grow (None)."""
    local = LocalClusterState.load(Path(config.home)) if config.local_cluster else None
    return None if local is None else len(local.slots)
