"""Jobs' use of the cluster: every slot-second is counted once, whatever happens to the writers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.accounting.usage import AT_ONCE, EVERY_S, UsageWriter, forget_old_usage, read_usage
from controllers.api.edge.access import Caller, Role, acting_as
from controllers.api.edge.errors import BadFields
from controllers.api.fleet import FleetMethods, parse_usage_query, usage_reply
from controllers.api.store_reader import StoreReader
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger.records.job import JobRecord
from gcore.ledger.records.slot_accounting import StepAccount
from gcore.ledger.usage import (
    DAY_S,
    KEPT_DAYS,
    NEWEST_STEPS,
    NodeUsage,
    PoolSeconds,
    UsageSums,
    end_day,
    pool_seconds,
)
from gcore.store import keys
from gcore.store.types import KeyListing, Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore
from gcore.testing.store import Call, Fate, PerfectNetwork
from gcore.types import Version

JOB = JobRecord(uid="u", name="sums", spec={}, run_dir="/r", created=0.0, prompts=1)
BOOKED = {
    "busy rollout": 4.0,
    "idle rollout tail": 1.0,
    "busy train": 2.0,
    "switching train>rollout": 0.5,
    "syncing": 0.25,
    "failed": 0.25,
    "unallocated": 8.0,
}


def book(step: int, *, began: float = 100.0, booked: dict[str, float] | None = None) -> StepAccount:
    return StepAccount(
        version=Version(0, step), began=began, seconds=4.0, slots=4, booked=booked or BOOKED, unbooked=0.5
    )


def test_every_second_of_a_slot_that_was_the_jobs_is_some_pools() -> None:
    pools = pool_seconds(book(1))
    assert pools == {
        "rollout": PoolSeconds(slot_s=5.5, busy_s=4.0),
        "train": PoolSeconds(slot_s=2.0, busy_s=2.0),
        "other": PoolSeconds(slot_s=1.0, busy_s=0.0),
    }


def used(**more: Any) -> NodeUsage:
    return NodeUsage(**({"day": 0, "uid": "u", "job": "sums", "namespace": "default"} | more))


@given(st.lists(st.integers(1, 5), max_size=20))
def test_a_step_that_is_told_again_is_counted_once(steps: list[int]) -> None:
    usage = used()
    for step in steps:
        usage = usage.plus(book(step)).plus(book(step))
    assert usage.pools.get("rollout", PoolSeconds()).slot_s == pytest.approx(5.5 * len(set(steps)))
    assert len(usage.steps) <= NEWEST_STEPS


def test_a_step_that_is_made_again_in_another_lineage_or_later_counts_again() -> None:
    usage = used().plus(book(1)).plus(book(1, began=200.0))
    assert usage.pools["rollout"].slot_s == 11.0


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.sampled_from(["x", "y"]), st.floats(0.1, 100)),
        max_size=30,
    ),
    st.lists(st.sampled_from(["namespace", "job", "owner", "pool"]), min_size=1, max_size=4),
)
def test_usage_total_is_independent_of_the_grouping(rows: list[tuple[int, str, str, float]], by: list[str]) -> None:
    usages = [
        used(
            day=day,
            namespace=namespace,
            job=name,
            pools={"rollout": PoolSeconds(slot_s=s), "other": PoolSeconds(slot_s=1)},
        )
        for day, namespace, name, s in rows
    ]
    added = UsageSums(by)
    for one in usages:
        added.add(one)
    sums = added.ranked()
    assert sum(seconds.slot_s for _, seconds in sums) == pytest.approx(sum(s + 1 for *_, s in rows))
    assert all(set(named) == set(by) for named, _ in sums)


class Away(PerfectNetwork):
    """Loses an answer, or a request, now and then."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.fates: list[Fate] = []

    async def request(self, call: Call) -> Fate:
        return self.fates.pop(0) if call.kind == "transact" and self.fates else Fate.DELIVER


async def every(store: MemoryStore, first_day: int = 0, last_day: int = keys.LAST_DAY) -> list[NodeUsage]:
    return [usage async for page in read_usage(store, first_day, last_day) for usage in page]


async def stored(store: MemoryStore) -> dict[int, float]:
    """Slot-seconds of all pools, by day."""
    sums: dict[int, float] = {}
    for usage in await every(store):
        sums[usage.day] = sums.get(usage.day, 0.0) + sum(one.slot_s for one in usage.pools.values())
    return sums


