"""Agreement of peers within a step: one result for all, under crashes, joins, late arrivals and a repeated step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.flow import peer_collectives
from controllers.flow.peer_collectives import PeerCollectives
from gcore.ledger.collectives import (
    MAX_DEPTH,
    MAX_NAMES,
    Agreed,
    Part,
    add_contribution,
    agree,
    awaited_members,
    check_contribution,
    compute_answer,
    exact_sum,
    finished_answers,
    give,
)
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Member
from gcore.ledger.transactions import Transaction
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put, WatchBatch, WatchEvent
from gcore.system.clock import SystemClock
from gcore.testing import Call, FakeClock, Fate, MemoryCluster, MemoryStore, PerfectNetwork
from gcore.types import Version

KEYS = JobKeys("u")
FIRST, SECOND = Version(0, 3), Version(0, 4)


def part(name: str, at: Version = FIRST, **values: object) -> Part:
    return Part(incarnation=name, at=at, given=values)


# --- the rules


def test_everybody_who_has_not_given_is_awaited() -> None:
    parts = {"a": part("a", x=1), "b": part("b", y=1)}
    assert awaited_members(FIRST, "x", ["a", "b", "c"], parts) == {"b", "c"}


def test_a_peer_that_is_past_the_step_is_not_awaited_and_one_before_it_is() -> None:
    parts = {"a": part("a", x=1), "b": part("b", SECOND), "c": part("c", Version(0, 2))}
    assert awaited_members(FIRST, "x", parts, parts) == {"c"}


def test_a_later_lineage_is_past_every_step_of_an_earlier() -> None:
    assert awaited_members(Version(0, 9), "x", ["b"], {"b": part("b", Version(1, 2))}) == frozenset()


def test_an_answer_holds_what_was_given_in_that_step_only() -> None:
    parts = {"b": part("b", x=2), "a": part("a", x=1), "c": part("c", SECOND, x=3), "d": part("d", y=4)}
    assert compute_answer(FIRST, "x", parts).values == {"a": 1, "b": 2}


def test_contribution_is_never_changed() -> None:
    once = add_contribution(None, "a", FIRST, "x", 1)
    assert add_contribution(once, "a", FIRST, "x", 2).given == {"x": 1}
    assert add_contribution(once, "a", FIRST, "y", 2).given == {"x": 1, "y": 2}
    assert add_contribution(once, "a", SECOND, "y", 2).given == {"y": 2}


def test_a_step_has_room_for_a_bounded_number_of_names() -> None:
    full = part("a", **{f"n{i}": 0 for i in range(MAX_NAMES)})
    with pytest.raises(ValueError, match="at most 64 names"):
        add_contribution(full, "a", FIRST, "one-more", 0)


def test_answers_are_forgotten_when_every_member_is_past_their_step() -> None:
    agreed = [(FIRST, "x"), (SECOND, "x")]
    assert finished_answers(["a", "b"], {"a": part("a", SECOND), "b": part("b", SECOND)}, agreed) == ((FIRST, "x"),)
    assert finished_answers(["a", "b"], {"a": part("a", SECOND)}, agreed) == (), "of b nothing is known"
    assert finished_answers([], {}, agreed) == ()


@pytest.mark.parametrize("name", ["", "X", "a b", "a/b", "é", "a" * 65], ids=repr)
def test_a_name_that_is_no_key_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="invalid name"):
        check_contribution(name, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, "x" * 5000, [1] * 3000], ids=type)
def test_a_value_that_is_no_small_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="'x'"):
        check_contribution("x", value)


def test_too_deeply_nested_contribution_is_refused() -> None:
    """A record may be written that no reader takes: it would stand in the way of every controller of the job."""
    value: object = 1
    for depth in range(1, 3000):
        value = [value] if depth % 2 else {"a": value}
        if depth <= MAX_DEPTH:
            check_contribution("x", value)
            part = Part.decode(add_contribution(None, "a", FIRST, "x", value).encode())
            assert Agreed.decode(compute_answer(FIRST, "x", {"a": part}).encode()).values == {"a": value}
        elif depth < 30 or depth % 500 == 0:
            with pytest.raises(ValueError, match="the value for 'x'"):
                check_contribution("x", value)


@pytest.mark.parametrize("value", [True, "1", None, [1]], ids=repr)
def test_non_numbers_have_no_sum(value: object) -> None:
    with pytest.raises(ValueError, match="not a number"):
        exact_sum([1, value])


@given(st.lists(st.floats(-1e9, 1e9)), st.randoms())
def test_a_sum_does_not_depend_on_the_order(values: list[float], chance: random.Random) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    assert exact_sum(shuffled) == exact_sum(values)


# --- random schedules over the store in memory: views are as old as they like, peers die and join


STEPS = 4


@dataclass
class Flow:
    """A peer whose flow gathers once in each step; `at`: the step it is in."""

    lease: int
    view: JobMirror
    at: int


class World:
    """Peers with old views. A peer acts as `controllers.flow.step` does, on its own view."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.cluster = MemoryCluster(FakeClock())
        self.flows: dict[str, Flow] = {}
        self.answers: dict[Version, dict[str, object]] = {}
        self.lives = 0
        for _ in range(3):
            self.join()

    def mirror(self) -> JobMirror:
        listing = self.cluster.listing(KEYS.prefix)
        events = tuple(WatchEvent("put", kv) for kv in listing.kvs)
        return JobMirror(KEYS).fold(WatchBatch(events, listing.revision, reset=True))

    def join(self) -> None:
        """It begins where head is: where the foremost flow is, or before it."""
        self.lives += 1
        name, lease = f"p{self.lives}", self.cluster.grant(1000)
        member = Member(incarnation=name, node=name, address="")
        self.cluster.transact((), (Put(KEYS.member(name), member.encode(), lease),))
        self.flows[name] = Flow(lease, self.mirror(), max((flow.at for flow in self.flows.values()), default=0))

    def die(self, name: str) -> None:
        self.cluster.end_lease(self.flows.pop(name).lease)

    def act(self, name: str) -> None:
        """Read the answer and go on, or give, or fix, or say that the step is left behind."""
        flow = self.flows[name]
        at, view = Version(0, flow.at), flow.view
        parts = {member: stored.record for member, stored in view.parts.items()}
        mine = view.parts.get(name)
        agreed = view.agreed.get(f"{at}/x")
        if agreed is not None:
            assert self.answers.setdefault(at, agreed.record.values) == agreed.record.values, f"two answers in {at}"
            flow.at += flow.at < STEPS
        elif mine is None or mine.record.at < at:
            # By chance only that it is there, as one says whose flow is elsewhere in the step.
            new = Part(incarnation=name, at=at)
            if self.chance.random() < 0.7:
                new = add_contribution(mine and mine.record, name, at, "x", f"{name} {self.lives}")
            self.make(give(KEYS, mine, new, flow.lease))
        elif "x" not in mine.record.given:
            self.make(give(KEYS, mine, add_contribution(mine.record, name, at, "x", name), flow.lease))
        elif not awaited_members(at, "x", view.members, parts):
            gone = finished_answers(
                view.members, parts, [(s.record.version, s.record.name) for s in view.agreed.values()]
            )
            self.make(agree(KEYS, compute_answer(at, "x", parts), gone))

    def make(self, txn: Transaction) -> None:
        self.cluster.transact(txn.compares, txn.writes)
        for stored in self.mirror().agreed.values():
            found = stored.record
            assert self.answers.setdefault(found.version, found.values) == found.values, "an answer was changed"

    def turmoil(self) -> None:
        name = self.chance.choice(sorted(self.flows))
        roll = self.chance.random()
        if roll < 0.03 and len(self.flows) > 1:
            self.die(name)
        elif roll < 0.06:
            self.join()
        elif roll < 0.4:
            self.flows[name].view = self.mirror()
        else:
            self.act(name)


