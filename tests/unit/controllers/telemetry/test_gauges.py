"""Metrics of placement (expected and measured), of the store's size, and of answered calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st

from controllers.api.edge.server import CallCounter
from controllers.daemon.daemon import own_certificate_expiries, watch_certificates
from controllers.daemon.incarnation import job_counts
from controllers.telemetry.gauges import (
    ASK_EVERY_S,
    JobStoreSize,
    expected_step_s,
    move_figures,
    newest_moves,
    watch_members,
)
from gcore.api.authority import issue_certificate, new_authority
from gcore.api.tls import PemFiles
from gcore.ledger.records.cluster import Claim, Share, Shares
from gcore.ledger.records.job import HoldPeriod, Move, MoveKind, MoveOutcome, Moves, SplitPart
from gcore.ledger.transactions import Versioned
from gcore.observability.metrics import Metrics, MoveFigures
from gcore.store.reference import StoreRef, TlsFiles
from gcore.store.types import KeyValue, StoreMemberStatus, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock

SPLIT = SplitPart(mode="coexisting", rollout=3, reward=1, train=1)


def move(kind: MoveKind = MoveKind.SPLIT, **more: Any) -> Move:
    return Move(generation=1, step=1, kind=kind, before=SPLIT, after=SPLIT, **more)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("made", "figures"),
    [
        (move(), MoveFigures()),
        (move(gain_s=2.0, cost_s=1.0), MoveFigures(2.0, None, 1.0, None)),
        (move(gain_s=9.0, before_s=5.0, expected_s=4.0), MoveFigures(1.0, None, None, None)),
        (
            move(outcome=MoveOutcome(took_s=0.5, steps=3, step_s=4.5, before_s=4.0)),
            MoveFigures(None, -0.5, None, 0.5),
        ),
    ],
    ids=["nothing is known", "a gain", "steps before and after", "it became slower"],
)
def test_a_move_is_shown_with_what_was_expected_and_what_came(made: Move, figures: MoveFigures) -> None:
    assert move_figures(made) == figures


def test_the_newest_move_of_each_kind_counts_and_not_one_that_never_was() -> None:
    first, second = move(gain_s=1.0), move(gain_s=2.0)
    lapsed = move(state="lapsed", gain_s=3.0)
    lent = move(MoveKind.LEND)
    assert newest_moves(Moves(moves=(first, lent, second, lapsed))) == {"split": second, "lend": lent}


def test_expected_step_time_is_that_of_the_newest_decision() -> None:
    moved, stay = move(time=5.0, expected_s=3.0), HoldPeriod(since=1, step=2, time=9.0, expected_s=4.0)
    assert expected_step_s(Moves(moves=(moved,), stays=(stay,))) == 4.0
    assert expected_step_s(Moves(moves=(moved.model_copy(update={"time": 10.0}),), stays=(stay,))) == 3.0
    assert expected_step_s(Moves(moves=(move(),))) is None


def test_outdated_measurements_are_removed() -> None:
    metrics = Metrics()
    metrics.show_move("sums", "split", MoveFigures(1.0, 2.0, 3.0, 4.0))
    metrics.show_move("sums", "split", MoveFigures(5.0))
    labels = {"job": "sums", "kind": "split"}
    assert value(metrics, "gcore_move_gain_seconds", measure="expected", **labels) == 5.0
    assert value(metrics, "gcore_move_gain_seconds", measure="measured", **labels) is None
    assert value(metrics, "gcore_move_seconds", measure="measured", **labels) is None


def event(key: str, size: int | None) -> WatchEvent:
    kv = KeyValue(key, b"x" * (size or 0), 1, 1, 0)
    return WatchEvent("delete" if size is None else "put", kv)


@given(st.lists(st.tuples(st.sampled_from("abcä"), st.none() | st.integers(0, 99)), max_size=40), st.integers(0, 40))
def test_the_size_of_a_job_is_that_of_what_is_there(changes: list[tuple[str, int | None]], reset_at: int) -> None:
    size, there = JobStoreSize(), dict[str, int]()
    for number, (key, length) in enumerate(changes):
        if number == reset_at:
            there = {}
        size.note(WatchBatch((event(key, length),), number, reset=number == reset_at))
        there.pop(key, None)
        if length is not None:
            there[key] = length + len(key.encode())
        assert (size.keys, size.bytes) == (len(there), sum(there.values()))


async def test_members_that_do_not_answer_are_shown_no_more() -> None:
    metrics = Metrics()
    told = [
        {"a:1": StoreMemberStatus(100, 60, frozenset({"NOSPACE"})), "b:1": StoreMemberStatus(90, 60)},
        {"b:1": StoreMemberStatus(95, 60)},
    ]
    seen: list[tuple[float | None, float | None]] = []

    class Clock(SystemClock):
        async def sleep(self, seconds: float) -> None:
            assert seconds == ASK_EVERY_S
            seen.append((value(metrics, "gcore_store_database_bytes", endpoint="a:1"), alarm(metrics, "a:1")))
            if not told:
                raise asyncio.CancelledError

    async def standing() -> dict[str, StoreMemberStatus]:
        return told.pop(0)

    with pytest.raises(asyncio.CancelledError):
        await watch_members(standing, metrics, Clock())
    assert seen == [(100.0, 1.0), (None, None)]
    assert value(metrics, "gcore_store_in_use_bytes", endpoint="b:1") == 60
    assert alarm(metrics, "b:1") == 0.0


def alarm(metrics: Metrics, endpoint: str) -> float | None:
    return value(metrics, "gcore_store_alarm", endpoint=endpoint, alarm="NOSPACE")


class Service(health_pb2_grpc.HealthServicer):
    """Answers "good", refuses "bad", breaks at "broken"."""

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service == "bad":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no")
        if request.service == "broken":
            raise KeyError("broken")
        if request.service == "late":
            await asyncio.sleep(60)
        return health_pb2.HealthCheckResponse()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield health_pb2.HealthCheckResponse()
        if request.service == "bad":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        if request.service == "late":
            await asyncio.sleep(60)


@pytest.fixture
async def counted() -> AsyncIterator[tuple[Metrics, health_pb2_grpc.HealthStub, grpc.aio.Channel]]:
    metrics = Metrics()
    server = grpc.aio.server(interceptors=[CallCounter(metrics, SystemClock())])
    health_pb2_grpc.add_HealthServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield metrics, health_pb2_grpc.HealthStub(channel), channel
    await server.stop(None)


async def until(metrics: Metrics, method: str, code: str) -> None:
    """A call that was given up ends a moment later."""
    for _ in range(500):
        if value(metrics, "gcore_api_calls_total", method=method, code=code) == 1:
            return
        await asyncio.sleep(0.01)
    raise AssertionError([s for f in metrics.registry.collect() for s in f.samples if "api_calls" in s.name])


@pytest.mark.parametrize(
    ("asked", "code"),
    [("good", "OK"), ("bad", "NOT_FOUND"), ("broken", "UNKNOWN"), ("late", "CANCELLED")],
)
async def test_a_call_is_counted_by_how_it_ended(counted: Any, asked: str, code: str) -> None:
    metrics, stub, _ = counted
    timeout = 0.2 if asked == "late" else 30
    try:
        await stub.Check(health_pb2.HealthCheckRequest(service=asked), timeout=timeout)
    except grpc.aio.AioRpcError:
        assert asked != "good"
    await until(metrics, "Check", code)
    assert value(metrics, "gcore_api_call_seconds_count", method="Check") == 1


@pytest.mark.parametrize(("asked", "code"), [("good", "OK"), ("bad", "UNAVAILABLE"), ("late", "CANCELLED")])
async def test_a_stream_is_open_until_it_has_ended(counted: Any, asked: str, code: str) -> None:
    metrics, stub, _ = counted
    stream = stub.Watch(health_pb2.HealthCheckRequest(service=asked))
    await stream.read()
    if asked == "late":
        assert value(metrics, "gcore_api_open_streams", method="Watch") == 1
        stream.cancel()
    else:
        try:
            assert await stream.read() is grpc.aio.EOF
        except grpc.aio.AioRpcError:
            assert asked == "bad"
    await until(metrics, "Watch", code)
    assert value(metrics, "gcore_api_open_streams", method="Watch") == 0


class Much(grpc.GenericRpcHandler):
    """Sends more than anybody reads."""

    sent = 0
    closed = False

    def service(self, details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(self.much)

    async def much(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                self.sent += 1
                yield b"x" * 100_000
        finally:
            self.closed = True


async def test_a_stream_that_is_cancelled_while_it_waits_for_its_client_was_cancelled() -> None:
    metrics, service = Metrics(), Much()
    server = grpc.aio.server(interceptors=[CallCounter(metrics, SystemClock())])
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.unary_stream("/a.Much/Watch")(b"")
        await stream.read()
        seen = -1
        while service.sent != seen:  # until it waits
            seen = service.sent
            await asyncio.sleep(0.2)
        stream.cancel()
        await until(metrics, "Watch", "CANCELLED")
        assert service.closed  # before it was counted: what a stream holds is given back with it
        assert value(metrics, "gcore_api_open_streams", method="Watch") == 0
    await server.stop(None)


async def test_methods_that_nobody_serves_are_counted_together(counted: Any) -> None:
    metrics, _, channel = counted
    for name in ("A", "B"):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/no.Such/{name}")(b"")
    assert value(metrics, "gcore_api_calls_total", method="unknown", code="UNIMPLEMENTED") == 2


def test_jobs_are_told_by_state_and_those_with_slots_by_how_many() -> None:
    claims = {
        "a": Claim(name="one"),
        "b": Claim(name="two", namespace="research"),
        "c": Claim(name="three", paused=True),
        "d": Claim(name="four"),
    }
    shares = Shares(
        jobs={
            "a": Share(granted={"n": ("cpu:0", "cpu:1")}, held={"n": ("cpu:0", "cpu:1")}),
            "b": Share(granted={}, held={"n": ("cpu:2",)}),
        }
    )
    states, slots = job_counts(claims, {"a", "b"}, Versioned(shares, 7))
    assert states == {"running": 2, "paused": 1, "queued": 1}
    assert slots == {"one": 2, "research/two": 0}
    assert job_counts(claims, set(claims), None) == ({"running": 4}, {})


def test_a_job_without_slots_is_shown_with_none_no_more() -> None:
    metrics = Metrics()
    metrics.show_jobs({"running": 2}, {"one": 2, "two": 1})
    metrics.show_jobs({"running": 1, "queued": 1}, {"one": 3})
    assert value(metrics, "gcore_job_slots", job="one") == 3
    assert value(metrics, "gcore_job_slots", job="two") is None
    assert value(metrics, "gcore_jobs", state="queued") == 1
    assert value(metrics, "gcore_jobs", state="paused") == 0


async def test_when_the_certificate_ends_is_shown_and_looked_at_again() -> None:
    metrics, now = Metrics(), datetime(2026, 1, 1, tzinfo=UTC)
    authority = new_authority("ca", days=400, now=now)
    certificates = [
        issue_certificate(authority, "node-1", None, ["127.0.0.1"], days=days, now=now).cert for days in (10, 90)
    ]
    shown: list[float | None] = []

    class Files:
        @property
        def pem(self) -> PemFiles:
            return PemFiles(authority.cert, certificates[len(shown)], None)

    class Clock(SystemClock):
        async def sleep(self, seconds: float) -> None:
            shown.append(value(metrics, "gcore_certificate_expiry_timestamp_seconds"))
            if len(shown) == 2:
                raise asyncio.CancelledError

    files: Any = Files()
    with pytest.raises(asyncio.CancelledError):
        await watch_certificates(files, StoreRef(endpoints=("a:1",)), metrics, Clock())
    assert [round((at or 0.0) - now.timestamp()) // 86400 for at in shown] == [10, 90]


def test_of_a_daemons_certificates_the_first_that_ends_counts_also_the_one_for_the_store(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    authority = new_authority("ca", days=400, now=now)
    own, other = (
        issue_certificate(authority, "node-1", None, ["127.0.0.1"], days=days, now=now).cert for days in (90, 10)
    )
    (tmp_path / "cert.pem").write_bytes(other)
    watched: Any = SimpleNamespace(pem=PemFiles(authority.cert, own, None))

    def days(store: StoreRef) -> list[int]:
        return [round(end - now.timestamp()) // 86400 for end in own_certificate_expiries(watched, store)]

    def shown(file: str) -> StoreRef:
        return StoreRef(endpoints=("a:1",), tls=TlsFiles(cert=str(tmp_path / file), key="key.pem"))

    assert days(StoreRef(endpoints=("a:1",))) == [90]
    assert days(shown("cert.pem")) == [90, 10]
    (tmp_path / "half.pem").write_text("-----BEGIN")
    assert days(shown("half.pem")) == days(shown("gone.pem")) == [90]


def test_a_member_that_does_not_answer_is_shown_no_more() -> None:
    metrics, name = Metrics(), "gcore_store_certificate_expiry_timestamp_seconds"
    metrics.show_store_certificates({"a:1": 5.0, "b:1": 6.0})
    assert (value(metrics, name, endpoint="a:1"), value(metrics, name, endpoint="b:1")) == (5.0, 6.0)
    metrics.show_store_certificates({"b:1": 7.0})
    assert (value(metrics, name, endpoint="a:1"), value(metrics, name, endpoint="b:1")) == (None, 7.0)
