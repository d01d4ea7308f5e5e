"""Streamed samples: which tokens a client has when their engine is lost."""

from __future__ import annotations

import pytest
from engine_contract import Serving

from gcore.errors import EngineError
from gcore.rollout.client import EngineClient, ProgressCallback, SamplingParams
from gcore.types import Sample

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40)


async def test_streamed_samples_are_prefixes_and_end_equal_to_unstreamed_ones(
    serving: Serving, client: EngineClient
) -> None:
    told: dict[int, list[Sample]] = {0: [], 1: []}
    growing = ProgressCallback(8, lambda place, sample: told[place].append(sample))
    prompts = [(1, 2, 3), (4, 5)]
    made = await client.generate_each(prompts, GREEDY, seeds=[1, 2], rid="growing", growing=growing)
    plain = await client.generate_each(prompts, GREEDY, seeds=[1, 2], rid="plain")
    assert [one.token_ids for one in made] == [one.token_ids for one in plain]
    assert [one.finish_reason for one in made] == ["length", "length"]
    for place, sample in enumerate(made):
        assert len(told[place]) >= 3, "now and then, and at the end"
        assert told[place][-1] == sample
        for earlier in told[place][:-1]:
            count = len(earlier.token_ids)
            assert earlier.finish_reason == "abort"
            assert earlier.token_ids == sample.token_ids[:count]
            assert earlier.logprobs == pytest.approx(sample.logprobs[:count], abs=1e-4)
            assert [span.end for span in earlier.spans][-1] == count


async def test_each_sample_has_its_own_limits(client: EngineClient) -> None:
    params = [GREEDY, SamplingParams(temperature=0.0, max_new_tokens=3)]
    made = await client.generate_each([(1, 2), (1, 2)], params, seeds=[1, 2], rid="own")
    assert [len(one.token_ids) for one in made] == [40, 3]


async def test_streaming_requests_get_the_same_refusals(client: EngineClient) -> None:
    growing = ProgressCallback(8, lambda place, sample: None)
    too_long = tuple(range(1, 5)) * 10_000
    with pytest.raises(EngineError):
        await client.generate_each([too_long], GREEDY, seeds=[1], rid="long", growing=growing)
    assert await client.generate_each([(1, 2)], GREEDY, seeds=[1], rid="short", growing=growing)
