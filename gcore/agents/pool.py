"""The processes that agents run in on one controller, and what becomes of an agent that hangs, dies or raises.

An agent is foreign code that works on what a model wrote, so none of it runs in the controller. A few processes (`agent.workers`)
run one agent each at a time; who finds none free waits, and its time does not run yet. An agent that takes longer than it may, or
whose response is given up, costs its process, which is killed with all it started, and replaced; so with one that dies. One that raises
does not: its process has said so, and runs the next.

The processes are those that score (`gcore.reward.process`), with another program in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

from gcore.agents.api import AgentFault
from gcore.clock import Clock
from gcore.config.agent import AgentSpec
from gcore.plugins import PluginFault
from gcore.reward.lines import check_ready, line_of
from gcore.reward.process import ProcessEnded, RewardProcess
from gcore.together import end_all
from gcore.worker.process import CannotStart

log = logging.getLogger(__name__)

START_TRIES, START_AGAIN_S = 3, 0.5
NEVER_S = 1e8
"""How long a process is waited for: `watch` says when that is over."""


class AgentPool:
    """One event loop; close it."""

    def __init__(self, spec: AgentSpec, clock: Clock) -> None:
        self._spec = spec
        self._clock = clock
        self._free: asyncio.Queue[RewardProcess | None] = asyncio.Queue()
        """A place each; None: its process is still to be started."""
        for _ in range(spec.workers):
            self._free.put_nowait(None)
        self._ending: set[asyncio.Task[str]] = set()
        self._running: set[RewardProcess] = set()

    async def warm(self) -> None:
        """Have one process loaded. Raises PluginFault for an agent that cannot be had, CannotStart."""
        place = await self._free.get()
        try:
            place = place or await self._started()
        finally:
            self._free.put_nowait(place)

    async def run(
        self, call: Mapping[str, Any], began: Callable[[], None], watch: Callable[[], Coroutine[Any, Any, NoReturn]]
    ) -> float | None:
        """What the agent returns. `began` is called when it has a process; `watch` raises when it is to be ended.

        Raises AgentFault, what `watch` raises, and PluginFault if this node does not have the agent: no other would do better.
        """
        process, keeps = await self._free.get(), False
        try:
            if process is not None and process.has_ended:  # while it had nothing to do
                self._end(process)
                process = None
            process = process or await self._started()
            process.send(line_of(call))
            began()
            told, keeps = _told(await self._said(process, watch())), True
            if isinstance(told, AgentFault):
                raise told
            return told
        except ProcessEnded:
            how = await self._ended_how(process)
            process = None
            raise AgentFault(
                f"took the process that ran it with it, which {how}",
                where="agent",
                fix="See the controller's log; raise agent.memory_mb if memory ran out",
            ) from None
        except CannotStart as error:
            raise AgentFault(f"cannot be run: {error.what}", where=error.where, fix=error.fix) from error
        finally:
            if process is not None and not keeps:
                self._end(process)
            self._free.put_nowait(process if keeps else None)

    async def close(self) -> None:
        """End every process."""
        for process in tuple(self._running):
            self._end(process)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _said(self, process: RewardProcess, watch: Coroutine[Any, Any, NoReturn]) -> Any:
        """What the process answers, unless `watch` raises first."""
        answer, watching = asyncio.ensure_future(process.answer(NEVER_S)), asyncio.ensure_future(watch)
        try:
            await asyncio.wait((answer, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                watching.result()
            return answer.result()
        finally:
            await end_all((answer, watching))

    async def _ended_how(self, process: RewardProcess | None) -> str:
        if process is None:
            return "never began"
        self._running.discard(process)
        return f"was {await process.end()}"

    async def _started(self) -> RewardProcess:
        """A process that has loaded the agent. Raises PluginFault, CannotStart."""
        for number in range(1, START_TRIES + 1):
            try:
                process = await self._loaded()
            except CannotStart:
                if number == START_TRIES:
                    raise
                await self._clock.sleep(START_AGAIN_S)
            else:
                return process
        raise AssertionError("the last try raises")

    async def _loaded(self) -> RewardProcess:
        process = await RewardProcess.of(
            "gcore.agents", line_of({"agent": self._spec.name, "memory_mb": self._spec.memory_mb})
        )
        self._running.add(process)
        try:
            check_ready(await process.answer(self._spec.start_timeout_s))
        except TimeoutError:
            self._end(process)
            raise PluginFault(
                f"agent {self._spec.name!r} was not loaded within {self._spec.start_timeout_s:g} s",
                where="agent.start_timeout_s",
                fix="Raise it, or make the agent's import quicker",
            ) from None
        except (ProcessEnded, ValueError) as error:
            self._end(process)
            raise CannotStart(
                "the process that runs agents died while it loaded the agent", fix="See the log"
            ) from error
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: RewardProcess) -> None:
        """Kill it, in the background."""
        self._running.discard(process)
        task = asyncio.get_running_loop().create_task(process.end(), name="end an agent's process")
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a process of agents was ended: %s", task.result())


def _told(said: Any) -> float | None | AgentFault:
    """What the agent returned, or raised. Raises AgentFault for what no such process says: more may come behind it."""
    match said:
        case {"reward": None}:
            return None
        case {"reward": float() | int() as reward}:
            return float(reward)
        case {"what": str(what), "trace": str(trace)}:
            return AgentFault(what, where="agent", fix="Correct the agent", trace=trace)
    raise AgentFault(
        "let its process say what no such process says", where="agent", fix="Let it leave its socket alone"
    )
