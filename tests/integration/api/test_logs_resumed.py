"""Following logs while controllers die: another controller continues them, and each line arrives once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from listed_jobs import create

from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.client import JobsClient
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.worker.records import WorkerRecord

KEYS = JobKeys("u")
OLD, RANK, LATE = "rollout-n-aaaaaaaa", "train-n-bbbbbbbb", "train-n-cccccccc"


def wrote(instance: str, first: int, behind: int) -> list[tuple[str, str]]:
    return [(instance, f"{instance} says {number}") for number in range(first, behind)]


class Cluster:
    """A running job in a store in memory, and servers of the API over it that come and go."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore(MemoryCluster(FakeClock()))
        self.folder = folder
        self.servers: dict[int, grpc.aio.Server] = {}

    async def begin(self) -> None:
        await create(self.store, "u", "job", JobPhase.RUNNING)
        kv = await self.store.get(KEYS.job)
        assert kv is not None
        record = JobRecord.decode(kv.value, kv.key).model_copy(update={"run_dir": str(self.folder)})
        await self.store.transact((), (Put(KEYS.job, record.encode()),))
        (self.folder / "logs").mkdir()

    async def work(self, instance: str) -> None:
        worker = WorkerRecord(
            instance=instance, node="n", role="train", job_uid="u", slot="cpu:0", pid=1, pid_started=1
        )
        await self.store.transact((), (Put(keys.worker(instance), worker.encode()),))

    def write(self, instance: str, first: int, behind: int) -> None:
        with (self.folder / "logs" / f"{instance}.log").open("a") as file:
            file.writelines(f"{text}\n" for _, text in wrote(instance, first, behind))

    async def serve(self, port: int = 0) -> int:
        async def nothing() -> Any:
            raise AssertionError("no job is submitted in this test")

        server = grpc.aio.server()
        service = JobsService(StoreReader(self.store), nothing, lambda uid: None, SystemClock())
        jobs_pb2_grpc.add_JobsServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self.servers[port] = server
        return port

    async def end(self) -> None:
        await self.store.transact((), (Put(KEYS.state, JobStatus(phase=JobPhase.SUCCEEDED).encode()),))

    async def close(self) -> None:
        for server in self.servers.values():
            await server.stop(None)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncGenerator[Cluster, None]:
    cluster = Cluster(tmp_path)
    await cluster.begin()
    yield cluster
    await cluster.close()


async def some(lines: AsyncGenerator[pb.LogLine, None], number: int) -> list[tuple[str, str]]:
    return [(line.instance, line.text) for line in [await anext(lines) for _ in range(number)]]


def of(instance: str, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [one for one in found if one[0] == instance]


@pytest.mark.parametrize("tail", [0, 3], ids=["all", "the last lines"])
@pytest.mark.parametrize("grace", [None, 0.1], ids=["killed", "in good order"])
async def test_another_controller_goes_on_and_each_line_comes_once(
    cluster: Cluster, tail: int, grace: float | None
) -> None:
    for instance in (OLD, RANK):
        await cluster.work(instance)
        cluster.write(instance, 0, 9)
    first, second = await cluster.serve(), await cluster.serve()
    addresses = [f"127.0.0.1:{port}" for port in (first, second)]
    async with JobsClient(addresses, clock=SystemClock()) as client:
        request = pb.StreamLogsRequest(job="job", follow=True, tail=tail)
        async with aclosing(client.stream_logs(request)) as lines:
            shown = tail or 9
            found = await some(lines, 2 * shown - 1)  # the last of what is there is not taken when it breaks
            await cluster.servers.pop(first).stop(grace)
            cluster.write(OLD, 9, 12)
            await cluster.store.transact((), (Put(keys.worker(OLD), b"?"),))  # it has gone
            await cluster.work(LATE)
            cluster.write(LATE, 0, 9)
            cluster.write(RANK, 9, 10)
            found += await some(lines, 1 + 3 + 9 + 1)
            await cluster.serve(first)
            await cluster.servers.pop(second).stop(grace)
            cluster.write(RANK, 10, 12)
            found += await some(lines, 2)
            cluster.write(RANK, 12, 13)
            await cluster.end()
            async for line in lines:
                found.append((line.instance, line.text))
    begun = 9 - shown
    assert of(OLD, found) == wrote(OLD, begun, 12)
    assert of(RANK, found) == wrote(RANK, begun, 13)
    assert of(LATE, found) == wrote(LATE, 0, 9)


async def test_logs_that_are_not_followed_come_whole_from_several_controllers(cluster: Cluster) -> None:
    await cluster.work(RANK)
    cluster.write(RANK, 0, 20_000)
    ports = [await cluster.serve() for _ in range(3)]
    found: list[tuple[str, str]] = []
    async with (
        JobsClient([f"127.0.0.1:{port}" for port in ports], clock=SystemClock()) as client,
        aclosing(client.stream_logs(pb.StreamLogsRequest(job="job"))) as lines,
    ):
        async for line in lines:
            found.append((line.instance, line.text))
            if len(found) in (10, 6_000):
                await cluster.servers.pop(ports.pop(0)).stop(None)
    assert found == wrote(RANK, 0, 20_000)


async def test_log_requests_without_positions_get_lines_only(cluster: Cluster) -> None:
    await cluster.work(RANK)
    cluster.write(RANK, 0, 3)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await cluster.serve()}") as channel:
        stub: Any = jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]
        lines = [line async for line in stub.StreamLogs(pb.StreamLogsRequest(job="job"))]
    assert [line.text for line in lines] == [text for _, text in wrote(RANK, 0, 3)]
    assert not any(line.mark or line.HasField("place") for line in lines)
