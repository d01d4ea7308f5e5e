"""The processes that tools run in on one controller, and what becomes of a tool that hangs, dies or raises.

Tools are foreign code that works on what a model wrote, so none of it runs in the controller. A few processes
(`environment.tools.workers`) take one call each; who finds none free waits. A call that takes longer than
`environment.tools.timeout_s` costs its process, which is killed and replaced; so with one that dies. The model is told what
happened, in a few words, and goes on from there: a tool that fails is a part of its world. People are told once for each reason, by
an event. An argument that a tool cannot work with (`BadArgument`) is the model's own mistake, and no event.

The processes are those that score (`gcore.reward.process`), with another program in them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from gcore.clock import Clock
from gcore.config.environment import ToolsSpec
from gcore.environments.api import Said
from gcore.plugins import PluginFault
from gcore.reward.lines import check_ready, line_of
from gcore.reward.process import ProcessEnded, RewardProcess
from gcore.worker.process import CannotStart

log = logging.getLogger(__name__)

START_TRIES, START_AGAIN_S = 3, 0.5
LONGEST_ARGUMENT = 1 << 16
"""Characters: no tool is handed more."""
Told = Callable[[str, str], None]
"""Of a tool that failed: what happened, and the traceback of its own code, or nothing."""


class ToolPool:
    """Implements `gcore.environments.api.Tools`. One event loop; close it."""

    def __init__(self, spec: ToolsSpec, clock: Clock, on_fault: Told = lambda what, trace: None) -> None:
        """`on_fault` is told every time; whoever listens knows what was told before."""
        self._spec = spec
        self._clock = clock
        self._on_fault = on_fault
        self._free: asyncio.Queue[RewardProcess | None] = asyncio.Queue()
        """A place each; None: its process is still to be started."""
        for _ in range(spec.workers):
            self._free.put_nowait(None)
        self._ending: set[asyncio.Task[str]] = set()
        self._running: set[RewardProcess] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the spec."""
        return self._spec.names

    async def warm(self) -> None:
        """Have one process loaded. Raises PluginFault for a tool that cannot be had, CannotStart."""
        if self._spec.names:
            place = await self._free.get()
            try:
                place = place or await self._started()
            finally:
                self._free.put_nowait(place)

    async def call(self, name: str, argument: str) -> Said:
        """What the tool says, or that it said nothing. Raises KeyError for one that the spec does not name, PluginFault if this
        node does not have what the spec names: nothing that a model does is worth anything then."""
        if name not in self._spec.names:
            raise KeyError(name)
        if len(argument) > LONGEST_ARGUMENT:
            return _error(f"an argument of {len(argument)} characters; at most {LONGEST_ARGUMENT}")
        process, keeps = await self._free.get(), False
        try:
            if process is not None and process.has_ended:  # while it had nothing to do
                self._end(process)
                process = None
            process = process or await self._started()
            process.send(line_of([name, argument]))
            said = await process.answer(self._spec.timeout_s)
            told, keeps = self._told(said), True
            return told
        except TimeoutError:
            return self._failed(f"tool {name!r} took longer than {self._spec.timeout_s:g} s")
        except ProcessEnded:
            return self._failed(f"tool {name!r} took the process that ran it with it")
        except CannotStart as error:
            return self._failed(f"tool {name!r} cannot be run: {error.what}")
        finally:
            if process is not None and not keeps:
                self._end(process)  # also one whose caller has gone: its answer would be taken for another's
            self._free.put_nowait(process if keeps else None)

    async def close(self) -> None:
        """End every process."""
        for process in tuple(self._running):
            self._end(process)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _told(self, said: Any) -> Said:
        match said:
            case {"said": str(text)}:
                return Said(text)
            case {"refused": str(text)}:
                return _error(text)
            case {"what": str(what), "trace": str(trace)}:
                return self._failed(what, trace)
        raise ProcessEnded("it said what no such process says")

    def _failed(self, what: str, trace: str = "") -> Said:
        self._on_fault(what, trace)
        return _error(what)

    async def _started(self) -> RewardProcess:
        """A process that has loaded the tools. Raises PluginFault, CannotStart."""
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
        setup = line_of({"tools": list(self._spec.names), "memory_mb": self._spec.memory_mb})
        process = await RewardProcess.of("gcore.environments", setup)
        self._running.add(process)
        try:
            check_ready(await process.answer(self._spec.start_timeout_s))
        except TimeoutError:
            self._end(process)
            raise PluginFault(
                f"the tools were not loaded within {self._spec.start_timeout_s:g} s",
                where="environment.tools.start_timeout_s",
                fix="Raise it, or make the tools' import quicker",
            ) from None
        except (ProcessEnded, ValueError) as error:
            self._end(process)
            raise CannotStart("the process that runs tools died while it loaded them", fix="See the log") from error
        except BaseException:
            self._end(process)
            raise
        return process

    def _end(self, process: RewardProcess) -> None:
        """Kill it, in the background."""
        self._running.discard(process)
        task = asyncio.get_running_loop().create_task(process.end(), name="end a tool's process")
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a process of tools was ended: %s", task.result())


def _error(why: str) -> Said:
    return Said(f"error: {why}", failed=True)
