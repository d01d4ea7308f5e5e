"""An idle engine's wait for a burst of requests; and the thread that owns the model, over a core that only counts."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from gcore.engines.request import GenerationRequest, RequestOutput, RequestSampling
from gcore.engines.torch import async_engine as module
from gcore.engines.torch.async_engine import GATHER_MOST_S, ArrivalWait, AsyncEngine, ModelThread
from gcore.engines.torch.engine import EngineCore
from gcore.system.clock import SystemClock


def test_a_request_that_comes_alone_is_begun_at_once() -> None:
    gathering = ArrivalWait()
    for now in (0.0, 10.0, 20.0):
        assert not gathering.waits
        gathering.begins(now, more=0)
        gathering.arrives(now + GATHER_MOST_S + 0.01)


def test_after_a_burst_the_next_one_is_gathered_until_one_comes_alone() -> None:
    gathering = ArrivalWait()
    gathering.begins(0.0, more=0)
    gathering.arrives(GATHER_MOST_S / 2)
    assert gathering.waits
    gathering.begins(10.0, more=5)
    assert gathering.waits
    gathering.begins(20.0, more=0)
    assert not gathering.waits


class Counting:
    """A core whose work is done in one cycle."""

    def __init__(self) -> None:
        self.outbox: list[RequestOutput] = []
        self.paused, self.asleep = False, frozenset[str]()
        self.rows, self.running, self.waiting = 4, 0, 0
        self.cycles: list[int] = []
        self.done = threading.Event()

    @property
    def can_work(self) -> bool:
        return self.waiting > 0

    def submit(self) -> None:
        self.waiting += 1

    def cycle(self) -> None:
        self.cycles.append(self.waiting)
        self.waiting = 0
        self.done.set()


def test_a_lone_request_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever waits for others would wait for an hour.
    monkeypatch.setattr(module, "GATHER_S", 3600.0)
    monkeypatch.setattr(module, "GATHER_MOST_S", 3600.0)
    core = Counting()
    running = started(core)
    running.perform(core.submit)
    assert core.done.wait(60)
    assert core.cycles == [1]


def started(core: Counting, on_death: Callable[[Exception], None] = lambda error: None) -> ModelThread:
    def deliver(deliveries: Sequence[RequestOutput]) -> None:
        raise AssertionError("there is nothing to deliver")

    def report(phase: str, progress: int) -> None:
        pass

    runner = ModelThread(
        cast(EngineCore, cast(Any, core)),
        clock=SystemClock(),
        deliver=deliver,
        report=report,
        on_death=on_death,
    )
    runner.start()
    return runner


def test_exception_of_an_action_reaches_its_caller() -> None:
    running = started(Counting())

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        running.perform(fail).result(60)
    assert running.perform(lambda: 5).result(60) == 5
    assert running.alive


def test_an_error_that_no_caller_would_learn_of_ends_the_thread() -> None:
    deaths: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    running = started(Counting(), deaths.put)

    def fail() -> None:
        raise ValueError("no")

    running.post(fail)
    assert str(deaths.get(timeout=60)) == "no"


async def test_a_request_that_the_core_cannot_queue_ends_the_engine() -> None:
    """Its client would wait forever."""
    deaths: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    core = Counting()
    engine = AsyncEngine(cast(EngineCore, cast(Any, core)), None, SystemClock(), {"model_path": "m"})
    engine.open(started(core, deaths.put))
    asked = asyncio.create_task(engine.ended([GenerationRequest(0, "r", (1,), RequestSampling(1, 0))], {"r"}))
    error = await asyncio.to_thread(deaths.get, timeout=60)
    assert isinstance(error, TypeError), "Counting queues no tasks"
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
