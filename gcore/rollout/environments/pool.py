"""Process pool that runs a job's tools on one controller, and handles tools that hang, crash or raise.

Tools are foreign code that processes model output, so they do not run in the controller. A few processes
(`environment.tools.workers`) run one call each. Waiting for a free process does not count as the environment's time. If
a call takes longer than `environment.tools.timeout_s`, its process is killed and replaced; so is a process that dies.
The model gets a short error text and continues, because a failing tool is part of its environment. An event reports
each reason once. An argument that a tool cannot process (`BadArgument`) is the model's mistake and not reported. A
picture that cannot be used is the tool's mistake and fails the response.

The processes are the same as for rewards, with another program (`gcore.worker.sandbox.pool`).
"""

from __future__ import annotations

import asyncio
import copy
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gcore.config.rollout import EnvironmentSpec, ToolsSpec
from gcore.plugins import PluginFault, shown_name
from gcore.rollout.environments.api import (
    CheckedEnvironment,
    EnvironmentFault,
    EnvironmentMaker,
    Said,
    Setting,
    find_environment,
)
from gcore.rollout.environments.episode import PICTURE_FIX, hung_environment
from gcore.system.clock import Clock, SystemClock
from gcore.system.concurrency import TaskHung, cancel_task, wait_within
from gcore.system.process import CannotStart
from gcore.types import PictureRef
from gcore.worker.sandbox.child import encode_line
from gcore.worker.sandbox.pool import Holding, PoolStatus, SandboxProgram, WorkerPool
from gcore.worker.sandbox.process import ProcessEnded, ProtocolBroken

LONGEST_ARGUMENT = 1 << 16
"""Maximum length of a tool's argument in characters."""

SeenPictures = Callable[[], Sequence[str]]
"""Returns the paths of a response's pictures."""

FaultReporter = Callable[[str, str], None]
"""Called for a failed tool: the error, and the traceback of its own code or an empty text."""


class ToolPool:
    """Runs tools in a process pool (`gcore.rollout.environments.api.Tools`). Belongs to one event loop; close it after
    use.
    """

    def __init__(
        self, spec: ToolsSpec, clock: Clock, on_fault: FaultReporter = lambda what, trace: None, group: str = ""
    ) -> None:
        """`on_fault` is called for every failure; the callee removes duplicates.

        `group`: folder of the control group (cgroup) of the processes; empty: that of this process.
        """
        self._spec = spec
        self._called = spec.called
        self._on_fault = on_fault
        self._folder = tempfile.TemporaryDirectory(prefix="gcore-tools-") if spec.max_pictures else None
        folder = "" if self._folder is None else self._folder.name
        setup = encode_line({"tools": list(spec.names), "memory_mb": spec.memory_mb, "folder": folder})
        program = SandboxProgram(
            "gcore.environments", setup, "the tools", "environment.tools", spec.start_timeout_s, group
        )
        self._crew = WorkerPool(program, spec.workers, clock)
        self._holding: Holding = nullcontext
        self._seen: SeenPictures = tuple
        self._made: list[PictureRef] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order of the spec."""
        return tuple(self._called)

    async def warm(self) -> None:
        """Start one process. Raises PluginFault for a tool that cannot be loaded, CannotStart if no process can be
        started.
        """
        if self._spec.names:
            await self._crew.warm()

    def within(self, holding: Holding, seen: SeenPictures = tuple) -> ToolPool:
        """Return the same tools for one response, whose waits for a free process happen within the context `holding()`.

        The caller stops the environment's timeout in that context. `seen`: returns the paths of the response's pictures.
        """
        same = copy.copy(self)
        same._holding, same._seen, same._made = holding, seen, []
        return same

    def discard_pictures(self) -> None:
        """Delete the files of the pictures that tools returned for this response (`within`)."""
        for picture in self._made:
            Path(picture.path).unlink(missing_ok=True)

    async def call(self, name: str, argument: str) -> Said:
        """Call a tool; a failure is returned as a failed result.

        Raises KeyError for a name that is not in the spec, EnvironmentFault if the tool returned a picture that cannot be
        used, and PluginFault if this node lacks a tool of the spec, because every response would be invalid then.
        """
        reference = self._called[name]
        if len(argument) > LONGEST_ARGUMENT:
            return _error(f"an argument of {len(argument)} characters; at most {LONGEST_ARGUMENT}")
        async with self._crew.lent(self._holding) as loan:
            loan.process.ask((reference, argument, list(self._seen())))
            try:
                result = self._as_result(await loan.process.result(self._spec.timeout_s))
            except TimeoutError:
                return self._failed(f"tool {name!r} took longer than {self._spec.timeout_s:g} s")
            except EnvironmentFault:
                loan.fit = True
                raise
            except ProtocolBroken:
                return self._failed(f"tool {name!r} let its process say what no such process says")
            except ProcessEnded:
                return self._failed(f"tool {name!r} took the process that ran it with it")
            loan.fit = True  # stays False if the caller was cancelled: the next call would get this result
            return result

    @property
    def waits(self) -> PoolStatus:
        """Number of calls that wait for a process, and of those served so far."""
        return self._crew.waits

    async def close(self) -> None:
        """End every process."""
        await self._crew.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _as_result(self, said: Any) -> Said:
        match said:
            case {"said": str(text), "pictures": list(pictures)}:
                made = tuple(map(self._as_picture, pictures))
                self._made += made
                return Said(text, pictures=made)
            case {"broken": str(why)}:
                raise EnvironmentFault(why, where="environment.tools", fix=PICTURE_FIX)
            case {"refused": str(text)}:
                return _error(text)
            case {"what": str(what), "trace": str(trace)}:
                return self._failed(what, trace)
        raise ProtocolBroken("the tool process sent an invalid message")

    def _as_picture(self, fields: Any) -> PictureRef:
        match fields:
            case {
                "name": str(name),
                "sha256": str(sha256),
                "height": int(height),
                "width": int(width),
                "size": int(size),
            }:
                if self._folder is not None and re.fullmatch(r"\d+-\d+", name) and min(height, width, size) > 0:
                    path = str(Path(self._folder.name) / name)
                    return PictureRef(path, sha256, height, width, height, width, size)
        raise ProtocolBroken("the tool process sent an invalid message")

    def _failed(self, what: str, trace: str = "") -> Said:
        self._on_fault(what, trace)
        return _error(what)


def _error(why: str) -> Said:
    return Said(f"error: {why}", failed=True)


def try_environment(spec: EnvironmentSpec, fields: Mapping[str, Any], *, chat: bool) -> None:
    """Create an environment and its tools for a prompt's entry and call `reset`, before the job exists.

    It detects plug-ins that cannot be loaded, misspelt options and missing tools. Blocks; do not use it in an event
    loop. Raises PluginFault.
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
            f"environment {shown_name(spec.name)!r} took longer than {spec.step_timeout_s:g} s to start",
            where="environment.step_timeout_s",
            fix="Raise it, or make the environment faster",
        ) from error
    finally:
        await tools.close()
        for left in asyncio.all_tasks() - {asyncio.current_task()}:
            await cancel_task(left, clock)


def _refused(error: EnvironmentFault) -> PluginFault:
    return PluginFault(error.what, where=error.where or "environment", fix=error.fix, trace=error.trace)
