"""The choice of an engine for a request.

Silent and hung engines, and their reports. Requests that queue at one engine move to another with room.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_workers import ServingEngine, engines_at
from hypothesis import given
from hypothesis import strategies as st

from controllers.changes import ChangeSignal
from controllers.inference.pool import HEALTH_CHECK_S, EnginePool
from controllers.inference.rules import (
    FILLED,
    TIMES,
    EngineHealth,
    EngineQueue,
    HealthLimits,
    HealthState,
    RouteCandidate,
    choose_engine,
    requests_to_move,
)
from gcore.rollout.client import SamplingParams
from gcore.testing import FakeClock
from gcore.types import Sample, Version, VersionSpan

loads = st.lists(
    st.builds(RouteCandidate, instance=st.sampled_from("abcdef"), owed=st.integers(0, 64), serving=st.booleans()),
    unique_by=lambda load: load.instance,
)
sizes = st.integers(1, 16)


def test_no_engines_gives_no_choice() -> None:
    assert choose_engine([], 8) is None


def test_of_two_that_are_equally_busy_the_one_that_serves_is_taken() -> None:
    assert choose_engine([RouteCandidate("a", 8, serving=False), RouteCandidate("b", 8, serving=True)], 8) == "b"


@given(loads, sizes)
def test_a_new_request_goes_to_the_least_busy_whether_it_serves_or_is_on_its_way(
    found: list[RouteCandidate], size: int
) -> None:
    chosen = choose_engine(found, size)
    assert (chosen is None) == (not found)
    assert all(load.owed >= next(c for c in found if c.instance == chosen).owed for load in found)


@given(st.integers(1, 40), st.integers(2, 5), sizes)
def test_a_burst_is_dealt_evenly_while_only_one_of_them_serves(requests: int, engines: int, size: int) -> None:
    samples = dict.fromkeys(range(engines), 0)
    for _ in range(requests):
        chosen = choose_engine([RouteCandidate(str(e), n, serving=e == 0) for e, n in samples.items()], size)
        assert chosen is not None
        samples[int(chosen)] += size
    assert max(samples.values()) - min(samples.values()) <= size


@given(loads, sizes, st.sampled_from("abcdef"))
def test_a_request_moves_only_to_one_that_serves_and_is_then_no_busier(
    found: list[RouteCandidate], size: int, held: str
) -> None:
    own = next((load for load in found if load.instance == held), None)
    chosen = next((load for load in found if load.instance == choose_engine(found, size, held)), None)
    if own is None or chosen is None or chosen.instance == held:
        return
    assert not own.serving
    assert chosen.serving
    assert chosen.owed + size <= own.owed


@given(st.integers(1, 12), sizes)
def test_an_engine_that_never_comes_up_holds_nothing_back(requests: int, size: int) -> None:
    """One serves and answers one request after the other; those that wait for the other engine all get there."""
    serving, waiting = 0, requests
    for _ in range(2 * requests):
        serving = max(0, serving - 1)
        own = waiting * size
        while (
            waiting
            and choose_engine([RouteCandidate("a", serving * size, True), RouteCandidate("b", own, False)], size, "b")
            == "a"
        ):
            serving, waiting = serving + 1, waiting - 1
            own = waiting * size
    assert waiting == 0


candidates = st.lists(
    st.builds(
        RouteCandidate,
        instance=st.sampled_from("abcdef"),
        owed=st.integers(0, 64),
        serving=st.booleans(),
        near=st.booleans(),
        room=st.booleans(),
    ),
    unique_by=lambda load: load.instance,
)


@given(candidates, sizes, st.none() | st.sampled_from("abcdef"))
def test_a_request_goes_to_the_least_busy_engine_near_its_pictures_with_room_else_to_the_least_busy(
    found: list[RouteCandidate], size: int, held: str | None
) -> None:
    name = choose_engine(found, size, held)
    chosen = next((load for load in found if load.instance == name), None)
    if chosen is None or any(load.instance == held for load in found):
        return
    near = [load for load in found if load.near and load.room and not all(load.near for load in found)]
    assert chosen.owed == min(load.owed for load in near or found)
    if near:
        assert chosen.near
        assert chosen.room, "otherwise it would wait"


@given(candidates, sizes, st.none() | st.sampled_from("abcdef"))
def test_pictures_never_keep_a_request_waiting_that_a_serving_engine_could_take(
    found: list[RouteCandidate], size: int, held: str | None
) -> None:
    own = next((load for load in found if load.instance == held), None)
    chosen = next((load for load in found if load.instance == choose_engine(found, size, held)), None)
    if own is None or chosen is None or own.serving:
        return
    free = [load for load in found if load.serving and load.owed + size <= own.owed]
    assert (chosen in free) if free else chosen == own


@given(candidates, sizes, st.none() | st.sampled_from("abcdef"))
def test_where_all_engines_are_alike_for_the_pictures_room_does_not_matter(
    found: list[RouteCandidate], size: int, held: str | None
) -> None:
    """All requests of text jobs have `near` engines only."""
    alike = [RouteCandidate(load.instance, load.owed, load.serving, near=True, room=load.room) for load in found]
    text = [RouteCandidate(load.instance, load.owed, load.serving) for load in found]
    assert choose_engine(alike, size, held) == choose_engine(text, size, held)


@given(st.integers(1, 40), st.integers(2, 5), sizes, st.integers(1, 64))
def test_requests_with_pictures_leave_the_local_engine_only_when_it_is_full(
    requests: int, engines: int, size: int, rows: int
) -> None:
    samples = dict.fromkeys(range(engines), 0)
    for _ in range(requests):
        chosen = choose_engine(
            [RouteCandidate(str(e), n, True, near=e == 0, room=n + size <= rows) for e, n in samples.items()], size
        )
        assert chosen is not None
        if samples[0] + size <= rows:
            assert chosen == "0"
        else:
            assert samples[int(chosen)] == min(samples.values())
        samples[int(chosen)] += size
    # No engine waits for another one: beyond the room of the local engine all are dealt evenly.
    if samples[0] > rows:
        assert max(samples.values()) - min(samples.values()) <= size


PATIENCE = HealthLimits(silent_s=30.0, watchdog_s=120.0, request_s=100.0)


def test_busy_engine_without_a_response_is_silent_then_hung() -> None:
    pulse = EngineHealth(0.0).begins(1000.0)
    assert pulse.look(PATIENCE, 1029.9, busy=True) == pulse
    assert pulse.verdict(PATIENCE, 1029.9) is HealthState.WELL
    silent = pulse.look(PATIENCE, 1030.0, busy=True)
    assert silent.verdict(PATIENCE, 1030.0) is HealthState.SILENT
    assert (
        silent.why(PATIENCE, 1030.0) == "has not responded for 30 s; its requests go to other engines, and it is probed"
    )
    assert silent.verdict(PATIENCE, 1119.9) is HealthState.SILENT
    assert silent.verdict(PATIENCE, 1120.0) is HealthState.HUNG
    assert silent.why(PATIENCE, 1120.0) == "has not responded for 120 s; the node ends it and starts another"


def test_silent_engine_stays_silent_until_it_answers() -> None:
    silent = EngineHealth(0.0).look(PATIENCE, 30.0, busy=True)
    assert silent.look(PATIENCE, 50.0, busy=False).silent
    assert silent.begins(60.0) == silent
    back = silent.answers(70.0)
    assert back.verdict(PATIENCE, 500.0) is HealthState.WELL
    assert back.why(PATIENCE, 500.0) == ""


def test_idle_engine_is_never_silent_and_never_probed() -> None:
    pulse = EngineHealth(0.0)
    assert pulse.look(PATIENCE, 1e6, busy=False) == pulse
    assert not pulse.wants_probe(PATIENCE, 1e6, 0.0, busy=False)


def test_one_at_work_is_asked_after_a_third_of_the_time_and_a_silent_one_each_second() -> None:
    pulse = EngineHealth(0.0)
    assert not pulse.wants_probe(PATIENCE, 9.9, 0.0, busy=True)
    assert pulse.wants_probe(PATIENCE, 10.0, 0.0, busy=True)
    assert not pulse.wants_probe(PATIENCE, 15.0, 10.0, busy=True)
    silent = pulse.look(PATIENCE, 30.0, busy=True)
    assert not silent.wants_probe(PATIENCE, 30.9, 30.0, busy=False)
    assert silent.wants_probe(PATIENCE, 31.0, 30.0, busy=False)


def test_engine_with_two_timed_out_requests_in_a_row_is_hung_though_it_responds() -> None:
    pulse = EngineHealth(0.0).begins(0.0).answers(90.0)
    once = pulse.fails(PATIENCE, begun=0.0, now=100.0)
    assert once.verdict(PATIENCE, 100.0) is HealthState.WELL
    together = once.fails(PATIENCE, begun=1.0, now=101.0)  # begun before the first ran out: the same standstill
    assert together.verdict(PATIENCE, 101.0) is HealthState.WELL
    again = together.answers(150.0).fails(PATIENCE, begun=102.0, now=202.0)
    assert again.verdict(PATIENCE, 202.0) is HealthState.HUNG
    assert again.why(PATIENCE, 202.0) == (
        "responds, but two requests in a row timed out after 100 s; the node ends it and starts another"
    )


def test_a_response_in_between_or_a_quick_refusal_is_no_standstill() -> None:
    once = EngineHealth(0.0).fails(PATIENCE, begun=0.0, now=100.0)
    assert once.responds(101.0).fails(PATIENCE, begun=102.0, now=202.0).verdict(PATIENCE, 202.0) is HealthState.WELL
    assert once.fails(PATIENCE, begun=102.0, now=102.1).verdict(PATIENCE, 103.0) is HealthState.WELL


def test_weights_that_are_not_taken_make_it_silent_from_when_it_was_asked() -> None:
    idle = EngineHealth(5.0)
    asked = idle.in_vain(1000.0)
    assert asked.silent
    assert asked.why(PATIENCE, 1001.0) == ""  # it may just have died, which its supervisor tells
    assert asked.in_vain(1100.0).verdict(PATIENCE, 1120.0) is HealthState.HUNG
    assert asked.answers(1002.0).verdict(PATIENCE, 5000.0) is HealthState.WELL


@given(
    st.lists(st.tuples(st.sampled_from(["begins", "answers", "responds", "wait"]), st.floats(0.0, 29.0)), max_size=40)
)
def test_engine_that_responds_in_time_is_never_silent(happenings: list[tuple[str, float]]) -> None:
    now, pulse = 0.0, EngineHealth(0.0)
    for what, pause in happenings:
        now += pause
        pulse = pulse.look(PATIENCE, now, busy=True)
        assert pulse.verdict(PATIENCE, now) is HealthState.WELL
        pulse = pulse.answers(now) if what in ("wait", "begins") else getattr(pulse, what)(now)


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
def test_moving_requests_never_makes_the_giver_less_busy_than_the_taker(counts: list[list[int]], rows: int) -> None:
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
    await clock.advance(HEALTH_CHECK_S)
    book.look_after()
    await settle()
    first, second = made["http://h:1"], made["http://h:2"]
    assert len(first.waiting) == len(second.waiting) == 2
    behind = () if not told else (5, 6)
    assert sorted(second.prompts) == [(2, *behind), (3, *behind)]
    await clock.advance(HEALTH_CHECK_S)
    book.look_after()
    await settle()
    assert len(first.waiting) == len(second.waiting) == 2
    first.end_all()
    second.end_all()
    found = [sample for samples in await asyncio.gather(*asked) for sample in samples]
    assert [sample.finish_reason for sample in found] == ["stop"] * 4
    await book.close()
