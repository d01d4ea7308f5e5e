"""What waits at an engine while another has room goes there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_workers import ServingEngine, engines_at
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.inference.pool import LOOK_S, EnginePool
from controllers.inference.rules import FILLED, TIMES, EngineQueue, requests_to_move
from gcore.rollout.client import SamplingParams
from gcore.testing import FakeClock
from gcore.types import Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=100)
SERVED = Version(0, 2)


def queue(name: str, *counts: int) -> EngineQueue:
    return EngineQueue(name, sum(counts), tuple((f"{name}/{n}", count) for n, count in enumerate(counts)))


def test_the_newest_of_what_waits_goes_to_the_engine_that_has_nothing() -> None:
    assert requests_to_move([queue("a", 1, 1, 1, 1, 1, 1), queue("b")], 2) == [("a", "a/5"), ("a", "a/4"), ("a", "a/3")]


def test_of_what_an_engine_runs_it_gives_to_one_that_has_woken_as_long_as_it_keeps_twice_as_much() -> None:
    crowded, woken = queue("a", *[4] * 15), queue("b")
    assert requests_to_move([crowded, woken], 100) == [("a", f"a/{n}") for n in (14, 13, 12, 11, 10)]
    assert requests_to_move([queue("a", *[4] * 6), woken], 100) == [], "so few are not in each other's way"


@pytest.mark.parametrize(
    "queues",
    [
        pytest.param([queue("a", 1, 1), queue("b")], id="all of it runs"),
        pytest.param([queue("a", 8), queue("b")], id="a request that would leave nothing to run"),
        pytest.param([queue("a", 1, 1, 1, 1, 1), queue("b", 1, 1)], id="both have what they can run"),
        pytest.param([queue("a")], id="alone"),
        pytest.param([], id="none"),
    ],
)
def test_nothing_is_taken_back_where_nothing_is_won(queues: list[EngineQueue]) -> None:
    assert requests_to_move(queues, 2) == []


@given(st.lists(st.lists(st.integers(1, 8), max_size=12), max_size=6), st.integers(1, 8))
def test_who_gives_keeps_what_it_runs_and_is_never_less_busy_than_who_takes(counts: list[list[int]], rows: int) -> None:
    queues = [queue(str(n), *its) for n, its in enumerate(counts)]
    found = requests_to_move(queues, rows)
    assert len(set(found)) == len(found)
    left = {one.instance: dict(one.requests) for one in queues}
    busy = {one.instance: one.busy for one in queues}
    hungry = [name for name in busy if busy[name] < rows]
    for giver, rid in found:
        assert rid == list(left[giver])[-1], "the newest, which is the last in the queue"
        count = left[giver].pop(rid)
        taker = min(hungry, key=lambda name: (busy[name], name))
        assert busy[taker] < FILLED * rows
        busy[giver] -= count
        busy[taker] += count
        assert busy[giver] >= busy[taker]
        assert busy[giver] >= rows or busy[giver] >= TIMES * busy[taker]
    after = [EngineQueue(name, busy[name], tuple(left[name].items())) for name in busy]
    if all(busy[name] >= rows for name in hungry):
        assert requests_to_move(after, rows) == []


class Queued(ServingEngine):
    """Runs one request at a time, the oldest first; makes two tokens of each, then waits to be told to end it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(SERVED)
        self.waiting: dict[str, asyncio.Future[str]] = {}
        self.prompts: list[tuple[int, ...]] = []

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.prompts += prompts
        ending = self.waiting[rid] = asyncio.get_running_loop().create_future()
        try:
            reason = await ending
        finally:
            del self.waiting[rid]
        return tuple(Sample((5, 6), (0.0, 0.0), "", reason, (VersionSpan(SERVED, 0, 2),)) for _ in seeds)

    async def abort(self, rid: str, count: int) -> None:
        self.waiting[rid].set_result("abort")

    def end_all(self) -> None:
        for ending in list(self.waiting.values()):
            ending.set_result("stop")


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.mark.parametrize("told", [0, 1])
async def test_an_engine_that_comes_later_takes_what_waits_and_goes_on_behind_its_tokens(
    tmp_path: Path, told: int
) -> None:
    clock, made = FakeClock(), dict[str, Queued]()

    def connect(url: str, **_: Any) -> Queued:
        return made.setdefault(url, Queued())

    book = EnginePool(ChangeSignal(), timeout_s=100.0, connect=connect, clock=clock, told_every=told, rows=1)  # type: ignore[arg-type]
    await book.aim(engines_at(first="h:1"))
    await book.publish("first", SERVED, tmp_path)
    asked = [
        asyncio.create_task(
            book.generate(SERVED, [(n,)], PARAMS, (n,), str(n), None, lambda tokens: "".join(map(chr, tokens)))
        )
        for n in range(4)
    ]
    await settle()
    await book.aim(engines_at(first="h:1", second="h:2"))
    await book.publish("second", SERVED, tmp_path)
    await clock.advance(LOOK_S)
    book.look_after()
    await settle()
    first, second = made["http://h:1"], made["http://h:2"]
    assert len(first.waiting) == len(second.waiting) == 2
    behind = () if not told else (5, 6)
    assert sorted(second.prompts) == [(2, *behind), (3, *behind)]
    await clock.advance(LOOK_S)
    book.look_after()
    await settle()
    assert len(first.waiting) == len(second.waiting) == 2
    first.end_all()
    second.end_all()
    found = [sample for samples in await asyncio.gather(*asked) for sample in samples]
    assert [sample.finish_reason for sample in found] == ["stop"] * 4
    await book.close()
