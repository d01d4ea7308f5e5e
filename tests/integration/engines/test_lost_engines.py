"""An engine is killed during generation: another engine continues from the tokens that it had streamed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_workers import engines_at
from warm_programs import ENGINES

from controllers.changes import ChangeSignal
from controllers.inference.continuation import PartialResponses
from controllers.inference.pool import EnginePool
from gcore.data.tokenizer import ModelTokenizer
from gcore.errors import EngineUnreachable
from gcore.observability.metrics import Metrics
from gcore.rollout.client import SamplingParams
from gcore.system.clock import SystemClock
from gcore.system.process import thread_environment
from gcore.testing.models import make_tiny_model
from gcore.types import Sample, Version, VersionSpan

FIRST = Version(0, 1)
MOST = 1500
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=MOST)
PROMPTS = [(1, 2, 3), (4, 5), (1, 2)]
SEEDS = (1, 2, 3)


@contextmanager
def engine(model: Path) -> Iterator[tuple[str, int]]:
    """Its address and its process id."""
    process = ENGINES.popen(
        *("gcore.rollout.engine", "--model", str(model), "--batch-slots=4"),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **thread_environment(1)},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().removeprefix("serving on ").strip(), process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m", seed=0, context=2048, ends=False)


async def book_of(model: Path, addresses: dict[str, str], **more: Any) -> EnginePool:
    book = EnginePool(ChangeSignal(), timeout_s=100.0, **more)
    await book.aim(engines_at(**addresses))
    for name in addresses:
        await book.publish(name, FIRST, model)
    return book


async def test_responses_go_on_elsewhere_with_the_tokens_that_a_killed_engine_had_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, so that what it would have made is known."""
    has_told = asyncio.Event()
    grow = PartialResponses.grow

    def noted(self: PartialResponses, place: int, sample: Sample) -> None:
        grow(self, place, sample)
        if len(sample.token_ids) > 1:
            has_told.set()

    monkeypatch.setattr(PartialResponses, "grow", noted)
    decode = ModelTokenizer.load(model).decode
    with engine(model) as (one, pid), engine(model) as (other, _):
        alone = await book_of(model, {"other": other})
        expected = await alone.generate(FIRST, PROMPTS, GREEDY, SEEDS, "whole")
        await alone.close()

        metrics = Metrics()
        book = await book_of(model, {"one": one}, metrics=metrics, told_every=16)
        asked = asyncio.create_task(book.generate(FIRST, PROMPTS, GREEDY, SEEDS, "r", decode=decode))
        await has_told.wait()
        os.kill(pid, signal.SIGKILL)
        await book.aim(engines_at(other=other))
        await book.publish("other", FIRST, model)
        made = await asked
        await book.close()
    kept = metrics.kept_tokens._value.get()
    assert 0 < kept < MOST * len(PROMPTS)
    for sample, whole in zip(made, expected, strict=True):
        assert sample.token_ids == whole.token_ids
        assert sample.text == whole.text
        assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
        assert sample.spans == (VersionSpan(FIRST, 0, MOST),)
        assert sample.finish_reason == whole.finish_reason


async def test_without_tellings_the_request_is_for_the_caller_to_repeat(model: Path) -> None:
    with engine(model) as (one, pid):
        book = await book_of(model, {"one": one}, told_every=0)
        decode = ModelTokenizer.load(model).decode
        asked = asyncio.create_task(book.generate(FIRST, PROMPTS, GREEDY, SEEDS, "r", decode=decode))
        await SystemClock().sleep(0.2)  # it has most probably begun; if not, there is nothing to lose either
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineUnreachable):
            await asked
        await book.close()