@pytest.mark.parametrize("seed", range(40))
def test_under_deaths_joins_and_old_views_nobody_reads_another_answer_and_all_get_on(seed: int) -> None:
    world = World(seed)
    for _ in range(150):
        world.turmoil()
    for _ in range(20 * STEPS):  # the faults have stopped
        for name in sorted(world.flows):
            world.flows[name].view = world.mirror()
            world.act(name)
    assert {flow.at for flow in world.flows.values()} == {STEPS}
    assert len(world.mirror().agreed) <= STEPS


# --- whole peers


class Node:
    """A peer's collectives with a mirror that a watch feeds."""

    def __init__(self, cluster: MemoryCluster, name: str, clock: SystemClock) -> None:
        self.store = MemoryStore(cluster, name=name, network=PerfectNetwork(clock))
        self.name, self.cluster = name, cluster
        self.mirror = JobMirror(KEYS)
        self.changes = ChangeSignal()
        self.lease = cluster.grant(1000)
        self.collectives = PeerCollectives(self.store, lambda: self.mirror, name, self.lease, self.changes, clock)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        member = Member(incarnation=self.name, node=self.name, address="")
        key = KEYS.member(self.name)
        await self.store.transact((Compare(key, 0),), (Put(key, member.encode(), self.lease),))
        self._tasks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self.collectives.answer_others()),
        ]
        await self.changes.until(lambda: self.name in self.mirror.members)

    async def _watch(self) -> None:
        async for batch in self.store.watch(KEYS.prefix):
            self.mirror = self.mirror.fold(batch)
            self.changes.notify()

    async def gather(self, at: Version, name: str, value: object) -> tuple[object, ...]:
        self.collectives.begin(at)
        return await self.collectives.gather(at, name, value)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def nodes(*names: str) -> AsyncIterator[list[Node]]:
    clock = SystemClock()
    cluster = MemoryCluster(clock)
    made = [Node(cluster, name, clock) for name in names]
    try:
        for node in made:
            await node.start()
        for node in made:
            await node.changes.until(lambda node=node: len(node.mirror.members) == len(names))  # type: ignore[misc]
        yield made
    finally:
        for node in made:
            await node.stop()


