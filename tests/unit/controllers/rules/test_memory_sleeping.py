"""Engines that sleep and wake by plan: the actor, the order, and requests in progress."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import ME, PEER
from engine_workers import engines_at
from hypothesis import given
from hypothesis import strategies as st
from placed_views import SERVED, name_of, place, placed

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.inference.rules import LEFT_S
from controllers.rules.actions import Intent, PublishWeights, SleepEngine, WakeEngine
from controllers.rules.memory import apply_sleep_plan, sleeping_engines
from controllers.rules.step import publish_weights
from controllers.rules.view import EngineView, JobView
from controllers.rules.waits import current_waits
from controllers.rules.workers import Launches, StartEngine, schedule_workers
from gcore.errors import EngineError, EngineMemoryUnknown
from gcore.rollout.client import SamplingParams
from gcore.testing import FakeClock
from gcore.types import Sample, Version, VersionSpan

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


def deeds(view: JobView) -> list[Any]:
    return [intent.action for intent in apply_sleep_plan(view)]


def test_an_engine_that_the_plan_puts_to_sleep_gives_its_memory_back_and_one_that_it_wakes_gets_it_again() -> None:
    view = placed(
        place("cpu:1", asleep=True), place("cpu:1", "j"), j_cpu1=EngineView("j_cpu1", "h:1", None, asleep=True)
    )
    assert deeds(view) == [SleepEngine("policy_cpu1", "")]  # the judge wakes once the slot's memory is free
    free = EngineView("policy_cpu1", "h:1", None, asleep=True)
    assert deeds(replace(view, engines={"policy_cpu1": free})) == [WakeEngine("j_cpu1", "j")]


def test_an_engine_that_sleeps_is_brought_no_weights_and_one_that_woke_is_brought_them_before_it_is_asked() -> None:
    asleep = EngineView("policy_cpu1", "h:1", None, asleep=True)
    assert list(publish_weights(placed(place("cpu:1", asleep=True)))) == []
    assert list(publish_weights(placed(place("cpu:1"), policy_cpu1=asleep))) == []
    (publish,) = publish_weights(placed(place("cpu:1")))
    assert publish.action == PublishWeights("policy_cpu1", SERVED)


def test_engine_does_not_sleep_during_its_weight_update() -> None:
    view = placed(place("cpu:1", asleep=True))
    assert deeds(replace(view, under_way=frozenset({f"publish policy_cpu1 {SERVED}"}))) == []
    assert deeds(replace(view, under_way=frozenset({"publish other 0.0"}))) == [SleepEngine("policy_cpu1", "")]


def test_a_judge_of_another_node_is_left_to_its_own_controller() -> None:
    there = place("cpu:1", "j", asleep=True, node="node-1")
    assert deeds(placed(there)) == []
    gone = placed(there)
    alone = {name: member for name, member in gone.mirror.members.items() if name != PEER}
    assert deeds(replace(gone, mirror=replace(gone.mirror, members=alone))) == [SleepEngine("j_cpu1", "j")]
    assert ME in alone


def test_a_trouble_is_not_tried_again_at_once() -> None:
    known = EngineView("policy_cpu1", "h:1", None, trouble="no")
    (intent,) = apply_sleep_plan(placed(place("cpu:1", asleep=True), policy_cpu1=known))
    assert intent.after > 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["", "j", "k"]), st.booleans(), st.booleans()), max_size=9)
)
def test_no_engine_wakes_on_a_slot_where_one_is_still_to_sleep(given_: list[tuple[int, str, bool, bool]]) -> None:
    unique = {(slot, judge): (asleep, is_asleep) for slot, judge, asleep, is_asleep in given_}
    places = [place(f"cpu:{slot}", judge, asleep=asleep) for (slot, judge), (asleep, _) in unique.items()]
    views = {
        name_of(one): EngineView(name_of(one), "h:1", None, asleep=unique[(int(one.slot[-1]), one.judge)][1])
        for one in places
    }
    view = placed(*places, **views)
    actions = deeds(view)
    assert len({action.instance for action in actions}) == len(actions)
    known = {**view.engines, **view.judges}
    for action in actions:
        assert isinstance(action, SleepEngine) == (action.instance in sleeping_engines(view))
        slot = view.workers[action.instance].slot
        if isinstance(action, WakeEngine):
            others = [n for n, w in view.workers.items() if w.slot == slot and n in sleeping_engines(view)]
            assert all(known[name].asleep for name in others)


def test_on_a_gpu_the_engines_that_are_to_sleep_load_first_and_each_alone() -> None:
    places = (place("cuda:0"), place("cuda:0", "j", asleep=True))
    view = placed(*places)

    def started(**there: EngineView) -> list[str]:
        workers = {name: worker for name, worker in view.workers.items() if name in there or worker.role == "train"}
        seen = replace(view, workers=workers, engines={}, judges={n: v for n, v in there.items() if n[0] == "j"})
        return [name_of(one.place) for one in schedule_workers(seen, Launches(), 0.0) if isinstance(one, StartEngine)]

    assert started() == ["j_cuda0"]
    assert started(j_cuda0=EngineView("j_cuda0", "h:1", None)) == []
    assert started(j_cuda0=EngineView("j_cuda0", "h:1", None, asleep=True)) == ["policy_cuda0"]
    assert started(policy_cuda0=EngineView("policy_cuda0", "h:1", None)) == []


class Sleeper:
    """Notes what it is asked. Responses grow until it is paused, and then come back with what they have."""

    def __init__(self, *, answers: bool = False) -> None:
        self.asked: list[str] = []
        self.asleep = False
        self.given_back = False
        self.version: Version | None = Version(0, 2)
        self.prompts: list[Any] = []
        self.answers = answers
        self.ended = asyncio.Event()
        self.began = asyncio.Event()
        self.clock: FakeClock | None = None
        self.takes_s = 0.0

    async def served(self) -> Version | None:
        return None if self.asleep else self.version

    async def sleeps(self) -> bool:
        return self.asleep

    async def released(self) -> bool:
        return self.given_back

    async def sleep(self) -> None:
        self.asked.append("sleep")
        if self.clock is not None:
            await self.clock.advance(self.takes_s)
        self.ended.set()
        self.asleep = self.given_back = True

    async def take_memory(self) -> None:
        self.asked.append("take_memory")
        self.given_back = False

    async def wake(self, version: Version) -> None:
        self.asked.append("wake")
        self.asleep, self.version = False, version

    async def update_weights(self, path: str, version: Version) -> None:
        self.asked.append(f"update {version}")
        self.asleep, self.version = False, version

    async def resume(self) -> None:
        self.asked.append("resume")

    async def generate_each(
        self, prompts: Any, params: Any, *, seeds: Any, rid: str, growing: Any = None
    ) -> tuple[Sample, ...]:
        self.prompts += prompts
        self.began.set()
        if not self.answers:
            await self.ended.wait()
        tokens, reason = ((7, 8), "stop") if self.answers else ((5, 6), "abort")
        spans = (VersionSpan(Version(0, 2), 0, 2),)
        return tuple(Sample(tokens, (0.0, 0.0), "", reason, spans) for _ in seeds)

    async def close(self) -> None:
        return None


class Books:
    """One controller's book, of an engine that is busy and one that is not."""

    def __init__(self) -> None:
        self.busy, self.free = Sleeper(), Sleeper(answers=True)
        clients = {"http://h:1": self.busy, "http://h:2": self.free}
        self.book = EnginePool(ChangeSignal(), timeout_s=1.0, connect=lambda url, **_: clients[url], told_every=1)  # type: ignore[arg-type, return-value]

    async def begin(self, folder: Path) -> asyncio.Task[tuple[Sample, ...]]:
        await self.book.aim(engines_at(busy="h:1"))
        await self.book.publish("busy", Version(0, 2), folder)
        asked = self.book.generate(Version(0, 2), [(1,)], PARAMS, (3,), "r", None, decode)
        task = asyncio.create_task(asked)
        await self.busy.began.wait()
        await self.book.aim(engines_at(busy="h:1", free="h:2"))
        await self.book.publish("free", Version(0, 2), folder)
        return task


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


