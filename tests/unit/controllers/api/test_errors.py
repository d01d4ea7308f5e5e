"""A refused call: a code, one sentence, a constant for programs, and the wrong fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.api.edge.errors import (
    CODES,
    BadFields,
    CallContext,
    Conflict,
    Exhausted,
    Forbidden,
    JobEnded,
    JobNotFound,
    NodeNotFound,
    Unauthenticated,
    bad_field,
    handle_errors,
    handle_stream_errors,
    make_refusal,
)
from gcore.api.rpc import Refusal, Violation, clip_details, cut_bytes, parse_refusal, refusal_metadata
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.errors import DataError, GcoreError, SpecError, StoreUnavailable, UsageError
from gcore.schema import UnreadableRecord

Code = grpc.StatusCode
KINDS: dict[str, tuple[GcoreError, grpc.StatusCode, str]] = {
    "no such job": (JobNotFound("x"), Code.NOT_FOUND, "JOB_NOT_FOUND"),
    "no such node": (NodeNotFound("x"), Code.NOT_FOUND, "NODE_NOT_FOUND"),
    "a conflict": (Conflict("x"), Code.FAILED_PRECONDITION, "CONFLICT"),
    "a job that has ended": (JobEnded("x"), Code.FAILED_PRECONDITION, "JOB_HAS_ENDED"),
    "the store is away": (StoreUnavailable("x"), Code.UNAVAILABLE, "STORE_UNAVAILABLE"),
    "a field": (bad_field("page_size", "x"), Code.INVALID_ARGUMENT, "BAD_REQUEST"),
    "a spec": (SpecError("x"), Code.INVALID_ARGUMENT, "BAD_SPEC"),
    "data": (DataError("x"), Code.INVALID_ARGUMENT, "BAD_DATA"),
    "a request": (UsageError("x"), Code.INVALID_ARGUMENT, "BAD_REQUEST"),
    "too many": (Exhausted("x"), Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS"),
    "not allowed": (Forbidden("x"), Code.PERMISSION_DENIED, "PERMISSION_DENIED"),
    "nobody": (Unauthenticated("x"), Code.UNAUTHENTICATED, "UNAUTHENTICATED"),
    "damage": (UnreadableRecord("x"), Code.FAILED_PRECONDITION, "UNREADABLE_RECORD"),
    "anything else": (GcoreError("x"), Code.FAILED_PRECONDITION, "REFUSED"),
}


@pytest.mark.parametrize(("error", "code", "reason"), KINDS.values(), ids=KINDS)
def test_each_kind_of_error_has_its_code_and_its_reason(error: GcoreError, code: grpc.StatusCode, reason: str) -> None:
    refusal = make_refusal(error)
    assert (refusal.code, refusal.reason) == (code, reason)


def test_every_kind_in_the_table_can_be_reached() -> None:
    """One that stands behind a class of which it is a kind would never be found."""
    for place, (kind, _, _) in enumerate(CODES):
        assert not any(issubclass(kind, before) for before, _, _ in CODES[:place])


def test_a_specs_error_names_each_of_its_fields() -> None:
    error = SpecError("flow.steps: must be positive; rolout: unknown, did you mean 'rollout'?; it is odd: all of it")
    fields = {one.field: one.what for one in make_refusal(error).violations}
    assert fields == {
        "spec.flow.steps": "must be positive",
        "spec.rolout": "unknown, did you mean 'rollout'?",
        "spec_json": "it is odd: all of it",
    }


class Service(jobs_pb2_grpc.JobsServicer):
    """Refuses everything, each in its way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def trouble(self) -> str:
        return "etcd's disk is full"

    @handle_errors
    async def GetJob(self, request: pb.GetJobRequest, context: CallContext) -> pb.Job:
        raise self.error

    @handle_stream_errors
    async def WatchJob(self, request: pb.WatchJobRequest, context: CallContext) -> AsyncGenerator[pb.JobEvent, None]:
        yield pb.JobEvent(sequence=1)
        raise self.error


async def refusals(error: Exception) -> list[Refusal]:
    """The errors that a client of a real server gets from a call and from a stream."""
    server = grpc.aio.server()
    jobs_pb2_grpc.add_JobsServicer_to_server(Service(error), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = jobs_pb2_grpc.JobsStub(channel)  # type: ignore[no-untyped-call]
            found = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetJob(pb.GetJobRequest())
            found.append(parse_refusal(caught.value))
            events = stub.WatchJob(pb.WatchJobRequest())
            assert (await events.read()).sequence == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await events.read()
            return [*found, parse_refusal(caught.value)]
    finally:
        await server.stop(None)


def test_a_client_reads_reason_and_fields_of_calls_and_streams() -> None:
    error = BadFields([Violation("page_size", "-1 is negative"), Violation("states", "9 is no state")], fix="Ask again")
    for refusal in asyncio.run(refusals(error)):
        assert refusal.code is Code.INVALID_ARGUMENT
        assert refusal.sentence == "page_size: -1 is negative; states: 9 is no state. Ask again"
        assert (refusal.reason, refusal.violations) == ("BAD_REQUEST", error.violations)


def test_unavailable_store_refusal_gives_the_keepers_reason() -> None:
    for refusal in asyncio.run(refusals(StoreUnavailable("no answer"))):
        assert (refusal.code, refusal.sentence) == (Code.UNAVAILABLE, "etcd's disk is full")


def test_a_defect_costs_its_own_call_and_says_what_it_was() -> None:
    for refusal in asyncio.run(refusals(ZeroDivisionError("oh"))):
        assert (refusal.code, refusal.reason) == (Code.INTERNAL, "DEFECT")
        assert "ZeroDivisionError('oh')" in refusal.sentence


def test_the_longest_refusal_still_reaches_its_caller() -> None:
    """gRPC throws away an answer whose metadata are larger than 8 KiB, and the reason with it."""
    wrong = [Violation("é" * 5000, "日本" * 5000) for _ in range(100)]
    for error in (BadFields(wrong, fix="x" * 9000), UsageError("%" * 9000), SpecError("x: y; " * 9000)):
        for refusal in asyncio.run(refusals(error)):
            assert refusal.code is Code.INVALID_ARGUMENT
            assert refusal.reason.startswith("BAD_")
            assert refusal.sentence.endswith(" ...")
            assert isinstance(error, UsageError) or refusal.violations


@given(st.text(max_size=3000), st.integers(4, 2000))
def test_a_text_that_is_cut_is_text_and_not_longer(text: str, most: int) -> None:
    short = cut_bytes(text, most)
    assert len(short.encode(errors="replace")) <= most
    assert short == text or short.endswith(" ...")


@given(st.binary(max_size=200))
def test_details_that_are_none_are_passed_over(data: bytes) -> None:
    class Error(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return Code.INTERNAL

        def details(self) -> str:
            return "said"

        def trailing_metadata(self) -> Any:
            return (("grpc-status-details-bin", data),)

    refusal = parse_refusal(Error())
    assert (refusal.code, refusal.sentence) == (Code.INTERNAL, "said")


@given(st.text(max_size=5000))
def test_refusal_metadata_fits_into_the_limit_of_a_call(text: str) -> None:
    sentence = clip_details(text * 3)
    wrong = (Violation(text, text),) * 99
    ((_, value),) = refusal_metadata(Refusal(Code.INVALID_ARGUMENT, sentence, "R" * 40, wrong, {text: text}))
    assert len(quote(sentence, safe=" ", errors="replace")) + len(value) * 4 / 3 < 8000
    assert text * 3 == sentence or sentence.endswith(" ...")
