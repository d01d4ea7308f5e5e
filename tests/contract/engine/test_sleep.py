"""Sleep and wake by the client, against each available engine: running requests resume with their tokens, and weights are loaded again."""

import asyncio

from engine_contract import SLEEPERS, Serving

from gcore.rollout.client import EngineClient, ProgressCallback, SamplingParams
from gcore.types import Version

LONG = SamplingParams(temperature=1.0, max_new_tokens=10_000)


@SLEEPERS
async def test_an_engine_sleeps_with_its_work_handed_back_and_serves_what_it_is_brought_after_it_woke(
    client: EngineClient, serving: Serving
) -> None:
    before = await client.served()
    began = asyncio.Event()
    told = ProgressCallback(4, lambda _, __: began.set())
    running = asyncio.create_task(client.generate_each([[5, 6]], LONG, seeds=[1], rid="sleeps", growing=told))
    await began.wait()
    try:
        await client.sleep()
        (sample,) = await running
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.token_ids) < LONG.max_new_tokens
        assert await client.sleeps()
        assert await client.served() is None
        await client.sleep()  # a controller that is started again may do so
        await client.take_memory()
        assert await client.sleeps()
    finally:
        await client.take_memory()
        await client.update_weights(str(serving.weights[0]), before or Version(0, 0))
    assert not await client.sleeps()
    (again,) = await client.generate((5, 6), SamplingParams(temperature=0.0, max_new_tokens=3), seeds=[0], rid="awake")
    assert len(again.token_ids) == 3
