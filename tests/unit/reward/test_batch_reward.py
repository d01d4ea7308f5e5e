"""Rewards of a group: what a batch reward gets, what it must return, and what an error of it means for each response."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

import gcore
from gcore.config.reward import RewardPart, RewardSpec
from gcore.reward import Response, RewardError, RewardResult, batch_reward
from gcore.reward.__main__ import parse_batch
from gcore.reward.api import CheckedReward, OpenReward, with_all_arguments
from gcore.reward.pool import batch_line

SPEC = RewardSpec(name="mine", options={"weight": 2})
FIELDS = {"prompt": "1+1=", "answer": "2", "spec": "a field"}
GROUP = (Response("2"), Response(""), Response("22"))


def scored(function: Callable[..., Any], *responses: str, **fields: Any) -> list[Any]:
    """Values, and texts of errors."""
    found = CheckedReward("mine", batch_reward(function)).score_group(responses or GROUP, fields or FIELDS, SPEC)
    return [str(one) if isinstance(one, RewardError) else one.value for one in found]


def test_a_function_of_trl_gets_prompts_completions_and_columns_as_lists() -> None:
    def reward(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        assert prompts == ["1+1="] * 3
        assert columns["responses"] == list(GROUP)
        return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]

    assert scored(reward) == [1.0, 0.0, 0.0]


def test_entries_and_the_section_of_the_spec_have_names_of_their_own() -> None:
    def reward(responses: list[str], *, fields: list[Any], spec: RewardSpec, bonus: float = 0.5) -> list[float]:
        assert fields == [FIELDS] * 3
        return [len(one) * float(spec.options["weight"]) + bonus for one in responses]

    assert scored(reward) == [2.5, 0.5, 4.5]


def test_results_may_have_parts_and_arrays_are_lists() -> None:
    class Array:
        def tolist(self) -> list[float]:
            return [1, True, 0.5]

    def with_parts(responses: list[str]) -> list[RewardResult]:
        return [RewardResult(1.0, (("letters", len(one)),)) for one in responses]

    assert scored(lambda responses: Array()) == [1.0, 1.0, 0.5]
    found = CheckedReward("mine", batch_reward(with_parts)).score_group(GROUP, FIELDS, SPEC)
    assert found[2] == RewardResult(1.0, (("letters", 2.0),))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        pytest.param([1.0, 2.0], "'mine' returned 2 results for 3 responses", id="too few"),
        pytest.param([1.0] * 4, "'mine' returned 4 results for 3 responses", id="too many"),
        pytest.param(1.0, "'mine' returned a float, not a list", id="a number"),
        pytest.param(None, "'mine' returned None, not a list", id="nothing"),
    ],
)
def test_a_result_that_fits_no_response_is_an_error_of_each(result: Any, said: str) -> None:
    found = scored(lambda responses: result)
    assert len(found) == 3
    assert all(said in one for one in found)


def test_an_exception_is_an_error_of_each_response() -> None:
    def reward(responses: list[str]) -> list[float]:
        raise KeyError("nothing")

    assert scored(reward) == ["reward 'mine' raised KeyError: 'nothing'. Correct the reward"] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, None, "x"], ids=repr)
def test_a_number_that_cannot_be_used_is_an_error_of_its_response_alone(bad: Any) -> None:
    first, second, third = scored(lambda responses: [1.0, bad, 0.0])
    assert (first, third) == (1.0, 0.0)
    assert "reward 'mine' returned" in second


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        pytest.param(
            lambda responses, solution: [0.0], "'solution', and the entry has no field 'solution'", id="field"
        ),
        pytest.param(lambda prompts, completions: [0.0], "'prompts', and the entry has no field 'prompt'", id="prompt"),
    ],
)
def test_a_parameter_that_no_entry_can_fill_is_an_error(reward: Any, said: str) -> None:
    (found,) = scored(reward, "2", answer="2")
    assert said in found


def test_a_reward_by_position_is_refused_with_what_to_change() -> None:
    def reward(responses: list[str], /) -> list[float]:
        return [0.0] * len(responses)

    assert all("Remove the /" in one for one in scored(reward))


def test_a_batch_reward_and_others_are_parts_of_one_reward() -> None:
    spec = RewardSpec(parts=(RewardPart(name="exact"), RewardPart(name="mine", weight=0.5)))

    @gcore.batch_reward
    def place(responses: list[str]) -> list[float]:
        return [float(number) for number in range(len(responses))]

    exact = CheckedReward("exact", with_all_arguments(lambda response, fields: response == fields["answer"]))
    parts = tuple(
        (spec.of_part(part), reward)
        for part, reward in zip(spec.parts, (exact, CheckedReward("mine", place)), strict=True)
    )
    opened = OpenReward(spec, parts)
    assert opened.is_batch
    found = opened.score_group(GROUP, FIELDS)
    assert [one.value for one in found if isinstance(one, RewardResult)] == [1.0, 0.5, 1.0]
    assert found[2] == RewardResult(1.0, (("exact", 0.0), ("mine", 2.0)))


def test_groups_of_one_entry_stay_apart_on_the_way_to_a_process() -> None:
    calls = [
        (0, FIELDS, (Response("a"),), True),
        (0, FIELDS, (Response("b"), Response("c")), True),
        (1, FIELDS, (Response("d"),), False),
        (1, FIELDS, (None,), False),
    ]
    found = parse_batch(json.loads(batch_line(calls)))
    assert [(reward, responses, group) for reward, _, responses, group in found] == [
        (reward, responses, group) for reward, _, responses, group in calls
    ]
