"""The contract between a flow and its peer: a controller's peer, and the in-memory peers for tests of plug-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peer_bench import FakeBench, PeerBench, RealBench

from gcore.errors import EngineError, SpecError
from gcore.flows import FilterError
from gcore.flows.builtin import score_group
from gcore.reward import RewardError
from gcore.testing.flows import Asked
from gcore.types import Group, Outcome, Prompt, PromptRef

ENTRIES = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(6)]
NO_NUMBERS = [{"prompt": "1", "answer": "one"}, {"prompt": "2", "answer": "two"}]
Make = Callable[..., PeerBench]


def right(asked: Asked) -> str:
    return str(asked.prompt.fields.get("answer", ""))


@pytest.fixture(params=[FakeBench, RealBench], ids=["in memory", "a controller's"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    def made(script: Any = right, entries: Any = ENTRIES, **sections: Any) -> PeerBench:
        sections["flow"] = {"samples_per_prompt": 2, "groups_per_step": 8, **sections.get("flow", {})}
        return request.param(entries, script, tmp_path, **sections)  # type: ignore[no-any-return]

    return made


async def first_step(bench: PeerBench) -> Any:
    async for step in bench.peer.steps():
        return step
    raise AssertionError("no step")


async def some_prompts(bench: PeerBench, count: int) -> tuple[Any, list[Prompt]]:
    """Prompts that are begun and never finished."""
    step, found = await first_step(bench), list[Prompt]()

    async def never() -> Group:
        await asyncio.Event().wait()
        raise AssertionError

    async with step.collect() as batch:
        async for prompt in bench.peer.prompts(step):
            found.append(prompt)
            batch.start(never())
            await asyncio.sleep(0)
            if len(found) == count:
                break
    return step, found


async def produced(bench: PeerBench, produce: Any, count: int) -> None:
    """Run `produce` for `count` prompts to its end."""
    step, done = await first_step(bench), 0

    async with step.collect() as batch:
        async for prompt in bench.peer.prompts(step):
            batch.start(produce(bench.peer, prompt))
            while not (prompt.ref in bench.kept() or prompt.ref in bench.ended()):  # noqa: ASYNC110 - of either bench
                await asyncio.sleep(0)
            done += 1
            if done == count:
                break


async def test_the_first_step_is_number_one(make: Make) -> None:
    assert (await first_step(make())).number == 1


async def test_prompts_come_oldest_first_and_each_once(make: Make) -> None:
    _, prompts = await some_prompts(make(), 4)
    refs = [prompt.ref for prompt in prompts]
    assert refs == sorted(refs)
    assert len(set(refs)) == 4
    assert all(prompt.fields["prompt"] == prompt.text and prompt.token_ids for prompt in prompts)


async def test_a_prompt_is_started_once(make: Make) -> None:
    bench = make()
    step = await first_step(bench)
    async with step.collect() as batch:
        with pytest.raises(RuntimeError, match="twice for one prompt, or before"):
            batch.start(score_group(bench.peer, None))  # type: ignore[arg-type]


async def test_a_rollout_has_as_many_samples_as_the_spec_says_or_as_are_asked_for(make: Make) -> None:
    bench = make()
    _, (prompt, *_) = await some_prompts(bench, 2)
    assert len(await bench.peer.rollout(prompt)) == 2
    samples = await bench.peer.rollout(prompt, 3)
    assert len(samples) == 3
    for sample in samples:
        assert sample.text == prompt.fields["answer"]
        assert len(sample.token_ids) == len(sample.logprobs) == sample.spans[-1].end
        assert sample.oldest == (0, 0)
    assert not any(asked.greedy for asked in bench.asked)


async def test_a_greedy_rollout_is_greedy(make: Make) -> None:
    bench = make()
    _, (prompt, *_) = await some_prompts(bench, 1)
    assert len(await bench.peer.rollout(prompt, 1, greedy=True)) == 1
    assert [asked.greedy for asked in bench.asked] == [True]


async def test_an_engines_error_reaches_the_flow(make: Make) -> None:
    def gone(asked: Asked) -> str:
        raise EngineError("gone")

    bench = make(gone)
    _, (prompt, *_) = await some_prompts(bench, 1)
    with pytest.raises(EngineError, match="gone"):
        await bench.peer.rollout(prompt)


async def test_scores_are_the_rewards_with_their_parts(make: Make) -> None:
    bench = make(lambda asked: right(asked) if asked.index else "no")
    _, (prompt, *_) = await some_prompts(bench, 1)
    group = await bench.peer.score(prompt, await bench.peer.rollout(prompt))
    assert isinstance(group, Group)
    assert (group.ref, group.prompt_ids, group.source, group.temperature) == (prompt.ref, prompt.token_ids, "data", 1.0)
    assert [(sample.reward, sample.reward_parts) for sample in group.samples] == [
        (0.0, (("correct", 0.0),)),
        (1.0, (("correct", 1.0),)),
    ]


@pytest.mark.parametrize(
    ("rollout", "found"),
    [
        pytest.param({}, [(1.0, False), (0.0, False)], id="keep"),
        pytest.param({"truncated": "mask"}, [(1.0, False), (0.0, True)], id="mask"),
        pytest.param({"truncated": "penalise", "truncated_penalty": 0.5}, [(1.0, False), (-0.5, False)], id="penalise"),
        pytest.param({"overlong_tokens": 4, "overlong_penalty": 1.0}, [(1.0, False), (-1.0, False)], id="length"),
        pytest.param({"truncated": "drop_group"}, None, id="drop the group"),
    ],
)
async def test_cut_off_answers_become_what_the_spec_says(make: Make, rollout: dict[str, Any], found: Any) -> None:
    bench = make(
        lambda asked: "and so on, and on" if asked.index else right(asked), rollout={"max_new_tokens": 8} | rollout
    )
    _, (prompt, *_) = await some_prompts(bench, 1)
    group = await bench.peer.score(prompt, await bench.peer.rollout(prompt))
    if isinstance(group, Outcome):
        assert (found, group.kind) == (None, "filtered")
    else:
        assert [(sample.reward, sample.masked) for sample in group.samples] == found


async def test_scoring_errors_reach_the_flow(make: Make) -> None:
    bench = make(entries=NO_NUMBERS, reward={"name": "numeric"})
    _, (prompt, *_) = await some_prompts(bench, 1)
    with pytest.raises(RewardError, match="is not a number"):
        await bench.peer.score(prompt, await bench.peer.rollout(prompt))


async def test_filters_keep_or_refuse_and_leave_outcomes_alone(make: Make) -> None:
    bench = make(flow={"filters": [{"name": "signal"}]})
    _, (prompt, *_) = await some_prompts(bench, 1)
    same = await bench.peer.score(prompt, await bench.peer.rollout(prompt))
    assert await bench.peer.filter(prompt, same) == Outcome("filtered", "all its rewards are the same")
    done = Outcome("failed", "for another reason")
    assert await bench.peer.filter(prompt, done) is done


async def test_a_filter_that_cannot_say_is_an_error_for_the_flow(make: Make) -> None:
    bench = make(flow={"filters": [{"name": "reward_band"}]})
    _, (prompt, *_) = await some_prompts(bench, 1)
    group = await bench.peer.score(prompt, await bench.peer.rollout(prompt))
    with pytest.raises(FilterError, match="has no bound"):
        await bench.peer.filter(prompt, group)


async def test_a_demonstration_is_the_entrys_answer_and_never_cut(make: Make) -> None:
    entries = [{"prompt": "1", "answer": 17}, {"prompt": "3", "answer": "4" * 80}]
    bench = make(entries=entries)
    found = {}
    _, prompts = await some_prompts(bench, 2)
    for prompt in prompts:
        found[prompt.text] = await bench.peer.demonstrate(prompt)
    group = found["1"]
    assert isinstance(group, Group)
    (sample,) = group.samples
    assert (sample.text, len(sample.token_ids), sample.finish_reason, sample.reward) == ("17", 3, "stop", 0.0)
    assert found["3"] == Outcome("failed", "the answer has 81 tokens, more than max_new_tokens (64)")
    assert bench.asked == []


async def test_a_finished_group_is_kept_and_an_outcome_ends_the_prompt(make: Make) -> None:
    bench = make(
        lambda asked: "no" if asked.prompt.text == "2+1=" else right(asked),
        flow={"filters": [{"name": "reward_band", "options": {"low": 0.5}}]},
    )
    await produced(bench, score_group, 6)
    assert sorted(bench.kept().values()) == [2] * 5
    assert list(bench.ended().values()) == [Outcome("filtered", "its mean reward is below 0.5")]


async def test_a_reward_that_fails_ends_its_prompt_with_the_reason(make: Make) -> None:
    bench = make(entries=NO_NUMBERS, reward={"name": "numeric"})
    await produced(bench, score_group, 1)
    (outcome,) = bench.ended().values()
    assert outcome.kind == "failed"
    assert "is not a number" in outcome.reason


async def test_a_prompt_whose_engine_failed_is_issued_again(make: Make) -> None:
    def flaky(asked: Asked) -> str:
        if asked.tries == 0:
            raise EngineError("busy")
        return right(asked)

    bench = make(flaky)
    step, seen = await first_step(bench), list[PromptRef]()
    async with step.collect() as batch:
        async for prompt in bench.peer.prompts(step):
            seen.append(prompt.ref)
            batch.start(score_group(bench.peer, prompt))
            await asyncio.sleep(0)
            if len(bench.kept()) >= 2:
                break
    assert any(seen.count(ref) > 1 for ref in seen)
    assert bench.ended() == {}


async def test_alone_a_peer_gathers_what_it_gave_itself(make: Make) -> None:
    step = await first_step(make())
    assert await step.gather("x", {"a": [1, 2.5]}) == ({"a": [1, 2.5]},)
    assert await step.sum("n", 3) == 3.0


async def test_a_name_serves_once_in_a_step_and_what_is_no_small_json_is_refused(make: Make) -> None:
    step = await first_step(make())
    await step.gather("x", 1)
    with pytest.raises(ValueError, match="was already used in this step"):
        await step.gather("x", 2)
    with pytest.raises(ValueError, match="not JSON with finite numbers"):
        await step.gather("y", float("nan"))
    with pytest.raises(ValueError, match="invalid name"):
        await step.gather("No name", 1)
    with pytest.raises(ValueError, match="not a number"):
        await step.sum("z", "1")


OTHER = PromptRef(0, 0, 50)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda group: None, "returned None for prompt 0/0/0"),
        (lambda group: [group], "returned a list for prompt 0/0/0"),
        (lambda group: Outcome("trained"), r"returned Outcome\(kind='trained', reason=''\)"),
        (lambda group: Outcome("skipped"), "kind='skipped'"),  # type: ignore[arg-type]
        (lambda group: Outcome("failed", 3), "reason=3"),  # type: ignore[arg-type]
        (lambda group: replace(group, ref=OTHER), "returned a group of prompt 0/0/50 for prompt 0/0/0"),
    ],
    ids=["nothing", "a list", "trained", "no kind", "no reason", "another prompt's"],
)
async def test_flow_that_returns_neither_group_nor_outcome_fails_with_an_explanation(
    make: Make, wrong: Callable[[Any], Any], said: str
) -> None:
    bench = make()
    step = await first_step(bench)

    async def produce(prompt: Prompt) -> Any:
        return wrong(await score_group(bench.peer, prompt))

    async def collect() -> None:
        async with step.collect() as batch:
            async for prompt in bench.peer.prompts(step):
                batch.start(produce(prompt))
                for _ in range(50):
                    await asyncio.sleep(0)

    with pytest.raises(SpecError, match=f"the flow .*{said}.*return the prompt's Group, Outcome"):
        await asyncio.wait_for(collect(), 60)
    assert not bench.kept()
    assert not bench.ended()
