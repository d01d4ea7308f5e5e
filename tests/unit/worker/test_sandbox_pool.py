"""Shared processes: every waiting caller gets one, whatever happens to earlier callers and processes."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from gcore.config.rollout import ToolsSpec
from gcore.plugins import PluginFault
from gcore.rollout.environments.pool import ToolPool
from gcore.system.concurrency import Pausable, wait_within
from gcore.system.process import CannotStart
from gcore.testing import FakeClock
from gcore.worker.sandbox.pool import START_TRIES, WAIT_S, SandboxProgram, WorkerPool
from gcore.worker.sandbox.process import ProcessEnded, SandboxProcess

PROGRAM = SandboxProgram("odd", b"", "the tools", "environment.tools", 60.0)
READY, LATE, DEAD = {"ready": True, "facts": {}}, TimeoutError(), ProcessEnded("it died")


class Started:
    """A process that was started. `said`: what comes of its loading."""

    def __init__(self, said: Any) -> None:
        self._said = said
        self.has_ended = self.says_more = False
        self.children: frozenset[int] = frozenset()

    async def answer(self, timeout_s: float) -> Any:
        if isinstance(self._said, BaseException):
            raise self._said
        return self._said

    async def result(self, timeout_s: float) -> Any:
        return await self.answer(timeout_s)

    def ask(self, call: Any) -> None:
        pass

    def started(self) -> frozenset[int]:
        return self.children

    async def end(self) -> str:
        self.has_ended = True
        return "killed"


class Machine:
    """The machine that starts processes; each sends its scripted messages, then that it is ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *said: Any) -> None:
        self.started: list[Started] = []
        self._said = list(said)
        monkeypatch.setattr(SandboxProcess, "of", self._of)

    async def _of(self, module: str, setup: bytes, group: str = "") -> Started:
        said = self._said.pop(0) if self._said else READY
        if isinstance(said, CannotStart):
            raise said
        self.started.append(Started(said))
        return self.started[-1]


async def used(crew: WorkerPool, *, fit: bool = True) -> Any:
    async with crew.lent() as loan:
        await asyncio.sleep(0)
        loan.fit = fit
        return loan.process


async def test_a_program_that_takes_too_long_is_the_specs_fault_until_one_has_been_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, machine = FakeClock(), Machine(monkeypatch, LATE)
    crew = WorkerPool(PROGRAM, 2, clock)
    with pytest.raises(
        PluginFault, match=r"environment\.tools\.start_timeout_s: loading the tools took longer than 60 s"
    ):
        await clock.run(used(crew))
    await clock.run(used(crew, fit=False))
    machine._said = [LATE] * START_TRIES
    began = clock.monotonic()
    assert await clock.run(used(crew)) is machine.started[-1]
    assert clock.monotonic() - began >= WAIT_S
    assert len(machine.started) == 2 + START_TRIES + 1
    await crew.close()
    assert all(one.has_ended for one in machine.started)


@pytest.mark.parametrize("lack", [DEAD, CannotStart("no process can be started (no memory)")])
async def test_waiting_for_an_unstartable_process_is_reported_with_the_reason(
    lack: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, said = FakeClock(), []
    Machine(monkeypatch, *[lack] * START_TRIES)
    crew = WorkerPool(PROGRAM, 1, clock)

    async def look() -> None:
        await clock.sleep(WAIT_S)
        said.append(crew.waits)

    await clock.run(asyncio.gather(used(crew), look()))
    assert said[0].waiting == 1
    assert "1 response waits for a free process of the tools (" in said[0].what
    assert ("no memory" in said[0].what) or ("died while it loaded the tools: killed" in said[0].what)
    assert (crew.waits.waiting, crew.waits.scored) == (0, 1)
    assert "(" not in crew.waits.what


async def test_no_more_are_started_than_are_needed_and_none_serves_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    crew = WorkerPool(PROGRAM, 4, FakeClock())
    assert await used(crew) is await used(crew)
    assert len(machine.started) == 1
    first, second, *_ = await asyncio.gather(*(used(crew) for _ in range(9)))
    assert first is not second
    assert len(machine.started) == 4


async def test_unfit_or_dead_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    crew = WorkerPool(PROGRAM, 1, FakeClock())
    await used(crew, fit=False)
    await used(crew)
    assert len(machine.started) == 2
    machine.started[1].has_ended = True
    await used(crew)
    assert len(machine.started) == 3
    machine.started[2].says_more = True
    await used(crew)
    assert len(machine.started) == 4
    await crew.close()
    assert all(one.has_ended for one in machine.started)


async def test_callers_that_go_take_no_place_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    clock = FakeClock()
    crew = WorkerPool(PROGRAM, 2, clock)
    for round_ in range(40):
        callers = [asyncio.ensure_future(used(crew)) for _ in range(6)]
        for _ in range(round_ % 7):
            await asyncio.sleep(0)
        for caller in callers[round_ % 3 :: 2]:
            caller.cancel()
        await asyncio.wait(callers)
    assert crew.waits.waiting == 0
    assert len(set(await asyncio.gather(used(crew), used(crew)))) == 2


async def test_a_call_that_waits_for_a_process_takes_none_of_its_environments_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    machine = Machine(monkeypatch)

    async def answer(timeout_s: float) -> Any:
        await clock.sleep(4.0)
        return {"said": "x", "pictures": []}

    async def response(limit_s: float) -> str:
        hold = Pausable(clock)
        tools = pool.within(hold.held)
        try:
            return (await wait_within(tools.call("search", "a"), limit_s, clock, hold)).text
        except TimeoutError:
            return "late"

    pool = ToolPool(ToolsSpec(names=("search",), workers=1), clock)
    await clock.run(pool.warm())
    monkeypatch.setattr(machine.started[0], "answer", answer)
    assert await clock.run(asyncio.gather(*(response(6.0) for _ in range(16)))) == ["x"] * 16
    assert await clock.run(response(3.0)) == "late", "the call itself counts"


async def test_time_that_is_held_by_some_counts_again_when_the_last_has_gone() -> None:
    clock = FakeClock()
    hold = Pausable(clock)

    async def holds(at: float, seconds: float) -> None:
        await clock.sleep(at)
        with hold.held():
            await clock.sleep(seconds)

    async def works(seconds: float) -> str:
        await asyncio.gather(holds(1.0, 3.0), holds(2.0, 6.0), clock.sleep(seconds))
        return "done"

    assert await clock.run(wait_within(works(16.5), 10.0, clock, hold)) == "done"
    with pytest.raises(TimeoutError):
        await clock.run(wait_within(works(17.5), 10.0, clock, hold))
    assert hold.seconds == pytest.approx(14.0)


async def test_process_with_leftover_children_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setattr(Started, "started", lambda one: one.children | {1})
    crew = WorkerPool(PROGRAM, 1, FakeClock())
    assert await used(crew) is await used(crew)
    machine.started[0].children = frozenset({2})
    await used(crew)
    await used(crew)
    assert len(machine.started) == 2
    await crew.close()
    assert all(one.has_ended for one in machine.started)


async def test_an_error_that_comes_while_the_caller_is_cancelled_is_not_logged_as_lost() -> None:
    """As when a sibling's error ends all responses to a prompt."""
    fails, logged = asyncio.Event(), list[str]()

    async def work() -> None:
        await fails.wait()
        raise ValueError("a broken picture")

    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
    waiting = asyncio.create_task(wait_within(work(), 10.0, FakeClock()))
    for _ in range(5):
        await asyncio.sleep(0)
    fails.set()
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    del waiting
    gc.collect()
    assert not logged