async def test_requests_of_a_sleeping_engine_continue_elsewhere_after_their_tokens(tmp_path: Path) -> None:
    one = Books()
    task = await one.begin(tmp_path)
    one.book.shut({"busy"})
    await one.book.sleep("busy")
    (sample,) = await task
    assert one.free.prompts == [(1, 5, 6)]
    assert sample.token_ids == (5, 6, 7, 8)
    assert one.book.views["busy"].asleep
    assert not one.book.views["busy"].trouble


async def test_nothing_new_goes_to_an_engine_that_the_plan_puts_to_sleep(tmp_path: Path) -> None:
    one = Books()
    task = await one.begin(tmp_path)
    one.book.shut({"busy"})
    assert [s.token_ids for s in await one.book.generate(Version(0, 2), [(9,)], PARAMS, (3,), "s")] == [(7, 8)]
    assert one.free.prompts == [(9,)]
    one.busy.ended.set()
    await task


async def test_a_woken_engine_is_brought_the_current_weights_even_if_it_calls_its_own_so(tmp_path: Path) -> None:
    one = Books()
    await one.book.aim(engines_at(busy="h:1"))
    await one.book.sleep("busy")
    await one.book.sleep("busy")  # another life of this controller may do so again
    assert one.busy.asked == ["sleep"]
    await one.book.wake("busy", None)
    assert not one.book.serves(Version(0, 2))
    await one.book.publish("busy", Version(0, 2), tmp_path)
    assert one.busy.asked == ["sleep", "take_memory", "update 0.2"]
    assert one.book.serves(Version(0, 2))


