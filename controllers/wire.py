"""All wiring: which parts a daemon is made of, and who knows whom. What a daemon does with a lease is `controllers.life`'s."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2_grpc

from controllers.belongings import Addresses, Belongings
from controllers.certificate_gauge import watch_certificates
from controllers.clearing import Clearing
from controllers.http_gate import whose
from controllers.importing import imported
from controllers.keeper import STOPPING, Keeper
from controllers.leaving import LEAVE_WITHIN_S
from controllers.life import RETRY_S, Life
from controllers.notifying import Notifying
from controllers.page.app import PageApp
from controllers.page.shown import Shown
from controllers.securing import Security
from controllers.service.capability import most_slots
from controllers.service.counted_calls import CountedCalls
from controllers.service.files import FilesService
from controllers.service.gate import AccessGate
from controllers.service.health import HealthService
from controllers.service.jobs import JobsService
from controllers.service.placement import PlacementService
from controllers.service.records import OwnStorage, StoredJobs
from controllers.service.room import CallRoom, StreamRoom
from controllers.service.serving import new_server, reflect
from controllers.service.tokens import AccessService
from controllers.store_gauges import watch_members
from gcore.api.v1 import access_pb2_grpc, files_pb2_grpc, jobs_pb2_grpc, placement_pb2_grpc
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.errors import GcoreError
from gcore.rpc_schema import VersionGate
from gcore.store.client import EtcdStore
from gcore.store.connecting import connect
from gcore.store.measured import MeasuredStore
from gcore.store.server_version import doubt
from gcore.store.shown_certificates import secured
from gcore.store.types import Store
from gcore.systemd import ServiceManager

if TYPE_CHECKING:
    from controllers.service.checked_lately import CheckedLately
    from controllers.service.submission import Submissions

log = logging.getLogger(__name__)

LEAVE_LOOK_S = 0.05


class Daemon:
    """A node's controller."""

    def __init__(self, config: NodeConfig, clock: Clock, manager: ServiceManager | None = None) -> None:
        """`manager`: who started this process and wants to hear of it; None: nobody."""
        self._config = config
        self._clock = clock
        self._security = Security.of(config, clock)
        self._own = Belongings(config, clock, connector=self._security.connector)
        self._health = HealthService()
        self._notifying = Notifying(manager or ServiceManager(), self._set_health, clock)
        self._keeper: Keeper | None = None
        self.reloads: list[Callable[[], None]] = [self._security.reload]
        """What reads anew the files that it was told to read; each raises GcoreError if it cannot, and goes on with what it has."""

    async def run(self) -> None:
        """Serve until cancelled."""
        config = self._config
        lease = config.lease_times
        etcd = await connect(config.etcd, self._clock, lease.call_s)
        store = MeasuredStore(etcd, self._own.metrics, self._clock)
        storage = OwnStorage(config.node, Path(config.run_root), self._own.folders)
        jobs = StoredJobs(store, storage, lambda: self._own.cluster)
        page = PageApp(Shown(config.node, jobs, self._own.runners.get, self._clock), asyncio.get_running_loop(), whose)
        metrics = self._security.serve_http(self._own.metrics, config, page)
        server, address, for_peers = await self._serve(store, jobs)
        addresses = Addresses(address, metrics.address, for_peers)
        log.info("%s answers on %s, metrics and a page on %s", config.node, address, metrics.address)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(watch_members(etcd.standing, self._own.metrics, self._clock), name="store's size")
                group.create_task(self._notifying.feed_watchdog(), name="watchdog")
                group.create_task(Clearing(config, store, self._clock).run(), name="clearing")
                if (watched := self._security.watched) is not None or secured(config.etcd):
                    looking = watch_certificates(watched, config.etcd, self._own.metrics, self._clock)
                    group.create_task(looking, name="certificates")
                if config.local_cluster:
                    self._keeper = Keeper(config, store, self._clock)
                    group.create_task(self._keeper.run(), name="keeper")
                else:
                    group.create_task(self._doubt(etcd), name="etcd's version")
                if config.tells_apart:
                    group.create_task(self._security.book.watch(store), name="tokens")
                while True:
                    await Life(self._own, store, addresses, self._notifying.say).run()
        finally:
            await server.stop(grace=0.5)
            metrics.close()
            self._security.journal.close()
            await store.close()
            if self._own.traces is not None:
                await asyncio.to_thread(self._own.traces.close)

    async def depart(self) -> None:
        """Hand over what the jobs' runners have, for a bounded time; at once if the whole local cluster is being ended."""
        runners = list(self._own.runners.values())
        await self._notifying.stopping(f"hands over {len(runners)} jobs" if runners else "stops")
        for runner in runners:
            runner.leave()
        end = self._clock.monotonic() + LEAVE_WITHIN_S
        stopping = Path(self._config.home) / STOPPING
        while self._clock.monotonic() < end and not (self._config.local_cluster and stopping.exists()):
            if all(runner.has_handed_over for runner in runners):
                log.info("handed over")
                return
            await self._clock.sleep(LEAVE_LOOK_S)

    def reload(self) -> None:
        """Read certificates anew, as whoever replaced them asks."""
        self._notifying.reloading()
        problems = []
        for again in self.reloads:
            try:
                again()
            except GcoreError as error:
                problems.append(str(error))
        for problem in problems:
            log.error("what was read before goes on: %s", problem)
        self._notifying.reloaded("; ".join(problems) or "has read its files anew")

    async def _doubt(self, store: EtcdStore) -> None:
        """Warn, once, of an etcd that is known to lose data. Whoever runs the local cluster's was told by `doctor`."""
        while not (versions := await store.versions()):
            await self._clock.sleep(RETRY_S)
        if sentence := doubt(versions):
            log.warning("%s", sentence)

    async def _serve(self, store: Store, jobs: StoredJobs) -> tuple[grpc.aio.Server, str, str]:
        config = self._config
        counted = CountedCalls(self._own.metrics, self._clock)
        gate = AccessGate(self._security.book, self._security.journal, CallRoom(config.api.calls))
        server = new_server([counted, gate, VersionGate()], config.api)

        lately: list[CheckedLately] = []

        async def submissions() -> Submissions:
            await imported("controllers.service.submission")
            from controllers.service.allowed import Allowed
            from controllers.service.checked_lately import CheckedLately
            from controllers.service.submission import Submissions

            if not lately:
                lately.append(CheckedLately(self._clock))
            cache, slots = Path(config.home) / "cache", functools.partial(most_slots, config)
            allowed = Allowed.of(config)
            run_root, local = Path(config.run_root), config.local_cluster
            return Submissions(
                store, jobs, run_root, cache, self._clock, slots, local=local, allowed=allowed, lately=lately[0]
            )

        room = StreamRoom(config.api.streams)
        service = JobsService(jobs, submissions, self._own.runners.get, self._clock, self._trouble, room)
        jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
        placement = PlacementService(self._own.runners.get, self._trouble)
        placement_pb2_grpc.add_PlacementServicer_to_server(placement, server)
        files = FilesService(jobs.own_folder, self._trouble, StreamRoom(config.api.streams))
        files_pb2_grpc.add_FilesServicer_to_server(files, server)
        access_pb2_grpc.add_AccessServicer_to_server(AccessService(store, self._clock, self._trouble), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflect(server, config.api)
        address, for_peers = self._security.listen(server, config)
        await server.start()
        return server, address, for_peers

    async def _set_health(self, ready: bool) -> None:
        self._own.metrics.ready.set(float(ready))
        self._health.set(serving=ready)

    def _trouble(self) -> str:
        return self._keeper.trouble if self._keeper is not None else ""
