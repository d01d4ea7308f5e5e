"""Limits of a daemon's API: message sizes, malformed bytes, streams without a reader, reflection tools."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from listed_jobs import create

from controllers.api.edge.server import MOST_REQUEST, StreamLimiter, add_reflection, new_server
from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from controllers.telemetry.events import Event
from gcore.api.rpc import parse_refusal
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.config.node import ApiConfig
from gcore.ledger.records.job import JobPhase
from gcore.system.clock import SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

Code = grpc.StatusCode
EXAMPLES = int(os.environ.get("GCORE_FUZZ", "8"))
"""Of each kind of request; `make fuzz` has many more."""


class Endless(JobsService):
    """Has more events than anybody reads."""

    sent = 0

    async def _follow(self, uid: str, after: int, **_: Any) -> AsyncGenerator[Event, None]:
        while True:
            self.sent += 1
            yield Event(self.sent, 0.0, "step", "x" * 1000, {})


async def until(condition: Callable[[], bool]) -> None:
    """It holds soon, or the test runs into its limit."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


class Api:
    """A real server over a store in memory, with one job that has ended."""

    def __init__(self, api: ApiConfig | None = None, kind: type[JobsService] = JobsService) -> None:
        self.config = api or ApiConfig()
        self.kind = kind

    async def __aenter__(self) -> Api:
        store = MemoryStore(MemoryCluster(FakeClock()))
        await create(store, "e", "ended", JobPhase.FAILED)
        room = StreamLimiter(self.config.streams)

        async def submissions() -> Any:
            from pathlib import Path

            from controllers.api.submission.submit import Submitter

            return Submitter(store, StoreReader(store), Path("/nowhere"), Path("/nowhere"), FakeClock())

        self.service = self.kind(StoreReader(store), submissions, lambda uid: None, SystemClock(), str, room)
        self.server = new_server([], self.config)
        jobs_pb2_grpc.add_JobsServicer_to_server(self.service, self.server)  # type: ignore[no-untyped-call]
        add_reflection(self.server, self.config)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address, options=[("grpc.max_send_message_length", -1)])
        self.stub: Any = jobs_pb2_grpc.JobsStub(self.channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(None)

    async def answers(self) -> None:
        """It is not hurt."""
        assert (await self.stub.GetJob(pb.GetJobRequest(job="ended"))).uid == "e"

    async def raw(self, method: str, data: bytes) -> grpc.StatusCode:
        """Send bytes in a request's place; the code of the answer."""
        name = f"/gcore.api.v1.Jobs/{method}"
        streams = {one.name for one in METHODS if one.server_streaming}
        make = self.channel.unary_stream if method in streams else self.channel.unary_unary
        call: Any = make(name)(data, timeout=20)
        try:
            if method in streams:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return error.code()
        return Code.OK


METHODS = list(pb.DESCRIPTOR.services_by_name["Jobs"].methods)
DOCUMENTED = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.FAILED_PRECONDITION,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAVAILABLE,
    Code.PERMISSION_DENIED,
    Code.UNAUTHENTICATED,
}


async def test_a_message_that_is_too_large_is_refused_and_nobody_is_hurt() -> None:
    async with Api() as api:
        code = await api.raw("CreateJob", pb.CreateJobRequest(spec_json="x" * MOST_REQUEST).SerializeToString())
        assert code is Code.RESOURCE_EXHAUSTED
        long = await api.raw("CreateJob", pb.CreateJobRequest(spec_json="x" * (2 << 20)).SerializeToString())
        assert long is Code.INVALID_ARGUMENT
        await api.answers()


async def test_a_message_that_is_cut_off_is_refused_and_nobody_is_hurt() -> None:
    whole = pb.CreateJobRequest(request_id="r", spec_json="{}").SerializeToString()
    async with Api() as api:
        for length in range(1, len(whole)):
            assert await api.raw("CreateJob", whole[:length]) is Code.INVALID_ARGUMENT
            assert await api.raw("WatchJob", whole[:length]) in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
        await api.answers()


async def test_a_client_that_never_reads_makes_nothing_grow_and_hinders_nobody() -> None:
    async with Api(kind=Endless) as api:
        service: Any = api.service
        streams = [api.stub.WatchJob(pb.WatchJobRequest(job="ended")) for _ in range(3)]
        for one in streams:
            await one.read()
        seen = -1
        while service.sent != seen:  # until all of them stand still
            seen = service.sent
            for _ in range(20):
                await api.answers()
                await asyncio.sleep(0.01)
        await api.answers()
        assert service._room.taken == 3
        for one in streams:
            one.cancel()
        await until(lambda: service._room.taken == 0)


