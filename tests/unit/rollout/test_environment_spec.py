"""The section `environment`: contradictions are refused, and an environment's metadata reaches rewards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers

from controllers.api.submission.checks import check_tags
from controllers.flow.job_data import make_response
from gcore.config import JobSpec, parse_spec
from gcore.config.reward import RewardSpec
from gcore.config.rollout import EnvironmentSpec
from gcore.data.renderer import PromptRenderer
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import SpecError
from gcore.reward.__main__ import parse_batch
from gcore.reward.api import Response, RewardError, RewardResult, find_reward
from gcore.reward.pool import batch_line
from gcore.testing.flows import group_of

TOOLS = {"name": "tools", "tools": {"names": ["calculator"]}}


def spec(environment: dict[str, Any] | None, **more: Any) -> JobSpec:
    tree: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 8},
    }
    return parse_spec(tree | more | ({} if environment is None else {"environment": environment}))


def test_a_response_has_room_for_twice_what_the_model_may_make_unless_the_spec_says_more() -> None:
    environment = spec(TOOLS).environment
    assert environment is not None
    assert environment.room(8) == 16
    told = spec({**TOOLS, "max_tokens": 30}).environment
    assert told is not None
    assert (told.room(8), told.room(40)) == (30, 40)


@pytest.mark.parametrize(
    ("environment", "more", "words"),
    [
        ({**TOOLS, "max_tokens": 7}, {}, "is below rollout.max_new_tokens"),
        (TOOLS, {"model": {"path": "m", "max_length": 16}}, "leaves no room for a prompt"),
        ({**TOOLS, "max_turns": 0}, {}, "max_turns"),
        ({**TOOLS, "max_turn": 2}, {}, "max_turns"),
        ({**TOOLS, "tools": {"names": ["a", "a"]}}, {}, "listed twice"),
        ({**TOOLS, "tools": {"names": ["calculator", "/m.py:calculator"]}}, {}, "two tools are called 'calculator'"),
        (TOOLS, {"train": {"loss": "sft"}, "flow": {"steps": 3, "name": "sft"}}, "cannot use an environment"),
        (None, {"reward": {"name": "environment"}}, "no section environment"),
        (None, {"reward": {"parts": [{"name": "numeric"}, {"name": "environment"}]}}, "no section environment"),
        (TOOLS, {"reward": {"name": "environment"}}, "environment 'tools' gives none"),
        (TOOLS, {"reward": {"parts": [{"name": "environment"}, {"name": "numeric"}]}}, "'tools' gives none"),
    ],
)
def test_invalid_environments_are_refused(environment: dict[str, Any] | None, more: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(environment, **more)


SEEING = {"data": {"path": "d", "images": "images"}}


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_an_environment_and_tools_may_have_pictures(engine: str) -> None:
    found = spec(
        {**TOOLS, "tools": {"names": ["crop"], "max_pictures": 3}},
        **SEEING,
        rollout={"max_new_tokens": 8, "engine": engine},
    )
    assert found.environment is not None
    assert found.environment.tools.max_pictures == 3


@pytest.mark.parametrize(
    ("environment", "more", "words"),
    [
        (
            {**TOOLS, "tools": {"names": ["crop"], "max_pictures": 1}},
            {},
            "data has no field of pictures; set data.images",
        ),
        (
            {**TOOLS, "tools": {"names": ["crop"], "max_pictures": 1}},
            SEEING | {"rollout": {"max_new_tokens": 8, "engine": "sglang"}},
            "an environment together with data.images needs rollout.engine: torch or hf, not sglang",
        ),
        (None, SEEING | {"agent": {"name": "mine"}}, "agent does not support pictures yet"),
        ({**TOOLS, "tools": {"names": ["crop"], "max_pictures": 65}}, SEEING, "max_pictures"),
    ],
)
def test_pictures_that_no_turn_can_show_are_refused(
    environment: dict[str, Any] | None, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        spec(environment, **more)


def test_the_reward_environment_hands_on_what_the_environment_said() -> None:
    reward, settings = find_reward("environment"), RewardSpec(name="environment")
    sample = replace(group_of([0.0]).samples[0], reward_parts=(("environment", 0.25),), observed=((0, 2),))
    response = make_response(sample)
    assert reward(response, {}, settings) == RewardResult(0.25)
    assert response.tokens == len(sample.token_ids) - 2
    assert reward(Response("cut", 3, True), {}, settings) == RewardResult(0.0)
    with pytest.raises(RewardError, match="returned no reward"):
        reward(Response("whole", 3), {}, settings)


def test_environment_score_reaches_the_scoring_process() -> None:
    fields = {"a": 1}
    line = batch_line([(0, fields, (Response("x", 3, True, 0.5),), False), (0, fields, (Response("y"),), False)])
    found = [response for _, _, (response,), _ in parse_batch(json.loads(line)) if response is not None]
    assert [(r, r.tokens, r.truncated, r.environment) for r in found] == [("x", 3, True, 0.5), ("y", None, False, None)]


def tokenizer(model: Any) -> PromptRenderer:
    own = ModelTokenizer(Tokenizer(model), special_tokens={"unk_token": "?"}, settings={}, max_length=None)
    return PromptRenderer(own, None, where="here")


def test_texts_around_a_call_that_the_model_cannot_say_are_refused_with_the_option() -> None:
    letters = {char: number for number, char in enumerate("<>()=-0123456789?")}
    for model in (models.BPE(letters, []), models.BPE(letters, [], unk_token="?")):
        for option in ("open", "close", "before", "after", "failed"):
            told = TOOLS | {"options": {"form": "tags", option: "call("}}
            with pytest.raises(SpecError, match=r"the model's tokenizer cannot encode 'call\('") as raised:
                check_tags(environment_of(told), tokenizer(model))
            assert raised.value.where == f"environment.options.{option}"
        check_tags(environment_of(TOOLS | {"options": {"form": "tags", "after": "=", "failed": "-"}}), tokenizer(model))
    lower = models.BPE({char: number for number, char in enumerate("cal<>.")}, [])
    normal = tokenizer(lower)
    normal.tokenizer._tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    check_tags(
        environment_of(TOOLS | {"options": {"form": "tags", "open": "<CALL ", "close": ">", "after": "…"}}), normal
    )
    check_tags(environment_of(TOOLS), tokenizer(models.BPE(letters, [])))  # JSON, of which nothing is an option
    check_tags(environment_of({"name": "own", "options": {"open": "call("}}), tokenizer(models.BPE(letters, [])))


def environment_of(section: dict[str, Any]) -> EnvironmentSpec:
    environment = spec(section).environment
    assert environment is not None
    return environment