async def test_steps_are_written_a_few_at_a_time_and_all_of_them_in_the_end() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    writer = UsageWriter(store, JOB, "n0", clock)
    for step in range(1, 8):
        await writer.add(book(step))
        await clock.advance(EVERY_S / 4)
    written = (await stored(store))[0]
    assert 0 < written < 7 * 8.5
    await writer.write()
    assert await stored(store) == {0: 7 * 8.5}


async def test_another_life_of_the_daemon_goes_on_adding() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    for life in range(3):
        writer = UsageWriter(store, JOB, "n0", clock)
        await writer.add(book(life))
    other = UsageWriter(store, JOB, "n1", clock)
    await other.add(book(0))
    assert await stored(store) == {0: 4 * 8.5}


@pytest.mark.parametrize("fate", [Fate.LOSE_REPLY, Fate.LOSE_REQUEST], ids=["made", "not made"])
async def test_a_write_whose_answer_never_came_is_counted_once(fate: Fate) -> None:
    clock = FakeClock()
    network = Away(clock)
    store = MemoryStore(MemoryCluster(clock), network=network)
    writer = UsageWriter(store, JOB, "n0", clock)
    network.fates = [fate]
    await writer.add(book(1))
    await clock.advance(EVERY_S)
    await writer.add(book(2))
    assert await stored(store) == {0: 2 * 8.5}


@pytest.mark.parametrize("fate", [Fate.LOSE_REPLY, Fate.LOSE_REQUEST], ids=["made", "not made"])
async def test_more_steps_than_a_record_remembers_are_counted_once_too(fate: Fate) -> None:
    clock = FakeClock()
    network = Away(clock)
    store = MemoryStore(MemoryCluster(clock), network=network)
    writer = UsageWriter(store, JOB, "n0", clock)
    steps = 3 * NEWEST_STEPS + 1
    for step in range(steps):
        await writer.add(book(step))
    network.fates = [fate]
    await writer.write()
    await writer.write()
    assert await stored(store) == {0: steps * 8.5}


async def test_a_steps_time_belongs_to_the_day_on_which_it_ended() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    writer = UsageWriter(store, JOB, "n0", clock)
    for step, began in ((1, DAY_S - 5.0), (2, DAY_S - 4.0), (3, DAY_S + 5.0)):
        await writer.add(book(step, began=began))
    await writer.write()
    assert end_day(book(1, began=DAY_S - 5.0)) == 0
    assert await stored(store) == {0: 8.5, 1: 17.0}


