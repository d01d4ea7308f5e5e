"""All wiring: which parts a daemon is made of, and who knows whom. What a daemon does with a lease is `controllers.life`'s."""

from __future__ import annotations

import asyncio
import functools
import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from controllers.keeper import STOPPING, Keeper
from controllers.leaving import LEAVE_WITHIN_S
from controllers.life import RETRY_S, Belongings, Life
from controllers.service.capability import most_slots
from controllers.service.files import FilesService
from controllers.service.jobs import JobsService
from controllers.service.placement import PlacementService
from controllers.service.records import OwnStorage, StoredJobs
from gcore.api.v1 import files_pb2_grpc, jobs_pb2_grpc, placement_pb2_grpc
from gcore.clock import Clock
from gcore.config import NodeConfig
from gcore.errors import UsageError
from gcore.metrics import serve_metrics
from gcore.rpc_schema import VersionGate
from gcore.store.client import EtcdStore
from gcore.store.measured import MeasuredStore
from gcore.store.server_version import doubt
from gcore.store.types import Store

if TYPE_CHECKING:
    from controllers.service.submission import Submissions

log = logging.getLogger(__name__)

LEAVE_LOOK_S = 0.05


class Daemon:
    """A node's controller."""

    def __init__(self, config: NodeConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._own = Belongings(config, clock)
        self._health = health.HealthServicer()
        self._keeper: Keeper | None = None

    async def run(self) -> None:
        """Serve until cancelled."""
        config = self._config
        metrics = serve_metrics(self._own.metrics, config.listen_host, config.metrics_port)
        lease = config.lease_times
        etcd = await EtcdStore.connect(config.etcd_endpoints, clock=self._clock, lease_call_s=lease.call_s)
        store = MeasuredStore(etcd, self._own.metrics, self._clock)
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
                    await Life(self._own, store, address, metrics.address, self._say_ready).run()
        finally:
            await server.stop(grace=0.5)
            metrics.close()
            await store.close()

    async def depart(self) -> None:
        """Hand over what the jobs' runners have, for a bounded time; at once if the whole local cluster is being ended."""
        runners = list(self._own.runners.values())
        for runner in runners:
            runner.leave()
        end = self._clock.monotonic() + LEAVE_WITHIN_S
        stopping = Path(self._config.home) / STOPPING
        while self._clock.monotonic() < end and not (self._config.local_cluster and stopping.exists()):
            if all(runner.has_handed_over for runner in runners):
                log.info("handed over")
                return
            await self._clock.sleep(LEAVE_LOOK_S)

    async def _doubt(self, store: EtcdStore) -> None:
        """Warn, once, of an etcd that is known to lose data. Whoever runs the local cluster's was told by `doctor`."""
        while not (versions := await store.versions()):
            await self._clock.sleep(RETRY_S)
        if sentence := doubt(versions):
            log.warning("%s", sentence)

    async def _serve(self, store: Store) -> tuple[grpc.aio.Server, str]:
        config = self._config
        server = grpc.aio.server(interceptors=[VersionGate()], options=[("grpc.so_reuseport", 0)])
        jobs = StoredJobs(store, OwnStorage(config.node, Path(config.run_root), self._own.folders))

        async def submissions() -> Submissions:
            await asyncio.to_thread(importlib.import_module, "controllers.service.submission")
            from controllers.service.submission import Submissions

            cache, slots = Path(config.home) / "cache", functools.partial(most_slots, config)
            run_root, local = Path(config.run_root), config.local_cluster
            return Submissions(store, jobs, run_root, cache, self._clock, slots, local=local)

        service = JobsService(jobs, submissions, self._own.runners.get, self._clock, self._trouble)
        jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
        placement = PlacementService(self._own.runners.get, self._trouble)
        placement_pb2_grpc.add_PlacementServicer_to_server(placement, server)
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

    async def _say_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if ready else status.NOT_SERVING)

    def _trouble(self) -> str:
        return self._keeper.trouble if self._keeper is not None else ""
