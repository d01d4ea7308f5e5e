"""Hung engines as real processes: requests leave them in time, events name them, and they are used again or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_engine import Stub, stub_engine

from controllers.changes import ChangeSignal
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from gcore.errors import EngineUnreachable
from gcore.rollout.client import SamplingParams
from gcore.system.clock import SystemClock
from gcore.types import Sample, Version

FIRST = Version(0, 0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)
CLOCK = SystemClock()
QUICK = HealthLimits(silent_s=2.0, watchdog_s=6.0, request_s=60.0)
"""Of engines that answer in a moment, or never."""
NEVER_S = 60.0


class Bench:
    """Stub engines by name, and a book that looks after them as a driver does."""

    def __init__(self, stubs: dict[str, Stub], patience: HealthLimits) -> None:
        self.stubs = stubs
        self.book = EnginePool(ChangeSignal(), patience.request_s, clock=CLOCK, patience=patience)

    async def look_after(self) -> None:
        while True:
            self.book.look_after()
            await CLOCK.sleep(0.05)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(NEVER_S):
            while not condition():
                await CLOCK.sleep(0.05)

    def ask(self) -> asyncio.Task[tuple[Sample, ...]]:
        return asyncio.create_task(self.book.generate(FIRST, [(1,)], PARAMS, (0,), "r"))


@asynccontextmanager
async def bench(*, patience: HealthLimits = QUICK, **ways: tuple[str, ...]) -> AsyncIterator[Bench]:
    with ExitStack() as stack:
        stubs = {name: stack.enter_context(stub_engine(*way)) for name, way in ways.items()}
        made = Bench(stubs, patience)
        await made.book.aim({name: SimpleNamespace(address=stub.address, node="n") for name, stub in stubs.items()})  # type: ignore[misc]
        looking = asyncio.create_task(made.look_after())
        try:
            yield made
        finally:
            looking.cancel()
            await made.book.close()


async def test_a_stopped_engine_is_left_for_another_and_used_again_when_it_goes_on(tmp_path: Path) -> None:
    async with bench(a=(), b=()) as at:
        await at.book.publish("a", FIRST, tmp_path)
        at.stubs["a"].stop()
        stuck = at.ask()  # a is the only one that serves
        with pytest.raises(EngineUnreachable, match="a does not respond"):
            await stuck
        assert at.book.views["a"].silent
        await at.book.publish("b", FIRST, tmp_path)
        (sample,) = await at.ask()
        assert sample.token_ids == (1,)
        at.stubs["a"].go_on()
        await at.until(lambda: not at.book.views["a"].silent)
        assert at.book.views["a"].why == ""
        await at.book.publish("a", FIRST, tmp_path)
        assert at.book.views["a"].version == FIRST


async def test_a_stopped_engine_that_stays_so_is_named_and_then_to_be_ended(tmp_path: Path) -> None:
    async with bench(a=()) as at:
        await at.book.publish("a", FIRST, tmp_path)
        at.stubs["a"].stop()
        said: list[str] = []
        stuck = at.ask()

        def hung() -> bool:
            view = at.book.views["a"]
            if view.why and view.why not in said:
                said.append(view.why)
            return view.hung

        await at.until(hung)
        assert [why.partition(";")[0] for why in said] == [
            "has not responded for 2 s",
            "has not responded for 6 s",
        ]
        assert isinstance((await asyncio.gather(stuck, return_exceptions=True))[0], EngineUnreachable)


async def test_an_engine_that_accepts_weights_and_never_answers_is_found_without_a_request_for_responses(
    tmp_path: Path,
) -> None:
    patience = HealthLimits(silent_s=0.6, watchdog_s=1.5, request_s=1.0)
    async with bench(patience=patience, a=("dead",)) as at:
        with pytest.raises(EngineUnreachable):
            await at.book.publish("a", FIRST, tmp_path)
        await at.until(lambda: at.book.views["a"].hung)
        assert "has not responded" in at.book.views["a"].why


async def test_an_engine_that_tells_how_it_is_and_never_makes_a_response_is_found_by_that(tmp_path: Path) -> None:
    patience = HealthLimits(silent_s=60.0, watchdog_s=60.0, request_s=3.0)
    async with bench(patience=patience, a=("mute",)) as at:
        for _ in range(2):
            assert not at.book.views["a"].hung
            await at.book.publish("a", FIRST, tmp_path)
            with pytest.raises(EngineUnreachable):
                await at.ask()
        await at.until(lambda: at.book.views["a"].hung)
        assert at.book.views["a"].why.startswith("responds, but two requests in a row timed out after 3 s")


async def test_an_engine_that_is_slow_but_says_how_it_is_keeps_its_requests(tmp_path: Path) -> None:
    async with bench(patience=HealthLimits(silent_s=3.0, request_s=60.0), a=("mute",)) as at:
        await at.book.publish("a", FIRST, tmp_path)
        asked = at.ask()
        line = at.book._connections["a"]
        signs: set[float] = set()
        await at.until(
            lambda: len(signs) > 4 or bool(signs.add(line.health.sign))
        )  # begun, and a third of `silent_s` after the other
        assert not asked.done()
        assert not at.book.views["a"].silent
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