async def test_old_usage_is_deleted() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    today = int(clock.wall() // DAY_S)
    assert today > KEPT_DAYS
    for day in (today - KEPT_DAYS - 1, today - KEPT_DAYS, today):
        await store.transact((), (Put(keys.usage("n0", day, "u"), used(day=day).encode()),))
    await forget_old_usage(store, today)
    assert [one.day for one in await every(store)] == [today - KEPT_DAYS, today]


async def put(store: MemoryStore, node: str, day: int, number: int = 0) -> None:
    usage = used(day=day, uid=f"u{number:06d}", pools={"train": PoolSeconds(slot_s=1)})
    await store.transact((), (Put(keys.usage(node, day, usage.uid), usage.encode()),))


async def test_old_usage_of_departed_nodes_is_deleted_once_a_day() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    today = int(clock.wall() // DAY_S)
    for number in range(3 * AT_ONCE):
        await put(store, "gone", today - KEPT_DAYS - 200, number)
    for node in ("gone", "gone-too", "n0"):
        await put(store, node, today - KEPT_DAYS - 1)
        await put(store, node, today)
    await forget_old_usage(store, today)
    assert [one.day for one in await every(store)] == [today] * 3
    await put(store, "gone", 1)
    await forget_old_usage(store, today)
    assert len(await every(store)) == 4, "it was done today"
    await forget_old_usage(store, today + 1)
    assert len(await every(store)) == 3


async def test_a_clock_that_has_run_away_does_not_take_everything() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    today = int(clock.wall() // DAY_S)
    await forget_old_usage(store, today)
    await put(store, "n0", today)
    await forget_old_usage(store, today + 2 * KEPT_DAYS)
    assert len(await every(store)) == 1


class Counting(MemoryStore):
    """Counts what is read of it, and lets nothing else go on while it does not wait."""

    def __init__(self, cluster: MemoryCluster) -> None:
        super().__init__(cluster)
        self.read: list[int] = []

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        listing = await super().between(first, behind, limit)
        self.read.append(len(listing.kvs))
        return listing


async def test_only_the_days_that_are_asked_for_are_read_and_few_records_at_a_time() -> None:
    store = Counting(MemoryCluster(FakeClock()))
    for node in ("a", "a-b", "b"):
        for day in (1, 2, 3):
            for number in range(AT_ONCE + 5):
                await put(store, node, day, number)
    found = await every(store, 2, 2)
    assert len(found) == 3 * (AT_ONCE + 5)
    assert {one.day for one in found} == {2}
    assert sum(store.read) == len(found) + 3, "and one record of each node, to know of it"
    assert max(store.read) == AT_ONCE
    assert await every(store, 4, 9) == []
    assert len(await every(store)) == 9 * (AT_ONCE + 5)


async def test_usage_that_many_ask_for_is_summed_for_one_after_the_other() -> None:
    store = Counting(MemoryCluster(FakeClock()))
    for number in range(3):
        await put(store, "a", number)
    desk = FleetMethods(StoreReader(store), None, lambda uid: None, FakeClock())  # type: ignore[arg-type]
    request = pb.GetUsageRequest(until=10.0 * DAY_S)
    replies = await asyncio.gather(*(desk.GetUsage(request, None) for _ in range(5)))
    assert [reply.usages[0].slot_seconds for reply in replies] == [3.0] * 5
    assert store.read == [1, 3, 0] * 5, "the sums were not made at the same time"


async def test_a_record_that_cannot_be_read_stops_nobody() -> None:
    clock = FakeClock()
    store = MemoryStore(MemoryCluster(clock))
    await store.transact((), (Put(keys.usage("n0", 0, "u"), b"{}x"),))
    writer = UsageWriter(store, JOB, "n0", clock)
    await writer.add(book(1))
    assert await stored(store) == {}


def asked(now: float = 10 * DAY_S, **request: Any) -> list[tuple[dict[str, str], float]]:
    usages = [
        used(day=1, namespace="research", owner="ada", pools={"train": PoolSeconds(slot_s=10, busy_s=5)}),
        used(day=3, namespace="research", owner="bob", pools={"rollout": PoolSeconds(slot_s=20, busy_s=5)}),
        used(day=5, pools={"rollout": PoolSeconds(slot_s=40)}),
    ]
    wanted = parse_usage_query(pb.GetUsageRequest(**request), now)
    sums = UsageSums(wanted.by)
    for one in filter(wanted.has, usages):
        sums.add(one)
    reply = usage_reply(sums)
    return [(dict(one.by), one.slot_seconds) for one in reply.usages]


def test_usage_is_asked_for_by_day_and_namespace() -> None:
    assert asked() == [({"namespace": "default"}, 40.0), ({"namespace": "research"}, 30.0)]
    assert asked(by=["owner"]) == [({"owner": ""}, 40.0), ({"owner": "bob"}, 20.0), ({"owner": "ada"}, 10.0)]
    assert asked(since=2.5 * DAY_S) == [({"namespace": "default"}, 40.0), ({"namespace": "research"}, 20.0)]
    assert asked(until=1.5 * DAY_S) == [({"namespace": "research"}, 10.0)]
    assert asked(namespace="research", by=["pool"]) == [({"pool": "rollout"}, 20.0), ({"pool": "train"}, 10.0)]


def test_usage_of_other_namespaces_is_hidden() -> None:
    with acting_as(Caller("eve", Role.VIEWER, frozenset({"research"}))):
        assert asked() == [({"namespace": "research"}, 30.0)]
        assert asked(namespace="default") == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a time that is none": ({"since": float("nan")}, "since"),
    "a time before all": ({"until": -1.0}, "until"),
    "a time after all": ({"until": float("inf")}, "until"),
    "an end before the beginning": ({"since": 9.0, "until": 1.0}, "until"),
    "what usage is not told by": ({"by": ["team"]}, "by"),
}


@pytest.mark.parametrize(("request_", "field"), WRONG.values(), ids=WRONG)
def test_invalid_requests_name_the_field(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(BadFields) as error:
        asked(**request_)
    assert [one.field for one in error.value.violations] == [field]
