"""Every built-in flow in memory: its requests, its offers, and its short code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from plug_in_package import installer

from gcore.errors import EngineUnreachable, SpecError
from gcore.flows import find_flow
from gcore.testing.contracts import alternate_answers, check_flow
from gcore.testing.flows import Asked, FakeCluster

BUILT_IN = ("grpo", "dapo", "ppo", "remax", "rloo", "reinforce_pp", "sft")
SCREEN = 40
"""Lines."""
ENTRIES = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]


async def ran(name: str, script: Any = alternate_answers, **settings: Any) -> FakeCluster:
    settings["flow"] = {"name": name, **settings.get("flow", {})}
    cluster = FakeCluster(ENTRIES, script, **settings)
    await cluster.run(find_flow(name))
    return cluster


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_fits_on_a_screen(name: str) -> None:
    found = find_flow(name)
    assert len(inspect.getsource(found).splitlines()) <= SCREEN
    assert "arXiv" in (inspect.getdoc(found) or "") or name == "sft"


@pytest.mark.parametrize("name", BUILT_IN)
async def test_it_passes_the_contract_kit(name: str) -> None:
    await check_flow(name, ENTRIES)


@pytest.mark.parametrize("name", BUILT_IN)
async def test_it_asks_for_an_evaluation_before_every_step_and_after_the_last(name: str) -> None:
    assert (await ran(name)).evaluated == [0, 1, 2]


@pytest.mark.parametrize(("name", "samples"), [("grpo", 8), ("dapo", 8), ("ppo", 1), ("rloo", 4), ("reinforce_pp", 1)])
async def test_it_samples_as_many_responses_as_its_settings_say_and_none_is_greedy(name: str, samples: int) -> None:
    cluster = await ran(name)
    assert {len(group.samples) for step in cluster.trained for group in step} == {samples}
    assert not any(asked.greedy for asked in cluster.asked)
    assert all(group.baseline is None for step in cluster.trained for group in step)


async def test_grpo_offers_every_response_with_its_reward() -> None:
    (group, *_) = (await ran("grpo", flow={"samples_per_prompt": 2})).trained[0]
    assert [(sample.text, sample.reward) for sample in group.samples] == [("1", 1.0), ("1?", 0.0)]


async def test_dapo_draws_anew_what_teaches_nothing_until_the_quota_is_full() -> None:
    def known_by_heart(asked: Asked) -> str:
        return str(asked.prompt.fields["answer"]) if asked.prompt.ref.seq % 4 else alternate_answers(asked)

    cluster = await ran("dapo", known_by_heart, flow={"groups_per_step": 2, "samples_per_prompt": 4})
    assert all(len({s.reward for s in group.samples}) == 2 for step in cluster.trained for group in step)
    assert all(len(step) == 2 for step in cluster.trained)
    assert {outcome.reason for outcome in cluster.outcomes.values()} == {"all its rewards are the same"}
    assert len(cluster.outcomes) >= 6


async def test_grpo_keeps_what_teaches_nothing_unless_the_spec_names_a_filter() -> None:
    always_right = lambda asked: str(asked.prompt.fields["answer"])  # noqa: E731
    assert not (await ran("grpo", always_right)).outcomes
    with pytest.raises(AssertionError, match="prompts were filtered or failed"):
        await ran("grpo", always_right, flow={"filters": [{"name": "signal"}]})


async def test_remax_trains_samples_against_the_reward_of_the_greedy_answer() -> None:
    def script(asked: Asked) -> str:
        return str(asked.prompt.fields["answer"]) if asked.greedy == (asked.prompt.ref.seq % 2 == 0) else "no"

    cluster = await ran("remax", script, flow={"samples_per_prompt": 2})
    for step in cluster.trained:
        for group in step:
            greedy_is_right = group.ref.seq % 2 == 0
            assert group.baseline == float(greedy_is_right)
            assert [sample.reward for sample in group.samples] == [float(not greedy_is_right)] * 2
    per_prompt = [asked.greedy for asked in cluster.asked if asked.prompt.ref.seq == 0 and asked.tries == 0][:3]
    assert sorted(per_prompt) == [False, False, True]


async def test_sft_asks_no_engine_and_trains_the_answers_of_the_data() -> None:
    cluster = await ran("sft")
    assert cluster.asked == []
    texts = {group.ref.seq: group.samples[0].text for step in cluster.trained for group in step}
    assert texts == {seq: ENTRIES[seq]["answer"] for seq in texts}
    assert len(texts) == 8


async def test_sft_fails_an_entry_without_an_answer_and_goes_on() -> None:
    entries = [{"prompt": "1+1="}, *ENTRIES, {"prompt": "2+2=", "answer": "4" * 100}]
    cluster = FakeCluster(entries, flow={"name": "sft", "steps": 3})
    await cluster.run(find_flow("sft"))
    reasons = {ref.seq: outcome.reason for ref, outcome in cluster.outcomes.items() if ref.data_epoch == 0}
    assert reasons[0] == "the entry has no answer in field 'answer' (reward.answer)"
    assert reasons[9] == "the answer has 101 tokens, more than max_new_tokens (64)"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "sft"])
async def test_a_prompt_that_no_engine_answered_is_issued_again(name: str) -> None:
    def flaky(asked: Asked) -> str:
        if asked.tries < 2 and asked.prompt.ref.seq == 0:
            raise EngineUnreachable("gone")
        return alternate_answers(asked)

    cluster = await ran(name, flaky)
    assert max(asked.tries for asked in cluster.asked) == 2
    assert not cluster.outcomes or name == "dapo"


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "sft"])
async def test_a_prompt_that_cannot_be_scored_has_failed_with_the_reason(name: str) -> None:
    entries = [{"prompt": "what?"}, *ENTRIES]
    cluster = FakeCluster(entries, alternate_answers, flow={"name": name})
    await cluster.run(find_flow(name))
    (outcome,) = [o for ref, o in cluster.outcomes.items() if ref.seq == 0 and ref.data_epoch == 0]
    assert (outcome.kind, "no answer in field 'answer'" in outcome.reason) == ("failed", True)


def test_a_flow_nobody_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="no flow is called 'reinforce', did you mean 'reinforce_pp'"):
        find_flow("reinforce")


@pytest.mark.parametrize(
    ("code", "is_flow"),
    [
        pytest.param("async def f(peer): ...", True, id="a coroutine function"),
        pytest.param("class F:\n    async def __call__(self, peer): ...\nf = F()", True, id="an object that is one"),
        pytest.param("def f(peer): ...", False, id="a plain function"),
        pytest.param("async def f(peer):\n    yield", False, id="a generator"),
    ],
)
def test_a_flow_is_something_to_be_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, is_flow: bool
) -> None:
    package = f"flow_kind_{len(code)}"
    installer(tmp_path, monkeypatch, "gcore.flows")(package, f"kind = {package}:f", code + "\n")
    if is_flow:
        assert callable(find_flow("kind"))
    else:
        with pytest.raises(SpecError, match=r"flow 'kind' is not a coroutine function.*async def"):
            find_flow("kind")
