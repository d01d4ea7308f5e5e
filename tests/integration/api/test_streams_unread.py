"""Every stream of a daemon's API with clients that never read: each client takes one connection and at most its own flow-control window."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import gcore.api.v1
from controllers.api.edge.server import StreamLimiter, new_server
from controllers.api.jobs import JobsService
from controllers.api.peers import FilesService
from controllers.api.store_reader import StoreReader
from gcore.api.rpc import Handler, handler_call, parse_refusal, wrap_handler
from gcore.api.v1 import files_pb2, files_pb2_grpc, jobs_pb2_grpc
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import parse_spec
from gcore.config.node import ApiConfig
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus
from gcore.ledger.records.slot_accounting import AccountLine, StepAccount, append_line
from gcore.observability import samples as folder
from gcore.observability.samples import KeptGroup, KeptText
from gcore.store.keys import JobKeys
from gcore.store.types import Put
from gcore.system.clock import SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.types import PromptRef, Version

OF_RANKS = frozenset({"TrainRank"})
"""Services that no daemon serves."""
UID = "e" * 12
KEYS = JobKeys(UID)
PLACES = 2
MODEL = "weights/0-1/model"
MANY = 800
LONG = "x" * 100_000
"""Each stream has so many times so much to tell. That is far more than HTTP/2 lets a server send to who takes none of it, some 8 MB at last."""
WINDOW = 16 << 20
REQUESTS: dict[str, tuple[Callable[[grpc.aio.Channel], Any], Any]] = {
    "Jobs.WatchJob": (jobs_pb2_grpc.JobsStub, pb.WatchJobRequest(job=UID)),
    "Jobs.StreamLogs": (jobs_pb2_grpc.JobsStub, pb.StreamLogsRequest(job=UID)),
    "Jobs.StreamMetrics": (jobs_pb2_grpc.JobsStub, pb.StreamMetricsRequest(job=UID)),
    "Jobs.GetSamples": (jobs_pb2_grpc.JobsStub, pb.GetSamplesRequest(job=UID, step=1)),
    "Jobs.GetBooks": (jobs_pb2_grpc.JobsStub, pb.GetBooksRequest(job=UID, step=1)),
    "Files.Read": (files_pb2_grpc.FilesStub, files_pb2.ReadFileRequest(job_uid=UID, file=MODEL)),
}  # type: ignore[dict-item]


def streaming() -> list[str]:
    """Every method of the API that answers with a stream, from the descriptors of all its files."""
    names = [name for _, name, _ in pkgutil.iter_modules(gcore.api.v1.__path__) if name.endswith("_pb2")]
    files = [importlib.import_module(f"gcore.api.v1.{name}").DESCRIPTOR for name in names]
    services = [service for file in files for service in file.services_by_name.values() if service.name not in OF_RANKS]
    return sorted(f"{one.name}.{method.name}" for one in services for method in one.methods if method.server_streaming)


class Counted(grpc.aio.ServerInterceptor):
    """How many bytes the services have given, by method."""

    def __init__(self) -> None:
        self.given: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        inner, name = handler_call(handler), handler_call_details.method.rpartition(".")[2].replace("/", ".")

        async def counted(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            async for one in inner(request, context):
                self.given[name] += one.ByteSize()
                yield one

        return wrap_handler(handler, counted)


async def fill(store: MemoryStore, run_dir: Path, method: str) -> None:
    """An ended job with very much to tell of what the method asks for."""
    spec = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"max_new_tokens": 4}}
    tree = parse_spec(spec | {"flow": {"steps": MANY}}).model_dump(mode="json")
    job = JobRecord(uid=UID, name="j", spec=tree, run_dir=str(run_dir), created=1.0, prompts=MANY)
    base, ended = chain.base_entry(2, "w", ChainWriter("n.a", "n")), JobStatus(phase=JobPhase.SUCCEEDED)
    head = base.head.model_copy(update={"step": MANY})
    await store.transact(
        (), (Put(KEYS.job, job.encode()), Put(KEYS.state, ended.encode()), Put(KEYS.head, head.encode()))
    )
    if method in ("Jobs.WatchJob", "Jobs.StreamMetrics"):
        stats = {f"{LONG[:900]}/{n}": float(n) for n in range(100)}
        for step in range(1, MANY + 1):
            entry = base.entry.model_copy(update={"seq": step, "kind": "train", "step": step, "stats": stats})
            await store.transact((), (Put(KEYS.log(step), entry.encode()),))
    elif method == "Jobs.GetSamples":
        text = KeptText(text=LONG)
        groups = (
            KeptGroup(
                ref=PromptRef(0, n, 0), digest=f"d{n}", source="s", prompt=text, prompt_tokens=1, holder="n", samples=()
            )
            for n in range(MANY)
        )
        folder.write_samples(run_dir, Version(0, 1), "n", groups)
    elif method == "Jobs.GetBooks":
        book = StepAccount(version=Version(0, 1), began=0.0, seconds=1.0, slots=1, booked={LONG: 1.0})
        for n in range(MANY):
            append_line(run_dir, AccountLine(f"n{n:03d}", book))
    else:
        file = run_dir / ("logs/rollout-n-1.log" if method == "Jobs.StreamLogs" else MODEL)
        file.parent.mkdir(parents=True)
        file.write_text(f"{LONG[:10_000]}\n" * 10 * MANY)


class Api:
    """A real server, its places, and what its services have given."""

    def __init__(self, run_dir: Path, method: str) -> None:
        self.counted, self.room, self.of_files = Counted(), StreamLimiter(PLACES), StreamLimiter(PLACES)
        self._run_dir, self._method = run_dir, method

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[grpc.aio.Channel, None]:
        store = MemoryStore(MemoryCluster(FakeClock()))
        await fill(store, self._run_dir, self._method)

        async def nothing() -> Any:
            raise AssertionError("no job is submitted in this test")

        async def folder_of(uid: str) -> Path:
            return self._run_dir

        server = new_server([self.counted], ApiConfig())
        jobs = JobsService(StoreReader(store), nothing, lambda uid: None, SystemClock(), str, self.room)
        jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)  # type: ignore[no-untyped-call]
        files_pb2_grpc.add_FilesServicer_to_server(FilesService(folder_of, str, self.of_files), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            # Else the client lets its window grow by what it measures of the line, up to WINDOW and a message: a busy
            # machine measures otherwise.
            fixed = [("grpc.http2.bdp_probe", 0)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=fixed) as channel:
                yield channel
        finally:
            await server.stop(None)

    @property
    def taken(self) -> int:
        return self.room.taken + self.of_files.taken

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it never came to be: {self.taken} places, {self.counted.given}")

    async def at_rest(self, method: str) -> int:
        """Bytes that were given, when no more are."""
        seen, same = -1, 0
        while same < 30:
            await asyncio.sleep(0.02)
            now = self.counted.given[method]
            seen, same = now, same + 1 if now == seen else 0
        return seen


def test_every_stream_of_the_api_is_tried() -> None:
    assert streaming() == sorted(REQUESTS)


@pytest.mark.parametrize("method", streaming())
async def test_unread_stream_uses_one_place_and_at_most_its_window(method: str, tmp_path: Path) -> None:
    stub_of, request = REQUESTS[method]
    api = Api(tmp_path, method)
    async with api.serving() as channel:
        ask = getattr(stub_of(channel), method.partition(".")[2])
        unread = [ask(request) for _ in range(PLACES)]
        await api.until(lambda: api.taken == PLACES)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(request).read()
        assert (refused.value.code(), parse_refusal(refused.value).reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_STREAMS",
        )
        await api.until(lambda: api.counted.given[method] > 0)
        assert await api.at_rest(method) < PLACES * WINDOW
        for one in unread:
            one.cancel()
        await api.until(lambda: api.taken == 0)
        assert sum([one.ByteSize() async for one in ask(request)]) > 3 * WINDOW
        await api.until(lambda: api.taken == 0)
