"""The pools of processes that run third-party code behind one interface: the requirements on every pool, whatever its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gcore.config.reward import RewardSpec, ScoringSpec
from gcore.config.rollout import ToolsSpec
from gcore.errors import GcoreError
from gcore.reward.api import Response, RewardError
from gcore.reward.pool import RewardPool
from gcore.rollout.environments.pool import ToolPool
from gcore.system.clock import SystemClock
from gcore.worker.sandbox.pool import PoolStatus
from gcore.worker.sandbox.process import SandboxProcess

CODE = """
import ctypes, os, subprocess, time
from pathlib import Path

def act(text):
    word, _, rest = text.partition(" ")
    if word == "hang":
        while True:
            pass
    if word == "sleep":
        time.sleep(float(rest))
    if word == "segfault":
        ctypes.string_at(0)
    if word == "exit":
        os._exit(3)
    if word == "hoard":
        return len([bytearray(1 << 20) for _ in range(10_000)])
    if word == "raise":
        raise ValueError(rest)
    if word == "fork":
        return 1.0 if os.fork() else 7.0
    if word == "leave":
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    if word == "keep":
        Path(rest).write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '1000'], start_new_session=True).pid}\\n")
        time.sleep(1000)
    if word == "touch":
        Path(rest).touch()
    if word == "print":
        print(rest, flush=True)
    if word == "pid":
        return os.getpid()
    return len(text)

def score(response, fields, spec):
    from gcore.reward import RewardResult
    return RewardResult(float(act(response)))

def tool(argument):
    return str(float(act(argument)))
"""


@dataclass(frozen=True)
class Limits:
    """The arguments of a pool. `name`: of the third-party code."""

    workers: int = 1
    timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    memory_mb: int = 4096
    name: str = "odd"


class ProcessPool(Protocol):
    """A pool with one piece of foreign code, `CODE` or another with a `score` and a `tool`."""

    group: str
    """Of entry points, in which the code is found."""
    function: str
    warmed: int
    """Processes that `warm` starts."""
    when_closed: str
    """The error of a caller that waits when the pool is closed."""
    too_long: str
    """The error of a call that took longer than one second."""
    killed: str
    """The error of a call whose process was killed by SIGSEGV."""
    exited: str
    """The error of a call whose process ended with exit code 3."""

    async def warm(self) -> None: ...

    async def ask(self, text: str) -> float | str:
        """The number that the code returns for `text`, or why there is none."""
        ...

    @property
    def processes(self) -> tuple[SandboxProcess, ...]: ...

    @property
    def status(self) -> PoolStatus: ...

    async def close(self) -> None: ...


class Rewards:
    """`RewardPool`, asked for one response at a time."""

    group, function = "gcore.rewards", "score"
    when_closed = "the reward pool of this job is closed"
    too_long = "reward 'odd' took longer than 1 s (reward.timeout_s)"
    killed = "reward 'odd' ended its process, which was killed by SIGSEGV"
    exited = "reward 'odd' ended its process, which was ended by itself with exit code 3"

    def __init__(self, limits: Limits) -> None:
        self._spec = RewardSpec(name=limits.name, timeout_s=limits.timeout_s)
        scoring = ScoringSpec(
            workers=limits.workers, memory_mb=limits.memory_mb, start_timeout_s=limits.start_timeout_s
        )
        self._pool = RewardPool({"data": self._spec}, scoring, SystemClock())
        self.warmed = limits.workers

    async def warm(self) -> None:
        await self._pool.warm()

    async def ask(self, text: str) -> float | str:
        try:
            (result,) = await self._pool.score(self._spec, {}, [Response(text, len(text))])
        except GcoreError as error:
            return str(error)
        return str(result) if isinstance(result, RewardError) else result.value

    @property
    def processes(self) -> tuple[SandboxProcess, ...]:
        return tuple(slot.process for slot in self._pool._slots if slot.process is not None)

    @property
    def status(self) -> PoolStatus:
        return self._pool.scoring

    async def close(self) -> None:
        await self._pool.close()


class OneTool:
    """`ToolPool` with one tool."""

    group, function = "gcore.tools", "tool"
    warmed = 1
    when_closed = "took the process that ran it with it"
    too_long = "error: tool 'odd' took longer than 1 s"
    killed = exited = "error: tool 'odd' took the process that ran it with it"  # a model is not told how

    def __init__(self, limits: Limits) -> None:
        self._name = limits.name
        spec = ToolsSpec(
            names=(limits.name,),
            workers=limits.workers,
            timeout_s=limits.timeout_s,
            memory_mb=limits.memory_mb,
            start_timeout_s=limits.start_timeout_s,
        )
        self._pool = ToolPool(spec, SystemClock())

    async def warm(self) -> None:
        await self._pool.warm()

    async def ask(self, text: str) -> float | str:
        said = await self._pool.call(self._name, text)
        return said.text if said.failed else float(said.text)

    @property
    def processes(self) -> tuple[SandboxProcess, ...]:
        return tuple(self._pool._crew._running)

    @property
    def status(self) -> PoolStatus:
        return self._pool.waits

    async def close(self) -> None:
        await self._pool.close()


POOLS: dict[str, Callable[[Limits], ProcessPool]] = {"rewards": Rewards, "tools": OneTool}
