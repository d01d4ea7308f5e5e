"""An event loop with simulated time, and processes on it that can be stopped and killed like real ones.

`VirtualLoop` runs asyncio programs unchanged: timers, `asyncio.timeout` and sleeps use its own time, which jumps to the
next timer whenever nothing else can run. There are no sockets and no threads (work for a thread runs at once), so a
program behaves the same in every run, and minutes take milliseconds.

A `Process` is a set of tasks: those started by `Process.run` and their children. `freeze` is SIGSTOP: no task runs
until `thaw`, while time continues. `kill` is SIGKILL: no task runs again, not even its `finally`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import selectors
import sys
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class NothingLeft(Exception):
    """The program waits, and there is no timer that could wake it."""


class _Selector(selectors.SelectSelector):
    """Instead of waiting, it moves time."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NothingLeft
        self.loop.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now`: seconds since the beginning."""

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 0.0
        self.over = False
        self._every_task: list[asyncio.Task[Any]] = []
        super().__init__(selector)
        self._clock_resolution = 1e-6
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        return self.now

    def finish(self) -> None:
        """Nothing more runs: what is left of processes that were killed or still wait is thrown away."""
        self.over = True
        unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
        caught = warnings.catch_warnings()
        caught.__enter__()
        try:
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that were only made
            for task in self._every_task:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                if not task.done():
                    with contextlib.suppress(BaseException):  # whatever its `finally` says
                        task.get_coro().close()
            self._every_task.clear()
            self._ready.clear()  # type: ignore[attr-defined]
            self._scheduled.clear()  # type: ignore[attr-defined]
        finally:
            caught.__exit__(None, None, None)
            sys.unraisablehook = unraisable
        self.close()

    def _new_task(self, loop: Any, work: Any, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, context=context)
        # Of a process that was killed nothing must run again, not even because it is forgotten.
        self._every_task.append(task)
        return task

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], T], *args: *Arguments
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # it is the future's
            future.set_exception(error)
        return future

    def call_soon(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self.over:
            return asyncio.Handle(callback, args, self, context)
        context = context or contextvars.copy_context()
        owner = context.get(OWNER)
        if owner is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(owner, callback, args, context)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Arguments], object],
        *args: *Arguments,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.over:
            return asyncio.TimerHandle(when, callback, args, self, context)
        context = context or contextvars.copy_context()
        owner = context.get(OWNER)
        if owner is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(owner, callback, args, context)
        gate.handle = handle = super().call_at(when, gate, context=context)
        return handle


class _Gate:
    """What a process wants to run, if it may."""

    __slots__ = ("args", "callback", "context", "handle", "owner")

    def __init__(self, owner: Process, callback: Any, args: tuple[Any, ...], context: contextvars.Context) -> None:
        self.owner = owner
        self.callback = callback
        self.args = args
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.owner.killed:
            return
        if self.owner.frozen:
            self.owner.parked.append(self)
            return
        self.callback(*self.args)

    def late(self) -> None:
        """After the process went on; what ran before it may have cancelled it."""
        if self.handle is None or not self.handle.cancelled():
            self.callback(*self.args)


class Process:
    """`on_end`: called once when it was killed or has ended."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.frozen = False
        self.killed = False
        self.parked: list[_Gate] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = contextvars.copy_context()
        self._context.run(OWNER.set, self)

    def run(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """Begin a task of this process."""
        task = self.loop.create_task(work, name=f"{self.name} {name}", context=self._context)
        task.add_done_callback(self._done, context=contextvars.Context())
        self.tasks.append(task)
        return task

    def post(self, do: Callable[[], object]) -> None:
        """Something has come for it from outside; it is done once it runs."""
        self.loop.call_soon(do, context=self._context)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.frozen = False
        parked, self.parked = self.parked, []
        for gate in parked:
            self.loop.call_soon(gate.late, context=gate.context)

    def kill(self) -> None:
        """SIGKILL."""
        self.killed = True
        self.parked.clear()

    @property
    def running(self) -> bool:
        """Whether it is there and not stopped."""
        return not self.killed and not self.frozen

    def _done(self, task: asyncio.Task[Any]) -> None:
        """A defect in any task of it is a defect of the simulation, or of what it simulates."""
        if not task.cancelled() and task.exception() is not None:
            self.loop.call_exception_handler({"message": task.get_name(), "exception": task.exception()})


class ProcessClock:
    """A node's `gcore.system.clock.Clock`. `offset` is what its own time is ahead of the loop's: a jump is a change of it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.offset = 0.0

    def monotonic(self) -> float:
        return 1_000.0 + self._loop.now + self.offset

    def wall(self) -> float:
        return 1_700_000_000.0 + self._loop.now + self.offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
