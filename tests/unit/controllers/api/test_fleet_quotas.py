"""Quotas of namespaces: concurrent writers take turns, and only permitted users see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import BadFields
from controllers.api.fleet import MOST_NAMESPACES, list_quotas, set_quota
from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from controllers.cli.commands.cluster import parse_slots
from controllers.cli.main import app
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import StoreUnavailable, UsageError
from gcore.ledger.records.cluster import Claim, Quotas, Share, Shares
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, TxnResult
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


class Aborted(Exception):
    """What a call's context does."""


class Context:
    """Of a call."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None

    async def abort(self, code: grpc.StatusCode, *_: Any, **__: Any) -> None:
        self.code = code
        raise Aborted

    async def abort_with_status(self, status: Any) -> None:
        self.code = status.code
        raise Aborted


@pytest.fixture
def memory() -> MemoryCluster:
    return MemoryCluster(FakeClock())


def rows(found: pb.Quotas) -> list[tuple[str, int | None, int, int]]:
    return [(one.namespace, one.slots if one.HasField("slots") else None, one.used, one.jobs) for one in found.quotas]


async def test_quotas_that_cannot_be_read_hide_not_what_is_used(memory: MemoryCluster) -> None:
    store = MemoryStore(memory)
    shares = Shares(jobs={"u": Share(granted={"n": ("cpu:0",)}, held={"n": ("cpu:0",)})})
    puts = [Put(keys.QUOTAS, b"{damaged"), Put(keys.SHARES, shares.encode()), Put(JobKeys("u").active, b"")]
    await store.transact((), puts)
    assert rows(await list_quotas(store)) == [("default", None, 1, 1)]


async def test_a_quota_is_set_changed_and_taken_away(memory: MemoryCluster) -> None:
    store = MemoryStore(memory)
    await set_quota(store, "b", 4)
    await set_quota(store, "a", 0)
    await set_quota(store, "b", 6)
    assert rows(await list_quotas(store)) == [("a", 0, 0, 0), ("b", 6, 0, 0)]
    await set_quota(store, "a", None)
    await set_quota(store, "never", None)
    assert rows(await list_quotas(store)) == [("b", 6, 0, 0)]


async def test_held_slots_count_until_they_are_released(memory: MemoryCluster) -> None:
    store = MemoryStore(memory)
    held = Share(granted={"n": ("cpu:0",)}, held={"n": ("cpu:0", "cpu:1")})
    memory.transact((), (Put(JobKeys("one").active, Claim(namespace="x").encode()), Put(JobKeys("two").active, b"")))
    memory.transact((), (Put(JobKeys("three").active, b"?"), Put(keys.SHARES, Shares(jobs={"one": held}).encode())))
    await set_quota(store, "y", 1)
    assert rows(await list_quotas(store)) == [("default", None, 0, 2), ("x", None, 2, 1), ("y", 1, 0, 0)]
    with acting_as(Caller("v", Role.VIEWER, frozenset({"x"}))):
        assert rows(await list_quotas(store)) == [("x", None, 2, 1)]


async def test_concurrent_quota_write_is_not_overwritten(memory: MemoryCluster) -> None:
    class Busy(MemoryStore):
        times = 0

        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            self.times += 1
            if self.times == 1:
                memory.transact((), (Put(keys.QUOTAS, Quotas(slots={"other": 3}).encode()),))
            return await super().transact(compares, writes)

    store = Busy(memory)
    await set_quota(store, "mine", 2)
    assert [row[:2] for row in rows(await list_quotas(store))] == [("mine", 2), ("other", 3)]


async def test_a_record_that_cannot_be_read_is_written_anew(memory: MemoryCluster) -> None:
    memory.transact((), (Put(keys.QUOTAS, b"?"), Put(keys.SHARES, b"?")))
    store = MemoryStore(memory)
    assert rows(await list_quotas(store)) == []
    await set_quota(store, "a", 1)
    memory.transact((), (Delete(keys.SHARES),))
    assert rows(await list_quotas(store)) == [("a", 1, 0, 0)]


async def test_unknown_outcomes_and_too_many_quotas_are_refused(memory: MemoryCluster) -> None:
    class Away(MemoryStore):
        async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
            raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable, match="it is unknown whether the quota was set"):
        await set_quota(Away(memory), "a", 1)
    full = Quotas(slots={f"n{number}": 1 for number in range(MOST_NAMESPACES)})
    memory.transact((), (Put(keys.QUOTAS, full.encode()),))
    with pytest.raises(BadFields, match="1000 namespaces already have a quota"):
        await set_quota(MemoryStore(memory), "one-more", 1)


@given(st.text(max_size=100).filter(lambda text: not text.isascii() or not text.replace("-", "").isalnum()))
async def test_invalid_namespaces_are_refused(namespace: str) -> None:
    service: Any = JobsService(
        StoreReader(MemoryStore(MemoryCluster(FakeClock()))), None, lambda uid: None, FakeClock()
    )  # type: ignore[arg-type]
    try:
        request = pb.SetQuotaRequest(namespace=namespace, slots=1)
    except (ValueError, UnicodeEncodeError):
        return  # no message holds it
    context = Context()
    with pytest.raises(Aborted):
        await service.SetQuota(request, context)
    assert context.code is not None


@pytest.mark.parametrize(("text", "slots"), [("8", 8), ("0", 0), ("none", None)])
def test_slots_are_a_number_or_none(text: str, slots: int | None) -> None:
    assert parse_slots("research", text) == slots


@pytest.mark.parametrize("text", ["", "-1", "1.5", "eight", "9" * 20, "٣"])
def test_invalid_slot_counts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="Give a number, or none: gcore quota research 8"):
        parse_slots("research", text)


def test_the_verb_shows_all_and_sets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    class Client:
        async def get_quotas(self) -> list[pb.Quota]:
            asked.append(())
            return [pb.Quota(namespace="a", slots=4, used=2, jobs=1), pb.Quota(namespace="b", used=1, jobs=1)]

        async def set_quota(self, namespace: str, slots: int | None) -> list[pb.Quota]:
            asked.append((namespace, slots))
            return []

    monkeypatch.setattr("controllers.cli.commands.cluster.call_cluster", lambda what, *_: asyncio.run(what(Client())))
    shown = CliRunner().invoke(app, ["quota", "-o", "json"])
    assert json.loads(shown.stdout) == [
        {"namespace": "a", "slots": 4, "used": 2, "jobs": 1},
        {"namespace": "b", "slots": None, "used": 1, "jobs": 1},
    ]
    table = CliRunner().invoke(app, ["quota"]).stdout.split()
    assert table == ["NAMESPACE", "QUOTA", "USED", "JOBS", "a", "4", "2", "1", "b", "-", "1", "1"]
    assert CliRunner().invoke(app, ["quota", "b", "none"]).exit_code == 0
    assert asked == [(), (), ("b", None)]


async def test_a_quota_beyond_all_measure_is_refused_and_one_of_the_api_is_told(memory: MemoryCluster) -> None:
    service: Any = JobsService(StoreReader(MemoryStore(memory)), None, lambda uid: None, FakeClock())  # type: ignore[arg-type]
    with pytest.raises(Aborted):
        await service.SetQuota(pb.SetQuotaRequest(namespace="a", slots=2_000_000), Context())
    assert rows(await service.SetQuota(pb.SetQuotaRequest(namespace="a", slots=2), Context())) == [("a", 2, 0, 0)]
    assert rows(await service.GetQuotas(pb.GetQuotasRequest(), Context())) == [("a", 2, 0, 0)]
    assert rows(await service.SetQuota(pb.SetQuotaRequest(namespace="a"), Context())) == []