async def test_publication_leaves_a_sleeping_engine_asleep(tmp_path: Path) -> None:
    """The controller that put it to sleep is gone, or it is a judge that another sees to."""
    one = Books()
    one.busy.asleep = True
    await one.book.aim(engines_at(busy="h:1"))
    with pytest.raises(EngineError, match="busy has released its memory"):
        await one.book.publish("busy", Version(0, 2), tmp_path)
    assert one.book.views["busy"].asleep
    assert one.busy.asked == []


async def test_an_engine_that_another_put_to_sleep_since_it_was_woken_here_is_woken_again(tmp_path: Path) -> None:
    """Two controllers may both believe that they own it; it would be offered weights forever, and take none."""
    one = Books()
    await one.book.aim(engines_at(busy="h:1"))
    await one.book.sleep("busy")
    await one.book.wake("busy", None)
    await one.busy.sleep()
    with pytest.raises(EngineError, match="busy has released its memory"):
        await one.book.publish("busy", Version(0, 2), tmp_path)
    assert one.book.views["busy"].asleep
    await one.book.wake("busy", None)
    await one.book.publish("busy", Version(0, 2), tmp_path)
    assert one.book.serves(Version(0, 2))


def test_every_intent_names_its_engine() -> None:
    view = placed(place("cpu:1", asleep=True), place("cpu:2", asleep=True))
    assert [i.condition for i in apply_sleep_plan(view) if isinstance(i, Intent)] == [
        "sleep policy_cpu1",
        "sleep policy_cpu2",
    ]


def test_sleeping_engine_is_not_awaited_and_a_failed_sleep_is_reported() -> None:
    head = SERVED
    asleep = placed(place("cpu:1", asleep=True), policy_cpu1=EngineView("policy_cpu1", "h:1", None, asleep=True))
    assert not [wait for wait in current_waits(asleep) if wait.cause in ("engines", "engine")]
    stuck = placed(place("cpu:1", asleep=True), policy_cpu1=EngineView("policy_cpu1", "h:1", head, trouble="no room"))
    assert "engine policy_cpu1 cannot sleep: no room" in [wait.what for wait in current_waits(stuck)]
    late = placed(place("cpu:1"), policy_cpu1=EngineView("policy_cpu1", "h:1", None, asleep=True, trouble="no room"))
    told = [wait.what for wait in current_waits(late)]
    assert "engine policy_cpu1 cannot wake: no room" in told
    assert any("no engine of" in what for what in told)


async def test_one_engine_that_slept_long_for_once_does_not_make_every_change_dear(tmp_path: Path) -> None:
    one, clock = Books(), FakeClock()
    one.book._clock = clock
    await one.book.aim(engines_at(busy="h:1"))
    assert one.book.slept_s is None
    one.busy.clock = clock
    for one.busy.takes_s in (1.0, 60.0, 1.0):
        await one.book.sleep("busy")
        await one.book.wake("busy", Version(0, 2))
    assert one.book.slept_s == 1.0


class LeftHalfway(Sleeper):
    """Its controller died while it released its memory."""

    async def released(self) -> bool:
        raise EngineMemoryUnknown("the engine is 'falling-asleep'")

    async def take_memory(self) -> None:
        await self.released()


@pytest.mark.parametrize("again", ["sleep", "wake"])
async def test_an_engine_that_was_left_between_awake_and_asleep_is_ended_after_a_while(again: str) -> None:
    engine, clock = LeftHalfway(), FakeClock()
    engine.asleep = True
    book = EnginePool(
        ChangeSignal(),
        timeout_s=1.0,
        connect=lambda url, **_: engine,
        told_every=1,
        clock=clock,  # type: ignore[arg-type, return-value]
    )
    await book.aim(engines_at(busy="h:1"))

    async def ask() -> None:
        with pytest.raises(EngineMemoryUnknown):
            await (book.sleep("busy") if again == "sleep" else book.wake("busy"))
        book.look_after()

    await ask()
    assert not book.views["busy"].hung, "a peer may be about it"
    await clock.advance(LEFT_S)
    await ask()
    assert book.views["busy"].hung
    assert "between asleep and awake" in book.views["busy"].why
