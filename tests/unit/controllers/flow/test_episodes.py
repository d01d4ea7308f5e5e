"""Responses of several turns on engines: concurrent, each on the engine that has its cache; and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controllers.flow.episodes import EnvironmentEpisodes, EpisodeRequest, new_tool_pool
from controllers.flow.evaluation import score_answers
from controllers.inference.rules import Affinity, RouteCandidate, choose_engine
from gcore.config import parse_spec
from gcore.errors import EngineError
from gcore.reward.api import RewardError, RewardResult
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import Done, Observation, Said, Setting, Turn
from gcore.rollout.environments.tools import calculator
from gcore.testing import FakeClock
from gcore.types import FinishReason, Prompt, PromptRef, Sample, Version, VersionSpan

HEAD = Version(0, 3)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=40, min_new_tokens=3, stop=("END",))


class Letters:
    """A token is a character; 0 ends an answer."""

    chat = False

    def encode_behind(self, before: Sequence[int], text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) for one in ids if one)


class Engines:
    """Two engines in turn, unless a response has a seat; what they say follows from what is before it."""

    def __init__(self, *, breaks: int = 0, reason: FinishReason = "stop") -> None:
        self.asked: list[SimpleNamespace] = []
        self._breaks, self._reason = breaks, reason

    async def generate(
        self,
        version: Version,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        seeds: Sequence[int],
        rid: str,
        follow: Any = None,
        decode: Any = None,
        *,
        seat: Affinity,
    ) -> tuple[Sample, ...]:
        before = Letters().decode(prompts[0])
        last, seat.instance = seat.instance, seat.instance or f"e{len(self.asked) % 2}"
        self.asked.append(
            SimpleNamespace(before=before, params=params, seed=seeds[0], rid=rid, on=seat.instance, last=last)
        )
        await asyncio.sleep(0)
        if len(self.asked) <= self._breaks:
            raise EngineError("it broke")
        said = "<<6*7>>" if ">>" not in before else f", by {seeds[0] % 97}"
        ids = tuple(map(ord, said)) if said.endswith(">>") else (*map(ord, said), 0)
        span = VersionSpan(version, 0, len(ids))
        return (Sample(ids, (-1.0,) * len(ids), "", self._reason, (span,)),)


class Calculator:
    names = ("calculator",)

    def within(self, holding: Any, seen: Any) -> Calculator:
        return self

    def discard_pictures(self) -> None:
        pass

    async def call(self, name: str, argument: str) -> Said:
        return Said(calculator(argument))


class Moody:
    """Fails for a seed that it does not like."""

    liked: list[bool]

    def __init__(self, setting: Setting) -> None:
        self._likes = Moody.liked.pop(0)

    async def reset(self) -> Observation:
        return Observation()

    async def step(self, turn: Turn) -> Done:
        if not self._likes:
            raise ValueError("no mood")
        return Done(1.0)

    async def close(self) -> None:
        pass


def episodes(engines: Engines, told: list[str] | None = None, maker: Any = None, **section: Any) -> EnvironmentEpisodes:
    section = {"name": "tools", "tools": {"names": ["calculator"]}, "options": {"form": "tags"}} | section
    spec = parse_spec(
        {
            "name": "job",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 3},
            "rollout": {"max_new_tokens": 40},
            "environment": section,
        }
    )
    events = told if told is not None else []
    found = EnvironmentEpisodes(spec, engines, Calculator(), FakeClock(), lambda what, trace: events.append(what))  # type: ignore[arg-type]
    if maker is not None:
        found._maker = maker
    return found


def conversation(params: SamplingParams = PARAMS) -> EpisodeRequest:
    prompt = Prompt(PromptRef(0, 0, 0), "6*7=", tuple(map(ord, "6*7=")), {}, "data")
    opened: Any = SimpleNamespace(renderer=Letters(), pictures=None)
    return EpisodeRequest(HEAD, prompt, opened, params)


async def test_each_response_goes_on_where_it_was_with_all_that_is_before_it() -> None:
    engines, ended = Engines(), list[tuple[int, str]]()
    made = await episodes(engines).side_by_side(
        conversation(), (5, 6, 7), "r", lambda number, sample: ended.append((number, sample.text))
    )
    assert all(sample.text.startswith("<<6*7>>42, by ") for sample in made)
    assert len({sample.text for sample in made}) == 3, "each turn has a seed of its own response"
    assert sorted(ended) == [(number, sample.text) for number, sample in enumerate(made)]
    assert [sample.observed for sample in made] == [((7, 9),)] * 3
    first, later = engines.asked[:3], engines.asked[3:]
    assert {one.before for one in first} == {"6*7="}
    assert {one.before for one in later} == {"6*7=<<6*7>>42"}
    served = {one.rid.split("/")[1]: one.on for one in first}
    assert all(one.last == one.on == served[one.rid.split("/")[1]] for one in later)
    assert {one.params.stop for one in engines.asked} == {("END", ">>")}
    assert [(one.params.max_new_tokens, one.params.min_new_tokens) for one in (first[0], later[0])] == [
        (40, 3),
        (33, 0),
    ]
    assert len({one.rid for one in engines.asked}) == 6
    assert [one.seed for one in first] == [5, 6, 7]


async def test_the_same_seeds_make_the_same_responses_and_greedy_ones_have_none() -> None:
    one, again = Engines(), Engines()
    assert await episodes(one).side_by_side(conversation(), (5,), "r") == await episodes(again).side_by_side(
        conversation(), (5,), "other"
    )
    greedy = Engines()
    await episodes(greedy).side_by_side(conversation(SamplingParams(0.0, 40)), (5,), "r")
    assert {asked.seed for asked in greedy.asked} == {0}


async def test_an_engine_that_fails_is_the_callers_to_ask_again() -> None:
    with pytest.raises(EngineError, match="broke"):
        await episodes(Engines(breaks=2)).side_by_side(conversation(), (5, 6), "r")
    with pytest.raises(EngineError, match="aborted"):
        await episodes(Engines(reason="abort")).side_by_side(conversation(), (5, 6), "r")


async def test_an_environment_that_raises_costs_its_prompt_or_is_tried_again() -> None:
    told: list[str] = []
    Moody.liked = [True, False]
    with pytest.raises(RewardError, match="raised ValueError: no mood in step, after turn 1") as caught:
        await episodes(Engines(), told, Moody).side_by_side(conversation(), (5, 6), "r")
    assert "no mood" in caught.value.trace
    Moody.liked, engines = [False, False, True], Engines()
    (made,) = await episodes(engines, told, Moody, on_error="retry").side_by_side(conversation(), (5,), "r")
    assert made.reward_parts == (("environment", 1.0),)
    assert len(told) == 2
    assert len({asked.seed for asked in engines.asked}) == 3
    Moody.liked = [False, False, False]
    with pytest.raises(RewardError, match="no mood"):
        await episodes(Engines(), told, Moody, on_error="retry").side_by_side(conversation(), (5,), "r")


async def test_in_an_evaluation_what_fails_is_not_scored_and_the_others_are() -> None:
    Moody.liked = [True, False, True]
    found = await episodes(Engines(), None, Moody).each([conversation()] * 3, (5, 6, 7), "r")
    assert [isinstance(one, RewardError) for one in found] == [False, True, False]

    class Scoring:
        source = SimpleNamespace(name="set", reward=SimpleNamespace(parts=(), answer="answer"))

        async def each_scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
            return tuple(RewardResult(1.0) for _ in samples)

    marks = await score_answers(Scoring(), 0.5, conversation().prompt, found, HEAD)  # type: ignore[arg-type]
    assert [(one.shown.correct, bool(one.shown.unscored)) for one in marks] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert "no mood" in marks[1].shown.unscored
    assert isinstance(found[0], Sample)
    told = replace(found[0], text="6*7=<<6*7>>42", observed_text=((11, 13),))
    (mark,) = await score_answers(Scoring(), 0.5, conversation().prompt, [told], HEAD)  # type: ignore[arg-type]
    assert mark.shown.response == "6*7=<<6*7>>⟦42⟧", "as `gcore samples` shows it"


async def test_a_job_without_an_environment_has_no_tools() -> None:
    tree = {"name": "j", "model": {"path": "m"}, "data": {"path": "d"}, "flow": {"steps": 1}}
    spec = parse_spec(tree | {"rollout": {"max_new_tokens": 4}})
    assert new_tool_pool(spec, FakeClock(), lambda what, trace: None, "") is None


@pytest.mark.parametrize(
    ("last", "serving", "chosen"),
    [("busy", True, "busy"), ("busy", False, "idle"), ("gone", True, "idle"), (None, True, "idle")],
)
def test_a_turn_goes_to_the_engine_of_the_last_one_while_that_serves(
    last: str | None, serving: bool, chosen: str
) -> None:
    loads = [RouteCandidate("busy", 9.0, serving), RouteCandidate("idle", 0.0, True)]
    assert choose_engine(loads, 1.0, None, last) == chosen