async def test_more_streams_than_there_is_room_for_are_refused_and_may_come_later() -> None:
    async with Api(ApiConfig(streams=2), kind=Endless) as api:
        first = [api.stub.WatchJob(pb.WatchJobRequest(job="ended")) for _ in range(2)]
        for one in first:
            await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await api.stub.WatchJob(pb.WatchJobRequest(job="ended")).read()
        assert (error.value.code(), parse_refusal(error.value).reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        first[0].cancel()
        service: Any = api.service
        await until(lambda: service._room.taken < 2)
        assert (await api.stub.WatchJob(pb.WatchJobRequest(job="ended")).read()).sequence


async def test_a_deadline_ends_what_is_done_for_its_caller() -> None:
    async with Api(kind=Endless) as api:
        call = api.stub.WatchJob(pb.WatchJobRequest(job="ended"), timeout=0.3)
        while not call.done():
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
        assert await call.code() is Code.DEADLINE_EXCEEDED
        service: Any = api.service
        await until(lambda: service._room.taken == 0)


async def test_tools_are_told_what_is_served_only_where_that_is_wanted() -> None:
    ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="gcore.api.v1.Jobs")
    async with Api(ApiConfig(reflection=True)) as api:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(api.channel)
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            files = [
                FileDescriptorProto.FromString(one) for one in answer.file_descriptor_response.file_descriptor_proto
            ]
        assert any("Jobs" in [service.name for service in file.service] for file in files)
    async with Api() as api:
        stub = reflection_pb2_grpc.ServerReflectionStub(api.channel)
        call = stub.ServerReflectionInfo(iter([ask]))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is Code.UNIMPLEMENTED


def messages(kind: Any) -> st.SearchStrategy[Any]:
    """Any request of a kind: every field absent, usual, or at the edge of what its type holds."""
    fields = {}
    for field in kind.DESCRIPTOR.fields:
        one = _values(field)
        fields[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def _values(field: Any) -> st.SearchStrategy[Any]:
    texts = st.sampled_from(["", "ended", "e", "default/ended", "../..", "%s", "\x00", "{}", '{"name": 1}', "a/b/c"])
    whole = {field.TYPE_INT32: 31, field.TYPE_INT64: 63}
    if field.type in whole:
        most = 2 ** whole[field.type]
        return st.sampled_from([0, 1, -1, most - 1, -most]) | st.integers(-most, most - 1)
    if field.type == field.TYPE_UINT32:
        return st.integers(0, 2**32 - 1)
    if field.type == field.TYPE_FIXED64:
        return st.integers(0, 2**64 - 1)
    if field.type == field.TYPE_BOOL:
        # What follows does so until the job has ended: this one has.
        return st.booleans()
    if field.type == field.TYPE_DOUBLE:
        return st.floats()
    if field.type == field.TYPE_ENUM:
        return st.integers(-5, 20)
    if field.type == field.TYPE_MESSAGE:
        kind = field.message_type._concrete_class
        if field.message_type.name != "FieldMask":
            return messages(kind)
        return st.lists(texts, max_size=2).map(lambda paths: kind(paths=paths))
    return texts | st.text(max_size=20)


@pytest.mark.parametrize("method", [one.name for one in METHODS])
def test_every_request_of_any_shape_has_a_documented_answer(method: str) -> None:
    """No defect, whatever the fields say: a defect leaves as INTERNAL."""
    descriptor = next(one for one in METHODS if one.name == method)
    kind = descriptor.input_type._concrete_class

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(messages(kind), min_size=4, max_size=4))
    def fuzz(requests: list[Any]) -> None:
        async def ask() -> None:
            async with Api() as api:
                for request in requests:
                    code = await api.raw(method, request.SerializeToString())
                    assert code in DOCUMENTED, (code, request)
                if method != "DeleteJob":
                    await api.answers()

        asyncio.run(ask())

    fuzz()


@pytest.mark.parametrize("method", ["CreateJob", "ListJobs", "UpdateJob", "StreamLogs"])
def test_bytes_of_any_kind_have_an_answer_and_hurt_nobody(method: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.binary(max_size=80), min_size=4, max_size=4))
    def fuzz(requests: list[bytes]) -> None:
        async def ask() -> None:
            async with Api() as api:
                for data in requests:
                    assert await api.raw(method, data) in DOCUMENTED
                await api.answers()

        asyncio.run(ask())

    fuzz()
