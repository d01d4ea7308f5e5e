"""From the event loop to the model's thread and back: what was asked for goes out under its names, and what arrives is kept
until it is taken.

Of what streams only the newest delivery is kept, for it holds all that came before: a client that reads slowly skips steps,
and costs no memory that grows. What is asked, and how an answer is worded, is the desks' business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.rollout.engine.gate import Gate
from gcore.rollout.engine.runner import Runner
from gcore.rollout.engine.tasks import Ending

T = TypeVar("T")


class Asked(Protocol):
    """One task. `number`: the engine's own name for it."""

    @property
    def number(self) -> int:
        """Unique in the engine's life."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its tokens."""
        ...


class Told(Protocol):
    """What there is of one task."""

    @property
    def number(self) -> int:
        """Of its task."""
        ...

    @property
    def ending(self) -> Ending | None:
        """None while more is to come."""
        ...


A = TypeVar("A", bound=Asked)
D = TypeVar("D", bound=Told)


class Takes(Protocol[A]):
    """A core, as a desk sees it."""

    paused: bool
    asleep: frozenset[str]

    def submit(self, tasks: list[A]) -> None:
        """Tasks that have been checked."""

    def abort(self, unwanted: Callable[[A], bool]) -> None:
        """End these now."""


class _Arrivals(Generic[D]):
    """The newest delivery of each of a request's tasks, until it is taken."""

    def __init__(self) -> None:
        self._newest: dict[int, D] = {}
        self._there = asyncio.Event()

    def put(self, delivery: D) -> None:
        """Takes the place of an older one."""
        self._newest[delivery.number] = delivery
        self._there.set()

    async def take(self) -> list[D]:
        """All that there are; waits for one."""
        await self._there.wait()
        self._there.clear()
        newest, self._newest = self._newest, {}
        return list(newest.values())


class Post(Generic[A, D]):
    """Between one event loop and one model's thread. `open` it before the first request."""

    def __init__(self, core: Takes[A], clock: Clock) -> None:
        self._taker = core
        self.clock = clock
        self._arrivals: dict[int, _Arrivals[D]] = {}
        """By the task's number, while it is under way."""
        self._names: set[str] = set()
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner[Any] | None = None
        self.gate = Gate(lambda: core.paused or bool(core.asleep))
        self.prompt_tokens = 0
        self.requests = 0

    def open(self, runner: Runner[Any]) -> None:
        """Called on the event loop that requests arrive on."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()

    @property
    def runner(self) -> Runner[Any]:
        """The model's thread."""
        assert self._runner is not None
        return self._runner

    def deliver(self, deliveries: Sequence[D]) -> None:
        """Called in the model's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._arrive, deliveries)

    def _arrive(self, deliveries: Sequence[D]) -> None:
        for delivery in deliveries:
            arrivals = self._arrivals.get(delivery.number)
            if arrivals is not None:
                arrivals.put(delivery)
                if delivery.ending is not None:
                    del self._arrivals[delivery.number]

    async def perform(self, action: Callable[[], T]) -> T:
        """Carry out `action` between two steps."""
        return await asyncio.wrap_future(self.runner.perform(action))

    def number(self) -> int:
        """Of the next task."""
        self._next += 1
        return self._next - 1

    def check_names(self, names: set[str]) -> None:
        """Raises EngineError if a request of such a name is under way."""
        if taken := self._names & names:
            raise EngineError(f"a request called {min(taken)!r} is under way", fix="Give each request a rid of its own")

    def _send(self, tasks: list[A], arrivals: _Arrivals[D]) -> None:
        self._arrivals.update((task.number, arrivals) for task in tasks)
        self.requests += len(tasks)
        self.prompt_tokens += sum(len(task.prompt) for task in tasks)
        self.runner.perform(lambda: self._taker.submit(tasks))

    def _take_back(self, tasks: Sequence[A]) -> None:
        """Whatever of these still runs has nobody who waits for it."""
        left = {task.number for task in tasks if self._arrivals.pop(task.number, None) is not None}
        if left:
            self.runner.perform(lambda: self._taker.abort(lambda task: task.number in left))

    async def deliveries(self, tasks: list[A], names: set[str]) -> AsyncIterator[list[D]]:
        """What arrives for these, until all have ended. Closing it takes back what still runs."""
        # Again: of two that were admitted in one turn of the loop neither had its names yet.
        self.check_names(names)
        self._names |= names
        try:
            async with self.gate.passing():
                arrivals, left = _Arrivals[D](), len(tasks)
                self._send(tasks, arrivals)
                try:
                    while left:
                        arrived = await arrivals.take()
                        left -= sum(delivery.ending is not None for delivery in arrived)
                        yield arrived
                finally:
                    self._take_back(tasks)
        finally:
            self._names -= names

    async def ended(self, tasks: list[A], names: set[str]) -> dict[int, D]:
        """The last delivery of each, by number; waits for all."""
        found: dict[int, D] = {}
        stream = self.deliveries(tasks, names)
        try:
            async for arrived in stream:
                found.update((delivery.number, delivery) for delivery in arrived)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        return found