async def test_all_read_the_same_values_in_the_order_of_the_peers() -> None:
    async with nodes("b", "a", "c") as (b, a, c):
        answers = await asyncio.gather(b.gather(FIRST, "x", 2), a.gather(FIRST, "x", 1), c.gather(FIRST, "x", [3]))
        assert answers == [(1, 2, [3])] * 3


async def test_a_sum_is_one_number_for_all() -> None:
    async with nodes("a", "b") as (a, b):
        for node in (a, b):
            node.collectives.begin(FIRST)
        sums = await asyncio.gather(a.collectives.sum(FIRST, "n", 0.1), b.collectives.sum(FIRST, "n", 0.2))
        assert sums == [0.1 + 0.2] * 2
        with pytest.raises(ValueError, match="not a number"):
            await a.collectives.sum(FIRST, "m", "one")  # type: ignore[arg-type]


async def test_peer_that_repeats_the_step_reads_the_agreed_values() -> None:
    async with nodes("a", "b") as (a, b):
        await asyncio.gather(a.gather(FIRST, "x", 1), b.gather(FIRST, "x", 2))
        assert await a.gather(FIRST, "x", 77) == (1, 2)


async def test_a_peer_that_dies_before_it_gave_is_not_waited_for() -> None:
    async with nodes("a", "b") as (a, b):
        waiting = asyncio.create_task(a.gather(FIRST, "x", 1))
        await a.changes.until(lambda: "a" in a.mirror.parts)
        assert not waiting.done()
        await b.stop()
        b.cluster.end_lease(b.lease)
        assert await waiting == (1,)


async def test_a_peer_that_left_the_step_behind_says_so_and_is_not_waited_for() -> None:
    """It joined late, or was slow: the next step is its first, and it never comes to what the others wait in."""
    async with nodes("a", "b") as (a, b):
        b.collectives.begin(SECOND)
        assert await a.gather(FIRST, "x", 1) == (1,)
        together = await asyncio.gather(a.gather(SECOND, "x", 5), b.gather(SECOND, "x", 6))
        assert together == [(5, 6)] * 2


async def test_a_peer_that_joins_afterwards_reads_the_answer_without_being_in_it() -> None:
    async with nodes("a", "b") as (a, b):
        await asyncio.gather(a.gather(FIRST, "x", 1), b.gather(FIRST, "x", 2))
        late = Node(a.cluster, "c", SystemClock())
        await late.start()
        try:
            assert await late.gather(FIRST, "x", 3) == (1, 2)
        finally:
            await late.stop()


async def test_answers_of_steps_that_all_have_left_are_forgotten() -> None:
    async with nodes("a", "b") as (a, b):
        for at in (FIRST, SECOND, Version(0, 5)):
            await asyncio.gather(a.gather(at, "x", 1), b.gather(at, "x", 2))
        await a.changes.until(lambda: f"{Version(0, 5)}/x" in a.mirror.agreed)
        assert f"{FIRST}/x" not in a.mirror.agreed


class LossyNetwork:
    """Loses requests and replies of transactions, some of which arrive later."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    async def request(self, call: Call) -> Fate:
        await asyncio.sleep(0)
        if call.kind != "transact" or self._chance.random() > 0.4:
            return Fate.DELIVER
        return self._chance.choice([Fate.LOSE_REQUEST, Fate.LOSE_REPLY, Fate.DELIVER_LATE])

    async def reply(self, call: Call) -> None:
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(4))
async def test_over_a_network_that_loses_requests_and_replies_all_read_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLLECTIVE_LOOK_AGAIN_S", "TURN_S"):
        monkeypatch.setattr(peer_collectives, name, 0.01)
    async with nodes("a", "b", "c") as crew:
        for number, node in enumerate(crew):
            node.store.network = LossyNetwork(10 * seed + number)
            node.store._timeout_s = 0.0
        for at in (FIRST, SECOND):
            given = [node.gather(at, "x", node.name) for node in crew]
            first, second, third = await asyncio.gather(*given)
            assert first == second == third == ("a", "b", "c")
            crew[0].cluster.deliver_late()
            assert await crew[0].gather(at, "x", "again") == first
