"""The section `agent`: contradictions are refused, and an agent's metadata reaches rewards and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controllers.flow.job_data import make_response
from gcore.config import JobSpec, parse_spec
from gcore.config.reward import RewardSpec
from gcore.config.spec import training_sources
from gcore.errors import SpecError
from gcore.flows.filters import untrainable_reason
from gcore.reward.api import Response, RewardError, RewardResult, find_reward
from gcore.rollout.agents.api import parse_result
from gcore.rollout.postprocess import make_scored_group
from gcore.testing.flows import group_of
from gcore.types import Prompt

AGENT = {"name": "any"}
CHAT = {"path": "m", "chat": True}


def spec(agent: dict[str, Any] | None, **more: Any) -> JobSpec:
    tree: dict[str, Any] = {
        "name": "job",
        "model": CHAT,
        "data": {"path": "d"},
        "flow": {"steps": 3},
        "rollout": {"max_new_tokens": 8},
    }
    return parse_spec(tree | more | ({} if agent is None else {"agent": agent}))


def test_a_response_has_room_for_twice_what_the_model_may_make_unless_the_spec_says_more() -> None:
    agent, told = spec(AGENT).agent, spec({**AGENT, "max_tokens": 30}).agent
    assert agent is not None
    assert told is not None
    assert (agent.room(8), told.room(8), told.room(40)) == (16, 30, 40)


@pytest.mark.parametrize(
    ("agent", "more", "words"),
    [
        ({**AGENT, "max_tokens": 7}, {}, "is below rollout.max_new_tokens"),
        (AGENT, {"model": CHAT | {"max_length": 16}}, "leaves no room for a prompt"),
        (AGENT, {"model": {"path": "m"}}, "an agent needs chat messages"),
        (
            AGENT,
            {"environment": {"name": "tools", "tools": {"names": ["calculator"]}}},
            "has both sections agent and environment",
        ),
        (AGENT, {"train": {"loss": "sft"}, "flow": {"steps": 3, "name": "sft"}}, "cannot use an agent"),
        ({**AGENT, "ignore": ["n"]}, {}, "ignore"),
        ({**AGENT, "history": "fork"}, {}, "history"),
        ({**AGENT, "max_turn": 2}, {}, "max_turns"),
        ({**AGENT, "command": ["sh"]}, {}, "command"),
        (None, {"reward": {"name": "agent"}}, "no section agent"),
        (AGENT, {"reward": {"name": "environment"}}, "no section environment"),
    ],
)
def test_invalid_agents_are_refused(agent: dict[str, Any] | None, more: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        spec(agent, **more)


def test_the_reward_agent_hands_on_what_the_agent_returned() -> None:
    reward, settings = find_reward("agent"), RewardSpec(name="agent")
    sample = replace(group_of([0.0]).samples[0], reward_parts=(("environment", 0.25),))
    assert reward(make_response(sample), {}, settings) == RewardResult(0.25)
    assert reward(Response("cut", 3, True), {}, settings) == RewardResult(0.0)
    with pytest.raises(RewardError, match="the agent returned no reward"):
        reward(Response("whole", 3), {}, settings)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (None, None),
        (True, 1.0),
        (2, 2.0),
        ("0.5", 0.5),
        (float("nan"), "not finite"),
        (1e39, "not finite"),
        ([], "not a number"),
    ],
)
def test_agent_result_is_a_number_or_nothing(made: Any, found: Any) -> None:
    said = parse_result(made)
    if isinstance(found, str):
        assert found in said["what"]
    else:
        assert said == {"reward": found}


def test_a_group_is_made_of_what_its_agents_asked_and_by_nobody_else() -> None:
    group = group_of([0.0, 1.0])
    prompt = Prompt(group.ref, "shown", (1, 2), {}, "data")
    told = [replace(sample, prompt_ids=(5, 6)) for sample in group.samples]
    of_agents = make_scored_group(
        prompt, told, [RewardResult(1.0)] * 2, spec(AGENT).rollout, training_sources(spec(AGENT))[0].sampling
    )
    assert of_agents.prompt_ids == (5, 6)
    assert all(sample.prompt_ids is None for sample in of_agents.samples)
    assert untrainable_reason(of_agents, spec(AGENT).train) is None
    why = untrainable_reason(replace(group, samples=tuple(told)), spec(AGENT).train)
    assert why is not None
    assert "use peer.score to make the group" in why
