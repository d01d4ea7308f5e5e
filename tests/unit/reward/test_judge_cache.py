"""Verdicts are cached by question, and concurrent equal questions share one request. No caller hangs or pays for another."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import JudgeSpec
from gcore.reward.judges.judge import VerdictCache, question_key, spec_digest
from gcore.reward.judges.types import JudgeError
from gcore.testing import FakeClock


def nothing() -> None:
    """Nobody wants to know."""


def says(value: int, asked: list[int] | None = None) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        if asked is not None:
            asked.append(value)
        return value

    return ask


async def test_the_same_question_is_asked_once() -> None:
    remembered: VerdictCache[int] = VerdictCache(10)
    known: list[str] = []
    assert await remembered.get(b"a", says(1), lambda: known.append("a")) == 1
    assert known == []
    assert await remembered.get(b"a", says(2), lambda: known.append("a")) == 1
    assert known == ["a"]
    assert await remembered.get(b"b", says(3), nothing) == 3


@given(st.integers(0, 4), st.lists(st.integers(0, 6), max_size=40))
def test_least_recently_used_verdict_is_evicted(most: int, keys: list[int]) -> None:
    async def all_of_them() -> None:
        remembered: VerdictCache[int] = VerdictCache(most)
        model: OrderedDict[int, int] = OrderedDict()
        for time, key in enumerate(keys):
            expected = model.pop(key, time)
            model[key] = expected
            while len(model) > most:
                model.popitem(last=False)
            assert await remembered.get(bytes([key]), says(time), nothing) == expected
            assert len(remembered) == len(model)

    asyncio.run(all_of_them())


async def test_a_failure_is_not_remembered() -> None:
    remembered: VerdictCache[int] = VerdictCache(10)

    async def fails() -> int:
        raise JudgeError("no")

    with pytest.raises(JudgeError):
        await remembered.get(b"a", fails, nothing)
    assert await remembered.get(b"a", says(2), nothing) == 2


@dataclass
class Asker:
    """Somebody who wants a verdict. `takes`: seconds of asking; `given_up`: when it is cancelled."""

    key: int
    begins: float
    takes: float
    fails: bool
    given_up: float | None


ASKERS = st.builds(
    Asker,
    st.integers(0, 1),
    st.integers(0, 6).map(float),
    st.integers(0, 5).map(float),
    st.booleans(),
    st.none() | st.integers(0, 10).map(lambda half: half + 0.5),
)


class Scene:
    """Askers on one clock, and what was seen of them."""

    def __init__(self, askers: list[Asker], most: int = 10) -> None:
        self.askers = askers
        self.clock = FakeClock(monotonic=0.0)
        self.remembered: VerdictCache[int] = VerdictCache(most)
        self.asking: list[int] = []
        self.most_at_once = [0, 0]
        self.asked = [0] * len(askers)

    async def ask(self, number: int) -> int:
        asker = self.askers[number]
        self.asked[number] += 1
        self.asking.append(asker.key)
        self.most_at_once[asker.key] = max(self.most_at_once[asker.key], self.asking.count(asker.key))
        try:
            await self.clock.sleep(asker.takes)
        finally:
            self.asking.remove(asker.key)
        if asker.fails:
            raise JudgeError(f"{number}")
        return asker.key * 100 + number

    async def want(self, number: int) -> int:
        asker = self.askers[number]
        await self.clock.sleep(asker.begins)
        return await self.remembered.get(bytes([asker.key]), lambda: self.ask(number), nothing)

    async def give_up(self, task: asyncio.Task[int], at: float) -> None:
        await self.clock.sleep(at)
        task.cancel()

    async def play(self) -> list[int | BaseException]:
        tasks = [asyncio.create_task(self.want(number)) for number in range(len(self.askers))]
        given_up = [
            asyncio.create_task(self.give_up(task, asker.given_up))
            for task, asker in zip(tasks, self.askers, strict=True)
            if asker.given_up is not None
        ]
        return await self.clock.run(asyncio.gather(*tasks, *given_up, return_exceptions=True))  # type: ignore[return-value]


@given(st.lists(ASKERS, max_size=8))
def test_everybody_gets_a_verdict_or_its_own_failure_and_nobody_hangs(askers: list[Asker]) -> None:
    scene = Scene(askers)
    ended = asyncio.run(scene.play())
    for number, asker in enumerate(askers):
        end = ended[number]
        if isinstance(end, asyncio.CancelledError):
            assert asker.given_up is not None
        elif isinstance(end, BaseException):
            assert isinstance(end, JudgeError)
            assert end.what == f"{number}"  # never somebody else's
        else:
            by = end % 100
            assert askers[by].key == asker.key
            assert not askers[by].fails
        assert scene.asked[number] <= 1
    assert scene.asking == []


@given(st.lists(ASKERS, max_size=8), st.integers(0, 3))
def test_where_nothing_fails_no_question_is_ever_asked_by_two_at_once(askers: list[Asker], most: int) -> None:
    scene = Scene([Asker(a.key, a.begins, a.takes, fails=False, given_up=a.given_up) for a in askers], most)
    asyncio.run(scene.play())
    assert max(scene.most_at_once) <= 1


def test_if_the_one_who_asks_is_cancelled_one_of_the_others_asks() -> None:
    first = Asker(0, 0.0, 5.0, fails=False, given_up=1.5)
    scene = Scene([first, *(Asker(0, 1.0, 5.0, fails=False, given_up=None) for _ in range(3))])
    ended = asyncio.run(scene.play())
    assert isinstance(ended[0], asyncio.CancelledError)
    assert ended[1] == ended[2] == ended[3]
    assert sum(scene.asked) == 2


def test_cancelled_waiter_does_not_disturb_others() -> None:
    scene = Scene([Asker(0, 0.0, 5.0, False, None), Asker(0, 1.0, 5.0, False, 1.5), Asker(0, 1.0, 5.0, False, None)])
    ended = asyncio.run(scene.play())
    assert isinstance(ended[1], asyncio.CancelledError)
    assert ended[0] == ended[2] == 0
    assert scene.asked == [1, 0, 0]


def test_if_the_one_who_asks_fails_the_others_ask_for_themselves_at_the_same_time() -> None:
    scene = Scene([Asker(0, 0.0, 5.0, True, None), *(Asker(0, 1.0, 5.0, False, None) for _ in range(3))])
    ended = asyncio.run(scene.play())
    assert isinstance(ended[0], JudgeError)
    assert scene.asked == [1, 1, 1, 1]
    assert ended[1:4] == [1, 2, 3]
    assert scene.clock.monotonic() == 10.0  # not one after the other


def spec(name: str = "tutor", template: str = "{{ response }}") -> JudgeSpec:
    return JudgeSpec.model_validate(
        {"name": name, "external": {"url": "http://here", "model": "m"}, "template": template}
    )


def test_a_question_is_another_one_to_another_judge() -> None:
    digest = spec_digest(spec())
    assert question_key(digest, "q") == question_key(spec_digest(spec()), "q")
    keys = {question_key(digest, "q"), question_key(digest, "p"), question_key(spec_digest(spec("other")), "q")}
    assert len(keys | {question_key(spec_digest(spec(template="{{ response }}!")), "q")}) == 4
    assert question_key(digest, "\ud800") != question_key(digest, "\udfff")  # half a pair, as models write
