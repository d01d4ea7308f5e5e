"""Limits for the callers of a daemon: strangers get a few connections for health, a user at most half of all, and idle or non-reading clients none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import issued
import pytest
from gated import CALLS, CLOCK, Code, Served, ask, behind_the_gate, by_token, channel_to
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import TakesNothing

from controllers.api.edge.access import TABLE
from controllers.api.edge.server import STRANGERS, WATCHERS, most_at_once
from gcore.api.rpc import parse_refusal, version_metadata
from gcore.api.tls import Connector
from gcore.api.v1 import jobs_pb2 as pb

GET, WATCH = "/gcore.api.v1.Jobs/GetJob", "/gcore.api.v1.Jobs/WatchJob"
CHECK = "/grpc.health.v1.Health/Check"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with behind_the_gate(tmp_path) as one:
        yield one


def metadata(connector: Connector, port: int) -> tuple[tuple[str, str], ...]:
    """What a call shows."""
    return (*version_metadata(), *connector.metadata(f"127.0.0.1:{port}"))


async def end(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the reason with which it ends."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), parse_refusal(error).reason
    return Code.OK, ""


async def healthy(served: Served) -> bool:
    """The answer of the daemon to a stranger."""
    async with channel_to(by_token(served, ""), f"127.0.0.1:{served.people}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == SERVING)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await CLOCK.sleep(0.01)


async def streams(channel: grpc.aio.Channel, connector: Connector, port: int, count: int) -> list[Any]:
    """So many that were begun, and stay. Raises AioRpcError for the first that is refused."""
    begun = []
    for _ in range(count):
        one = channel.unary_stream(WATCH, pb.WatchJobRequest.SerializeToString)(
            pb.WatchJobRequest(job="j"), metadata=metadata(connector, port)
        )
        await one.read()
        begun.append(one)
    return begun


async def test_strangers_who_send_no_request_are_refused_at_once_and_hold_no_place(served: Served) -> None:
    nobody = by_token(served, "")
    async with channel_to(nobody, f"127.0.0.1:{served.people}") as channel:
        for methods in ([GET] * (most_at_once(CALLS) + 100), [one for one in TABLE if one != GET]):
            calls = [channel.stream_unary(method)(metadata=version_metadata()) for method in methods]
            ends = {await end(call) for call in calls}
            assert ends == {(Code.UNAUTHENTICATED, "NO_CREDENTIALS")}
    assert served.room.taken == 0
    assert await healthy(served)


async def test_strangers_at_health_who_send_no_request_leave_room_for_everybody_else(served: Served) -> None:
    viewer = by_token(served, served.token("viewer", "vision"))
    async with channel_to(by_token(served, ""), f"127.0.0.1:{served.people}") as channel:
        calls = [channel.stream_unary(CHECK)() for _ in range(STRANGERS)]
        ending = [asyncio.create_task(end(call)) for call in calls]
        # A machine has half of what there is for all of them; of the rest each waits for its request, and is ended.
        await until(lambda: sum(one.done() for one in ending) == STRANGERS // 2)
        assert served.room.taken == STRANGERS // 2
        assert await ask(viewer, served.people, GET) == (Code.OK, "")
        assert await ask(Connector(issued.node(served.ca, "n2")), served.peers, GET) == (Code.OK, "")
        ends = [await one for one in ending]
    assert ends.count((Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")) == STRANGERS // 2
    assert ends.count((Code.DEADLINE_EXCEEDED, "LATE_REQUEST")) == STRANGERS // 2
    await until(lambda: served.room.taken == 0)
    assert await healthy(served)


async def test_few_strangers_watch_health_and_they_are_told_when_it_changes(served: Served) -> None:
    async with channel_to(by_token(served, ""), f"127.0.0.1:{served.people}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watching = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(WATCHERS // 2)]
        for one in watching:
            assert (await one.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert (caught.value.code(), parse_refusal(caught.value).reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        served.health.set(serving=False)
        for one in watching:
            assert (await one.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not await healthy(served)
        watching[0].cancel()
        await until(lambda: served.room.taken == WATCHERS // 2 - 1)
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="no.such"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=10)
        assert caught.value.code() is Code.NOT_FOUND


async def test_a_watcher_of_health_that_takes_nothing_holds_up_nobody(served: Served) -> None:
    with TakesNothing(served.people, served.ca / "ca.pem") as stuck:
        for _ in range(WATCHERS // 2):
            stuck.call("/grpc.health.v1.Health/Watch", b"")
        await until(lambda: served.room.taken == WATCHERS // 2)
        for serving in (False, True, False):
            served.health.set(serving=serving)
            assert await healthy(served) is serving
    await until(lambda: served.room.taken == 0)


async def test_a_known_caller_who_sends_no_request_is_told_so_after_a_while(served: Served) -> None:
    viewer = by_token(served, served.token("viewer", "vision"))
    shown = metadata(viewer, served.people)
    async with channel_to(viewer, f"127.0.0.1:{served.people}") as channel:
        for method in (GET, WATCH):
            begun = channel.stream_unary(method)(metadata=shown)
            assert await end(begun) == (Code.DEADLINE_EXCEEDED, "LATE_REQUEST")
            empty = channel.stream_unary(method)(metadata=shown)
            await empty.done_writing()
            assert await end(empty) == (Code.INVALID_ARGUMENT, "BAD_REQUEST")
    assert served.service.served == []
    await until(lambda: served.room.taken == 0)


async def test_user_gets_at_most_half_of_the_calls_and_none_of_those_for_nodes_and_health(
    served: Served,
) -> None:
    served.service.between.clear()
    ann, bob = (by_token(served, served.token(role, "vision")) for role in ("submitter", "viewer"))
    node = Connector(issued.node(served.ca, "n2"))
    async with (
        channel_to(ann, f"127.0.0.1:{served.people}") as of_ann,
        channel_to(bob, f"127.0.0.1:{served.people}") as of_bob,
        channel_to(node, f"127.0.0.1:{served.peers}") as of_node,
    ):
        hers = await streams(of_ann, ann, served.people, CALLS // 2)
        assert await ask(ann, served.people, GET) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        assert await ask(bob, served.people, GET) == (Code.OK, "")
        his = await streams(of_bob, bob, served.people, CALLS // 2)
        eve = by_token(served, served.token("admin"))
        assert await ask(eve, served.people, GET) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        assert await healthy(served)
        theirs = await streams(of_node, node, served.peers, CALLS)
        assert await ask(node, served.peers, GET) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        assert await healthy(served)
        for one in (*hers, *his, *theirs):
            one.cancel()
        await until(lambda: served.room.taken == 0)
    assert await ask(ann, served.people, GET) == (Code.OK, "")


async def test_client_that_reads_no_answer_uses_only_its_own_quota(served: Served) -> None:
    ann, bob = (by_token(served, served.token(role, "vision")) for role in ("submitter", "viewer"))
    with TakesNothing(served.people, served.ca / "ca.pem") as stuck:
        for _ in range(most_at_once(CALLS) + 100):
            stuck.call(GET, b"", *metadata(ann, served.people))
        await until(lambda: served.room.taken == CALLS // 2)
        assert await ask(bob, served.people, GET) == (Code.OK, "")
        assert await ask(ann, served.people, GET) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
        assert await healthy(served)
    await until(lambda: served.room.taken == 0)
    assert await ask(ann, served.people, GET) == (Code.OK, "")


@pytest.mark.parametrize("method", [GET, WATCH])
async def test_a_version_that_is_not_served_is_told_whatever_the_answer_would_be(served: Served, method: str) -> None:
    one = by_token(served, served.token("admin"))
    other = tuple((key, "999-1000") for key, _ in version_metadata())
    assert await ask(one, served.people, method, version=other) == (
        Code.FAILED_PRECONDITION,
        "SCHEMA_VERSION_NOT_SERVED",
    )
