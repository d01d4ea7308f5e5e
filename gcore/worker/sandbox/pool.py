"""Processes that run foreign code: their start, and how callers share them.

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
    """What a pool of rewards, or of other processes, is at: responses that wait, those it has served so far, and a sentence."""

    waiting: int
    scored: int
    what: str


log = logging.getLogger(__name__)
START_TRIES, START_AGAIN_S = 3, 0.5

WAIT_S = 5.0
"""Until a process that could not be started is tried again."""

Holding = Callable[[], AbstractContextManager[None]]
"""Makes what is entered for as long as a caller waits for a process."""


@dataclass(frozen=True, slots=True)
class SandboxProgram:
    """`module` is run with `python -m`, and told `setup` first. `what`: what it loads, for people; `section`: of the spec, which has
    its `start_timeout_s` and `memory_mb`."""

    module: str
    setup: bytes
    what: str
    section: str
    start_timeout_s: float
    group: str = ""
    """The control group (a folder) in which it runs; empty: this process's."""


class ProcessStarter:
    """Starts the processes of one pool. One event loop."""

    def __init__(self, program: SandboxProgram, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._has_loaded = False

    async def started(self) -> SandboxProcess:
        """A process that has loaded its program, after a few tries. Raises PluginFault, CannotStart."""
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
            check_ready(await process.answer(program.start_timeout_s))
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
            f"to load {self._program.what} took longer than {self._program.start_timeout_s:g} s",
            where=f"{self._program.section}.start_timeout_s",
            fix="Raise it, or make the import quicker",
        )


class Lease:
    """A process that a caller has to itself. `fit`: whether the next may have it: it has answered what it was asked."""

    def __init__(self, process: SandboxProcess) -> None:
        self.process = process
        self.fit = False


class WorkerPool:
    """As many processes as there are `workers`, lent to one caller each at a time. One event loop; close it.

    One that is not given back fit is ended: its answer would be taken for that to another's question. So is one that a caller's
    question has made start processes which still run: what is left running belongs to nobody. No more are started than are needed at once.
    """

    def __init__(self, program: SandboxProgram, workers: int, clock: Clock) -> None:
        self._program = program
        self._clock = clock
        self._starter = ProcessStarter(program, clock)
        self._free: asyncio.LifoQueue[SandboxProcess | None] = asyncio.LifoQueue()
        """A place each; None: its process is still to be started."""
        for _ in range(workers):
            self._free.put_nowait(None)
        self._ending: set[asyncio.Task[str]] = set()
        self._running: dict[SandboxProcess, frozenset[int]] = {}
        """And what each had started when it was loaded, which stays for all that it is asked."""
        self._waiting = 0
        self._done = 0
        self._lacks = ""

    async def warm(self) -> None:
        """Have one process loaded. Raises PluginFault for a program that cannot be had, CannotStart."""
        place = await self._free.get()
        try:
            place = place or await self._started()
        finally:
            self._free.put_nowait(place)

    @asynccontextmanager
    async def lent(self, holding: Holding = nullcontext) -> AsyncIterator[Lease]:
        """A process to oneself. Who finds none waits, within `holding()`. Raises PluginFault: this node does not have the program."""
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
        """Who waits for a process now, and how many have been served."""
        count = "1 response waits" if self._waiting == 1 else f"{self._waiting} responses wait"
        why = f" ({self._lacks})" if self._lacks else ""
        return PoolStatus(self._waiting, self._done, f"{count} for a free process of {self._program.what}{why}")

    async def close(self) -> None:
        """End every process."""
        for process in tuple(self._running):
            self._end(process)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def how_ended(self, process: SandboxProcess) -> str:
        """How a process died, in a sentence; it is ended if it has not."""
        task = self._end(process)
        return "ended with all the others" if task is None else await asyncio.shield(task)

    def _is_clean(self, process: SandboxProcess) -> bool:
        """Whether nothing is left in it of what it was asked last."""
        if left := process.started() - self._running.get(process, frozenset()):
            log.info("a process of %s is ended: what it was asked left %d processes", self._program.what, len(left))
        return not left and not process.says_more

    def _end(self, process: SandboxProcess) -> asyncio.Task[str] | None:
        """Kill it, in the background; None: that has been begun before."""
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
                if place is not None and (place.has_ended or place.says_more):  # while it had nothing to do
                    self._end(place)
                    place = None
                return place or await self._found()
            except BaseException:
                self._free.put_nowait(None)
                raise
        finally:
            self._waiting -= 1

    async def _found(self) -> SandboxProcess:
        """A process, as soon as one can be started. Raises PluginFault."""
        while True:
            try:
                process = await self._started()
            except CannotStart as error:
                if self._lacks != str(error):
                    log.warning("who needs a process of %s waits: %s", self._program.what, error)
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
