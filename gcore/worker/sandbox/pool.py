"""Pools of processes that run foreign code: how processes are started, and how callers share them.

If a program cannot be loaded or takes too long, and none was ever loaded here, the spec is at fault: no other process
would do better, and the job fails with this error. If one was loaded before, the machine is at fault: it lacks memory
or is overloaded. Then, and whenever a process cannot be started, callers wait and the start is retried: waiting is
better than losing the work. This holds for rewards (`gcore.reward.pool`), tools and agents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from gcore.plugins import PluginFault
from gcore.system.clock import Clock
from gcore.system.process import CannotStart
from gcore.worker.sandbox.process import ProcessEnded, SandboxProcess, check_ready


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Load of a pool: callers that wait for a process, calls served so far, and a sentence about the wait."""

    waiting: int
    scored: int
    what: str


log = logging.getLogger(__name__)
START_TRIES, START_AGAIN_S = 3, 0.5

WAIT_S = 5.0
"""Seconds before another attempt to start a process, after `START_TRIES` failed."""

Holding = Callable[[], AbstractContextManager[None]]
"""Creates a context that is entered while a caller waits for a process, for example to account for the wait."""


@dataclass(frozen=True, slots=True)
class SandboxProgram:
    """What the processes of a pool run: `python -m module`, which first receives `setup`.

    `what`: what it loads, in words, for messages. `section`: the section of the spec with its `start_timeout_s` and
    `memory_mb`, for errors.
    """

    module: str
    setup: bytes
    what: str
    section: str
    start_timeout_s: float
    group: str = ""
    """The control group (cgroup folder) in which the processes run; empty: that of this process."""


class ProcessStarter:
    """Starts the processes of one pool and loads their program. Belongs to one event loop."""

    def __init__(self, program: SandboxProgram, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._has_loaded = False

    async def started(self) -> SandboxProcess:
        """Start a process and wait until it has loaded its program, in up to `START_TRIES` attempts.

        Raises PluginFault if the program is at fault, CannotStart if the machine is.
        """
        for _ in range(START_TRIES - 1):
            try:
                return await self._loaded()
            except CannotStart:
                await self._clock.sleep(START_AGAIN_S)
        return await self._loaded()

    async def _loaded(self) -> SandboxProcess:
        program = self._program
        process = await SandboxProcess.of(program.module, program.setup, program.group)
        try:
            process.facts = check_ready(await process.answer(program.start_timeout_s))
        except TimeoutError:
            await process.end()
            raise self._late() from None
        except (ProcessEnded, ValueError):
            how = await process.end()
            raise CannotStart(
                f"the process died while it loaded {program.what}: {how}",
                where=program.section,
                fix=f"See the controller's log; raise {program.section}.memory_mb if memory ran out",
            ) from None
        except BaseException:
            await process.end()
            raise
        self._has_loaded = True
        return process

    def _late(self) -> PluginFault | CannotStart:
        kind = CannotStart if self._has_loaded else PluginFault
        return kind(
            f"loading {self._program.what} took longer than {self._program.start_timeout_s:g} s",
            where=f"{self._program.section}.start_timeout_s",
            fix="Raise it, or make the import faster",
        )


class Lease:
    """A pool's process, reserved for one caller.

    `fit`: the caller sets it when the process has answered the last call, so that another caller can use it.
    """

    def __init__(self, process: SandboxProcess) -> None:
        self.process = process
        self.fit = False


class WorkerPool:
    """Up to `workers` processes, each used by one caller at a time. Belongs to one event loop; must be closed.

    A process that is returned without `fit` is ended, because a late response could be mistaken for that to another
    call. So is a process whose last call started child processes that still run. A process is started only when a
    caller needs one and none is free.
    """

    def __init__(self, program: SandboxProgram, workers: int, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._starter = ProcessStarter(program, clock)
        self._free: asyncio.LifoQueue[SandboxProcess | None] = asyncio.LifoQueue()
        """One entry per worker that is not reserved; None: its process is not started yet."""
        for _ in range(workers):
            self._free.put_nowait(None)
        self._ending: set[asyncio.Task[str]] = set()
        self._running: dict[SandboxProcess, frozenset[int]] = {}
        """Each process, with the pids of the children that it had when it was loaded, which stay for all its calls."""
        self._waiting = 0
        self._done = 0
        self._lacks = ""

    async def warm(self) -> None:
        """Start and load one process before the first call. Raises PluginFault for a program that cannot be loaded,
        CannotStart.
        """
        place = await self._free.get()
        try:
            place = place or await self._started()
        finally:
            self._free.put_nowait(place)

    @asynccontextmanager
    async def lent(self, holding: Holding = nullcontext) -> AsyncIterator[Lease]:
        """Reserve a process for the block. If none is free, wait within `holding()`.

        Raises PluginFault if the program cannot be loaded on this node.
        """
        with holding():
            loan = Lease(await self._taken())
        try:
            yield loan
        finally:
            self._done += 1
            fit = loan.fit and self._is_clean(loan.process)
            if not fit:
                self._end(loan.process)
            self._free.put_nowait(loan.process if fit else None)

    @property
    def waits(self) -> PoolStatus:
        """How many callers wait for a process, and how many have been served."""
        count = "1 response waits" if self._waiting == 1 else f"{self._waiting} responses wait"
        why = f" ({self._lacks})" if self._lacks else ""
        return PoolStatus(self._waiting, self._done, f"{count} for a free process of {self._program.what}{why}")

    async def close(self) -> None:
        """End every process of the pool and wait until all have ended."""
        for process in tuple(self._running):
            self._end(process)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def how_ended(self, process: SandboxProcess) -> str:
        """End a process of this pool if it lives, and return a sentence about how it ended."""
        task = self._end(process)
        return "ended with all the others" if task is None else await asyncio.shield(task)

    def _is_clean(self, process: SandboxProcess) -> bool:
        """Whether the process's last call left no child processes and no unread message behind."""
        if left := process.started() - self._running.get(process, frozenset()):
            log.info("ending a process of %s: its last call left %d processes", self._program.what, len(left))
        return not left and not process.says_more

    def _end(self, process: SandboxProcess) -> asyncio.Task[str] | None:
        """Kill a process in the background. Returns the task, or None if this was already begun."""
        if process not in self._running:
            return None
        del self._running[process]
        task = asyncio.get_running_loop().create_task(process.end(), name=f"end a process of {self._program.what}")
        self._ending.add(task)
        task.add_done_callback(self._ended)
        return task

    async def _taken(self) -> SandboxProcess:
        self._waiting += 1
        try:
            place = await self._free.get()
            try:
                if place is not None and (place.has_ended or place.says_more):  # it died or wrote while idle
                    self._end(place)
                    place = None
                return place or await self._found()
            except BaseException:
                self._free.put_nowait(None)
                raise
        finally:
            self._waiting -= 1

    async def _found(self) -> SandboxProcess:
        """Start a process, with retries while the machine lacks something. Raises PluginFault if the program is at
        fault.
        """
        while True:
            try:
                process = await self._started()
            except CannotStart as error:
                if self._lacks != str(error):
                    log.warning("waiting for a process of %s: %s", self._program.what, error)
                self._lacks = str(error)
                await self._clock.sleep(WAIT_S)
            else:
                self._lacks = ""
                return process

    async def _started(self) -> SandboxProcess:
        process = await self._starter.started()
        self._running[process] = process.started()
        return process

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is None:
            log.info("a process of %s was ended: %s", self._program.what, task.result())
