"""An engine's time report: the difference of two readings accounts for every second between them."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest
from engine_contract import SLOTS, Serving

from gcore.rollout.client import EngineClient, SamplingParams
from gcore.rollout.engine_time import EngineReading, EngineTime, parse_reading, time_between

LONG = SamplingParams(temperature=1.0, max_new_tokens=48, min_new_tokens=48)


async def now(client: EngineClient) -> EngineReading:
    asked = monotonic()
    return parse_reading(await client.metrics(), asked, monotonic())


async def since(client: EngineClient, before: EngineReading) -> EngineTime:
    found = time_between(before, await now(client), SLOTS)
    assert found is not None
    parts = found.busy_s, found.idle_s, found.paused_s, found.asleep_s
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.end - found.begin, abs=1e-6)
    return found


async def test_an_engine_without_work_is_idle(client: EngineClient) -> None:
    before = await now(client)
    await asyncio.sleep(0.3)
    found = await since(client, before)
    assert found.busy_s == pytest.approx(0.0, abs=0.01)
    assert found.tokens == 0


async def test_one_at_work_is_busy_by_the_share_of_its_rows(client: EngineClient) -> None:
    await client.generate((5, 6, 7), LONG, seeds=(1, 2), rid="warm")
    before = await now(client)
    made = await client.generate((5, 6, 7), LONG, seeds=range(SLOTS // 2), rid="busy")
    found = await since(client, before)
    assert found.tokens == sum(len(sample.token_ids) for sample in made)
    assert 0 < found.busy_s <= (found.end - found.begin) / 2 + 0.01
    assert found.running_s == pytest.approx(SLOTS * found.busy_s, rel=0.01)
    assert found.active_s <= found.end - found.begin + 1e-6


async def test_a_pause_is_no_idleness(client: EngineClient, serving: Serving) -> None:
    before = await now(client)
    await client.pause()
    await asyncio.sleep(0.3)
    await client.resume()
    found = await since(client, before)
    if not serving.is_sglang:  # of SGLang, who paused it knows
        assert found.paused_s == pytest.approx(0.3, abs=0.1)


async def test_an_engine_of_this_machine_tells_the_time_by_the_same_clock(
    client: EngineClient, serving: Serving
) -> None:
    asked = monotonic()
    reading = await now(client)
    assert asked <= reading.at <= monotonic()
    if not serving.is_sglang:
        assert reading.sums is not None
        assert reading.at == reading.sums.at
