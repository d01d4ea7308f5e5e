"""The processes that tools run in on one controller, and what becomes of a tool that hangs, dies or raises.

Tools are foreign code that works on what a model wrote, so none of it runs in the controller. A few processes
(`environment.tools.workers`) take one call each; who finds none free waits, which is not counted as time that its environment takes. A call that takes longer than
`environment.tools.timeout_s` costs its process, which is killed and replaced; so with one that dies. The model is told what
happened, in a few words, and goes on from there: a tool that fails is a part of its world. People are told once for each reason, by
an event. An argument that a tool cannot work with (`BadArgument`) is the model's own mistake, and no event.

The processes are those that score, with another program in them (`gcore.worker.sandbox.pool`).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from gcore.config.rollout import EnvironmentSpec, ToolsSpec
from gcore.plugins import PluginFault
from gcore.rollout.environments.api import (
    CheckedEnvironment,
    EnvironmentFault,
    EnvironmentMaker,
    Said,
    Setting,
    Tools,
    find_environment,
)
from gcore.rollout.environments.episode import hung_environment
from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import TaskHung, cancel_task, wait_within
from gcore.system.process import CannotStart
from gcore.worker.sandbox.child import encode_line
from gcore.worker.sandbox.pool import Holding, PoolStatus, SandboxProgram, WorkerPool
from gcore.worker.sandbox.process import ProcessEnded, ProtocolBroken

LONGEST_ARGUMENT = 1 << 16
"""Characters: no tool is handed more."""

Told = Callable[[str, str], None]
"""Of a tool that failed: what happened, and the traceback of its own code, or nothing."""


class ToolPool:
    """Implements `gcore.rollout.environments.api.Tools`. One event loop; close it."""

    def __init__(
        self, spec: ToolsSpec, clock: Clock, on_fault: Told = lambda what, trace: None, group: str = ""
    ) -> None:
        """`on_fault` is told every time; whoever listens knows what was told before. `group`: the control group of the processes."""
        self._spec = spec
        self._on_fault = on_fault
        setup = encode_line({"tools": list(spec.names), "memory_mb": spec.memory_mb})
        program = SandboxProgram(
            "gcore.environments", setup, "the tools", "environment.tools", spec.start_timeout_s, group
        )
        self._crew = WorkerPool(program, spec.workers, clock)
        self._holding: Holding = nullcontext

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the spec."""
        return self._spec.names

    async def warm(self) -> None:
        """Have one process loaded. Raises PluginFault for a tool that cannot be had, CannotStart."""
        if self._spec.names:
            await self._crew.warm()

    def within(self, holding: Holding) -> Tools:
        """The same tools, for one response, which waits for a process within `holding()`."""
        same = copy.copy(self)
        same._holding = holding
        return same

    async def call(self, name: str, argument: str) -> Said:
        """What the tool says, or that it said nothing. Raises KeyError for one that the spec does not name, PluginFault if this
        node does not have what the spec names: nothing that a model does is worth anything then."""
        if name not in self._spec.names:
            raise KeyError(name)
        if len(argument) > LONGEST_ARGUMENT:
            return _error(f"an argument of {len(argument)} characters; at most {LONGEST_ARGUMENT}")
        async with self._crew.lent(self._holding) as loan:
            loan.process.ask((name, argument))
            try:
                told = self._told(await loan.process.told(self._spec.timeout_s))
            except TimeoutError:
                return self._failed(f"tool {name!r} took longer than {self._spec.timeout_s:g} s")
            except ProtocolBroken:
                return self._failed(f"tool {name!r} let its process say what no such process says")
            except ProcessEnded:
                return self._failed(f"tool {name!r} took the process that ran it with it")
            loan.fit = True  # not of one whose caller has gone: its answer would be taken for another's
            return told

    @property
    def waits(self) -> PoolStatus:
        """Who waits for a process of the tools, and how many have been served."""
        return self._crew.waits

    async def close(self) -> None:
        """End every process."""
        await self._crew.close()

    def _told(self, said: Any) -> Said:
        match said:
            case {"said": str(text)}:
                return Said(text)
            case {"refused": str(text)}:
                return _error(text)
            case {"what": str(what), "trace": str(trace)}:
                return self._failed(what, trace)
        raise ProtocolBroken("it said what no such process says")

    def _failed(self, what: str, trace: str = "") -> Said:
        self._on_fault(what, trace)
        return _error(what)


def _error(why: str) -> Said:
    return Said(f"error: {why}", failed=True)


def try_environment(spec: EnvironmentSpec, fields: Mapping[str, Any], *, chat: bool) -> None:
    """Make an environment and its tools for a prompt's entry, and ask what it shows first, before there is a job.

    What cannot be loaded, an option that is misspelt, a tool that nobody provides: all of that fails here. Blocks; not within
    an event loop. Raises PluginFault.
    """
    maker = find_environment(spec.name)
    asyncio.run(_tried(spec, maker, fields, chat=chat))


async def _tried(spec: EnvironmentSpec, maker: EnvironmentMaker, fields: Mapping[str, Any], *, chat: bool) -> None:
    clock = SystemClock()
    tools = ToolPool(spec.tools.model_copy(update={"workers": 1}), clock)
    try:
        await tools.warm()
        environment = CheckedEnvironment(spec.name, maker, Setting(spec.options, fields, 0, tools, chat))
        await wait_within(environment.reset(), spec.step_timeout_s, clock)
        await wait_within(environment.close(), spec.step_timeout_s, clock)
    except EnvironmentFault as error:
        raise _refused(error) from error
    except CannotStart as error:
        raise PluginFault(error.what, where="environment.tools", fix=error.fix) from error
    except TaskHung as error:
        raise _refused(hung_environment(spec.step_timeout_s)) from error
    except TimeoutError as error:
        raise PluginFault(
            f"environment {spec.name!r} took longer than {spec.step_timeout_s:g} s to begin",
            where="environment.step_timeout_s",
            fix="Raise it, or make the environment quicker",
        ) from error
    finally:
        await tools.close()
        for left in asyncio.all_tasks() - {asyncio.current_task()}:
            await cancel_task(left, clock)


def _refused(error: EnvironmentFault) -> PluginFault:
    return PluginFault(error.what, where=error.where or "environment", fix=error.fix, trace=error.trace)
