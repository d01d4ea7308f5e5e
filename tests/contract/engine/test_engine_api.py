"""The contract of `gcore.rollout.api.Engine`: the HTTP client with the torch engine behind it, and the fake in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engine_processes import engine_process

from gcore.errors import EngineError
from gcore.rollout.api import Engine, PauseMode, ProgressCallback, SamplingParams
from gcore.rollout.client import EngineClient
from gcore.system.clock import SystemClock
from gcore.testing.engines import FakeEngine
from gcore.testing.models import make_tiny_model
from gcore.types import Sample, Version

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
FREE = SamplingParams(temperature=1.0, max_new_tokens=8)
LONG = SamplingParams(temperature=1.0, max_new_tokens=100_000)
FIRST = Version(0, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model", seed=0, context=200_000, ends=False)


@pytest.fixture(scope="module", params=["http", "fake"])
def engine_url(request: pytest.FixtureRequest, folder: Path) -> object:
    if request.param == "fake":
        yield None
        return
    with engine_process(folder, batch_slots=8) as url:
        yield url


@pytest.fixture
async def engine(engine_url: str | None) -> AsyncIterator[Engine]:
    engine: Engine = FakeEngine(SystemClock(), FIRST) if engine_url is None else EngineClient(engine_url, timeout_s=120)
    yield engine
    await engine.take_memory()
    await engine.resume()
    await engine.close()


async def test_samples_come_in_the_order_of_their_prompts_and_have_the_asked_length(engine: Engine) -> None:
    samples = await engine.generate_each([[3, 4], [5, 6, 7]], [GREEDY, FREE], seeds=[1, 2], rid="order")
    assert [len(sample.token_ids) for sample in samples] == [8, 8]
    assert [sample.finish_reason for sample in samples] == ["length", "length"]
    assert all(len(sample.logprobs) == 8 and max(sample.logprobs) <= 0.0 for sample in samples)


async def test_the_same_seed_gives_the_same_sample_whatever_else_runs(engine: Engine) -> None:
    (alone,) = await engine.generate_each([[3, 4]], FREE, seeds=[7], rid="alone")
    among = await engine.generate_each([[3, 4]] * 3, FREE, seeds=[5, 7, 9], rid="among")
    assert among[1].token_ids == alone.token_ids
    assert among[0].token_ids != alone.token_ids


async def test_an_aborted_sample_comes_back_with_the_tokens_it_has(engine: Engine) -> None:
    begun = asyncio.Event()
    reported: list[int] = []

    def tell(index: int, sample: Sample) -> None:
        reported.append(len(sample.token_ids))
        begun.set()

    growing = ProgressCallback(4, tell)
    request = asyncio.ensure_future(engine.generate_each([[3, 4]], LONG, seeds=[1], rid="cut", growing=growing))
    await begun.wait()
    await engine.abort("cut", 1)
    (sample,) = await request
    assert sample.finish_reason == "abort"
    assert max(reported) <= len(sample.token_ids) < LONG.max_new_tokens


async def test_progress_reports_samples_that_only_grow(engine: Engine) -> None:
    seen: list[Sample] = []
    growing = ProgressCallback(2, lambda index, sample: seen.append(sample))
    (whole,) = await engine.generate_each([[3, 4]], FREE, seeds=[3], rid="grow", growing=growing)
    partial = [sample.token_ids for sample in seen]
    assert all(whole.token_ids[: len(tokens)] == tokens for tokens in partial)
    assert [len(tokens) for tokens in partial] == sorted(len(tokens) for tokens in partial)
    assert partial


async def test_an_abort_ends_only_the_samples_that_it_names(engine: Engine) -> None:
    begun = asyncio.Event()
    growing = ProgressCallback(4, lambda index, sample: begun.set())
    some = SamplingParams(temperature=1.0, max_new_tokens=200)
    cut = asyncio.ensure_future(engine.generate_each([[3, 4]], LONG, seeds=[1], rid="one", growing=growing))
    other = asyncio.ensure_future(engine.generate_each([[5, 6]], some, seeds=[2], rid="other"))
    await begun.wait()
    await engine.abort("one", 1)
    assert (await cut)[0].finish_reason == "abort"
    assert (await other)[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_holds_samples_until_it_is_resumed(engine: Engine, mode: PauseMode) -> None:
    begun = asyncio.Event()
    growing = ProgressCallback(4, lambda index, sample: begun.set())
    few = SamplingParams(temperature=1.0, max_new_tokens=600)
    request = asyncio.ensure_future(engine.generate_each([[3, 4]], few, seeds=[1], rid="held", growing=growing))
    await begun.wait()
    await engine.pause(mode)
    done, _ = await asyncio.wait([request], timeout=0.5)
    assert not done
    await engine.resume()
    (sample,) = await request
    assert len(sample.token_ids) == 600


async def test_a_pause_that_aborts_ends_what_runs_and_holds_what_comes(engine: Engine) -> None:
    begun = asyncio.Event()
    growing = ProgressCallback(4, lambda index, sample: begun.set())
    running = asyncio.ensure_future(engine.generate_each([[3, 4]], LONG, seeds=[1], rid="runs", growing=growing))
    await begun.wait()
    await engine.pause("abort")
    (ended,) = await running
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.token_ids) < LONG.max_new_tokens
    late = asyncio.ensure_future(engine.generate_each([[3, 4]], GREEDY, seeds=[1], rid="late"))
    done, _ = await asyncio.wait([late], timeout=0.5)
    assert not done
    await engine.resume()
    assert len((await late)[0].token_ids) == 8


async def test_a_sample_that_runs_during_an_update_has_a_span_of_each_version(engine: Engine, folder: Path) -> None:
    before = Version((await engine.served() or FIRST).lineage + 1, 1)
    await engine.update_weights(str(folder), before)
    begun = asyncio.Event()
    growing = ProgressCallback(4, lambda index, sample: begun.set())
    running = asyncio.ensure_future(engine.generate_each([[3, 4]], LONG, seeds=[1], rid="under", growing=growing))
    await begun.wait()
    after = Version(before.lineage, 2)
    await engine.update_weights(str(folder), after)
    begun.clear()
    await begun.wait()
    await engine.abort("under", 1)
    (sample,) = await running
    assert [span.version for span in sample.spans] == [before, after]
    edges = [edge for span in sample.spans for edge in (span.start, span.end)]
    assert edges == [0, edges[1], edges[1], len(sample.token_ids)]


async def test_an_update_of_weights_is_served_and_an_older_one_is_refused(engine: Engine, folder: Path) -> None:
    newer = Version((await engine.served() or FIRST).lineage + 1, 1)
    await engine.update_weights(str(folder), newer)
    assert await engine.served() == newer
    (sample,) = await engine.generate_each([[3, 4]], GREEDY, seeds=[1], rid="new")
    assert [span.version for span in sample.spans] == [newer]
    with pytest.raises(EngineError):
        await engine.update_weights(str(folder), FIRST)
    assert await engine.served() == newer


async def test_an_engine_that_sleeps_holds_no_memory_until_it_is_woken(engine: Engine) -> None:
    version = await engine.served() or FIRST
    await engine.sleep()
    await engine.sleep()
    assert await engine.sleeps()
    assert await engine.released()
    assert await engine.served() is None
    await engine.wake(version)
    assert not await engine.sleeps()
    assert not await engine.released()
    assert await engine.served() == version
    (sample,) = await engine.generate_each([[3, 4]], GREEDY, seeds=[1], rid="woken")
    assert len(sample.token_ids) == 8


async def test_sleep_ends_what_runs_and_taking_memory_alone_makes_no_tokens(engine: Engine) -> None:
    version = await engine.served() or FIRST
    begun = asyncio.Event()
    growing = ProgressCallback(4, lambda index, sample: begun.set())
    running = asyncio.ensure_future(engine.generate_each([[3, 4]], LONG, seeds=[1], rid="put", growing=growing))
    await begun.wait()
    await engine.sleep()
    (ended,) = await running
    assert ended.finish_reason == "abort"
    assert 0 < len(ended.token_ids) < LONG.max_new_tokens
    await engine.take_memory()
    assert await engine.sleeps()
    assert not await engine.released()
    late = asyncio.ensure_future(engine.generate_each([[3, 4]], GREEDY, seeds=[1], rid="soon"))
    done, _ = await asyncio.wait([late], timeout=0.5)
    assert not done
    await engine.wake(version)
    assert len((await late)[0].token_ids) == 8


async def test_a_token_that_the_vocabulary_does_not_have_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError):
        await engine.generate_each([[10_000]], GREEDY, seeds=[1], rid="odd")
