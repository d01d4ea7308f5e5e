"""Two schema versions side by side: the written version, and the served calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import SPEC, running_job
from hypothesis import given
from hypothesis import strategies as st
from job_session import make_session

from controllers.cluster.rules import choose_version, parse_version
from controllers.rules.view import Timers
from controllers.rules.waits import PATIENCE_S, current_waits, overdue_waits, wait_sentence
from gcore.api.rpc import (
    UNSERVED,
    VERSION_KEY,
    VersionedStub,
    VersionGate,
    parse_refusal,
    version_metadata,
    version_refusal,
)
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.client import JobsClient
from gcore.errors import UsageError
from gcore.ledger.records.job import NodeRecord
from gcore.schema import FIRST_VERSION, NEWEST_VERSION, READABLE
from gcore.system.clock import SystemClock
from gcore.testing import FakeClock, MemoryCluster, MemoryStore

OLDER = NEWEST_VERSION - 1
FAR = (NEWEST_VERSION + 1, NEWEST_VERSION + 2)
"""What the version after next speaks."""


@pytest.mark.parametrize(
    ("nodes", "reads", "version"),
    [
        pytest.param([], {}, NEWEST_VERSION, id="alone"),
        pytest.param(["a"], {"a": NEWEST_VERSION}, NEWEST_VERSION, id="all of this version"),
        pytest.param(["a", "b"], {"a": NEWEST_VERSION, "b": OLDER}, OLDER, id="one is pinned to the version before"),
        pytest.param(["a", "b"], {"a": NEWEST_VERSION}, OLDER, id="one does not say"),
        pytest.param(["a"], {"a": NEWEST_VERSION + 1}, NEWEST_VERSION, id="one is newer, and reads this"),
        pytest.param(["a"], {"a": NEWEST_VERSION, "gone": OLDER}, NEWEST_VERSION, id="an older one has gone"),
    ],
)
def test_written_version_is_the_newest_that_every_node_reads(
    nodes: list[str], reads: dict[str, int], version: int
) -> None:
    assert choose_version(nodes, reads) == version


def test_written_version_never_decreases() -> None:
    assert choose_version(["a", "b"], {"a": NEWEST_VERSION}, written=NEWEST_VERSION) == NEWEST_VERSION
    assert choose_version(["a"], {"a": NEWEST_VERSION}, written=OLDER) == NEWEST_VERSION
    assert choose_version(["a"], {}, written=NEWEST_VERSION + 1) == NEWEST_VERSION, "more than it has it cannot write"


@pytest.mark.parametrize(
    ("said", "version"), [(b"2", 2), (b"", None), (b"two", None), (b"-1", None), (b"9" * 5000, None), (b"\xff", None)]
)
def test_a_version_is_a_few_digits(said: bytes, version: int | None) -> None:
    assert parse_version(said) == version


def test_nothing_is_placed_on_a_node_that_does_not_read_what_is_written(tmp_path: Path) -> None:
    """It has left the job to the others; otherwise they would wait forever for a train rank on it."""
    nodes = {name: NODE.model_copy(update={"name": name}) for name in ("a", "b")}
    clock = FakeClock()
    session = make_session(tmp_path, MemoryStore(MemoryCluster(clock)), clock, SPEC)
    session.cluster.nodes = nodes
    session.cluster.reads = {"a": NEWEST_VERSION, "b": NEWEST_VERSION}
    assert session.look().nodes is nodes
    session.cluster.reads = {"a": NEWEST_VERSION}
    session.look_anew()
    assert set(session.look().nodes) == {"a"}
    assert session.cluster.able(NEWEST_VERSION) is session.look().nodes, "what follows from it is remembered by it"
    assert session.cluster.able(OLDER) is nodes


def test_of_a_node_that_does_not_read_what_is_written_people_are_told(tmp_path: Path) -> None:
    """Nothing else about the job says why the slots that were added are not used."""
    clock = FakeClock()
    session = make_session(tmp_path, MemoryStore(MemoryCluster(clock)), clock, SPEC)
    session.cluster.nodes = {name: NODE.model_copy(update={"name": name}) for name in ("a", "b")}
    session.cluster.reads = {"a": NEWEST_VERSION, "b": OLDER}
    assert session.look().outdated_nodes == {"b": OLDER}
    view = replace(running_job(), outdated_nodes={"b": OLDER})
    (wait,) = [one for one in current_waits(view) if one.cause == "node"]
    assert wait.what.startswith(f"b runs an older version of gcore: it reads schema version {OLDER} at most")
    held, late = Timers({}).note([wait.stall], 0.0), PATIENCE_S["node"]
    told = [
        wait_sentence(one)
        for me in view.mirror.members
        for one in overdue_waits(replace(view, me=me), [wait], held, late)
    ]
    assert told == [wait.what], "by one peer for all"
    session.cluster.reads = {"a": NEWEST_VERSION, "b": NEWEST_VERSION}
    session.look_anew()
    assert session.look().outdated_nodes == {}


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(-1, 9)), st.sets(st.sampled_from("abcd")))
def test_written_version_is_always_readable_here(reads: dict[str, int], nodes: set[str]) -> None:
    assert choose_version(nodes, reads) in READABLE


NODE = NodeRecord(name="n", incarnation="n.1", address="h:1", slots=("cpu:0",), pid=1)


class Answering(jobs_pb2_grpc.JobsServicer):
    """Says what it was asked in."""

    async def GetJob(self, request: pb.GetJobRequest, context: Any) -> pb.Job:
        """Unary."""
        said = [value for key, value in context.invocation_metadata() if key == VERSION_KEY]
        return pb.Job(uid="u", reason=",".join(said))

    async def WatchJob(self, request: pb.WatchJobRequest, context: Any) -> AsyncIterator[pb.JobEvent]:
        """A stream."""
        yield pb.JobEvent(sequence=1)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[VersionGate()])
    jobs_pb2_grpc.add_JobsServicer_to_server(Answering(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_every_call_of_the_client_carries_the_versions_that_it_speaks(address: str) -> None:
    async with JobsClient([address], clock=SystemClock()) as client:
        assert (await client.get_job("j")).reason == f"{OLDER},{NEWEST_VERSION}"


@pytest.mark.parametrize(
    "versions",
    [(OLDER,), (NEWEST_VERSION,), (OLDER - 1, OLDER), (NEWEST_VERSION, NEWEST_VERSION + 1)],
    ids=["pinned to the one before", "this one alone", "the one before", "the next"],
)
async def test_calls_of_this_version_and_the_one_before_are_served(address: str, versions: tuple[int, ...]) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = VersionedStub(jobs_pb2_grpc.JobsStub(channel), versions)
        assert (await stub.GetJob(pb.GetJobRequest())).reason == ",".join(map(str, versions))
        assert [event.sequence async for event in stub.WatchJob(pb.WatchJobRequest())] == [1]


async def test_a_call_that_says_no_version_is_one_of_the_first(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = jobs_pb2_grpc.JobsStub(channel)
        assert (await stub.GetJob(pb.GetJobRequest())).uid == "u"
    assert (version_refusal(None) is None) == (FIRST_VERSION in READABLE)


async def test_a_newer_call_is_refused_in_one_sentence_whatever_its_kind(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = VersionedStub(jobs_pb2_grpc.JobsStub(channel), FAR)
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetJob(pb.GetJobRequest())
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.WatchJob(pb.WatchJobRequest()):
                pass
    for raised in (unary.value, stream.value):
        assert raised.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "upgrade the controllers" in str(raised.details())


async def test_a_program_is_told_by_a_constant_that_its_version_is_not_served(address: str) -> None:
    async with JobsClient([address], clock=SystemClock()) as client:
        stub = VersionedStub(jobs_pb2_grpc.JobsStub(client._channel(address)), FAR)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetJob(pb.GetJobRequest())
    assert (parse_refusal(refused.value).reason, parse_refusal(refused.value).sentence) == (
        UNSERVED,
        refused.value.details(),
    )


async def test_the_command_line_of_a_newer_gcore_says_what_to_do(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with JobsClient([address], clock=SystemClock()) as client:
        stub = VersionedStub(jobs_pb2_grpc.JobsStub(client._channel(address)), FAR)
        monkeypatch.setattr(client, "_stub", lambda _: stub)
        with pytest.raises(UsageError, match="upgrade the controllers"):
            await client.get_job("j")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("0", "upgrade the caller"),
        ("4,5", "upgrade the controllers"),
        ("x" * 99, "upgrade the controllers"),
        ("9" * 5000, "upgrade the controllers"),
        ("", ""),
    ],
    ids=["too old", "too new", "nonsense", "a long number", "empty"],
)
def test_a_refusal_names_both_versions_and_who_is_to_change(said: str, words: str) -> None:
    why = version_refusal(said)
    assert why is not None
    assert words in why
    assert f"supports {OLDER} and {NEWEST_VERSION}" in why
    assert len(why) < 250


def test_version_metadata_is_readable_text() -> None:
    assert version_metadata() == ((VERSION_KEY, f"{OLDER},{NEWEST_VERSION}"),)
