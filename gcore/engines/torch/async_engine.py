"""The thread that owns the model.

Others speak to it through a mailbox: an action is carried out between two decode steps, in the order of arrival, and its
result comes back as a future. When there is nothing to do the thread sleeps on the mailbox. Deliveries leave through one
call a cycle. An exception in a decode step is a defect (or memory that has run out) that leaves the cache in doubt: the
thread reports it through `on_death` and ends, and the process is expected to end with it.

What the time was is summed up as it passes (`gcore.rollout.metered`), whenever there is more or less to do.

Progress goes out at most once a second while tokens are made; "generate" at once when work begins, so that a step that
hangs is seen by the watchdog, and "waiting" once there is none.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Literal, Protocol, TypeVar

from gcore.engines.request import Finish
from gcore.engines.serving.http import UpdateLock
from gcore.engines.torch.model import LoadedModel, StagedWeights
from gcore.errors import EngineError
from gcore.rollout.engine_time import EngineTimeMeter, EngineTimeSums, current_activity
from gcore.system.clock import Clock

T = TypeVar("T")


OutputT = TypeVar("OutputT")


REPORT_S = 1.0


GATHER_S = 0.002
"""An idle engine that has seen bursts begins when for so long no further request has come,"""


GATHER_MOST_S = 0.02
"""or when the first has waited for so long. What follows the first within this time makes a burst."""


class ArrivalWait:
    """Whether an idle engine waits for more when a request comes: only if the last one did not come alone. Pure.

    Requests of a training step come in bursts. Beginning with the first alone would make many small passes where one
    would do, and take the interpreter from the event loop that still reads the others. Whoever sends one request at a
    time must not wait for others that never come.
    """

    def __init__(self) -> None:
        self._began = float("-inf")
        self.waits = False

    def begins(self, now: float, *, more: int) -> None:
        """Work has begun after a pause, `more` requests having been gathered beside the first."""
        self._began = now
        self.waits = more > 0

    def arrives(self, now: float) -> None:
        """Something has come while there was work."""
        if now - self._began < GATHER_MOST_S:
            self.waits = True


class ProgressReport(Protocol):
    """Where progress goes."""

    def __call__(self, phase: str, progress: int) -> None:
        """`progress` grows whenever anything got done."""
        ...


class ThreadedCore(Protocol[OutputT]):
    """A core, as its thread sees it."""

    outbox: list[OutputT]
    """What is to be told."""
    paused: bool
    asleep: frozenset[str]

    @property
    def rows(self) -> int:
        """How many can be worked on at once."""
        ...

    @property
    def running(self) -> int:
        """How many are worked on."""
        ...

    @property
    def waiting(self) -> int:
        """How many wait."""
        ...

    @property
    def can_work(self) -> bool:
        """Whether a cycle would do anything."""
        ...

    def cycle(self) -> None:
        """Do a little."""


class ModelThread(Generic[OutputT]):
    """Runs `core` in a thread of its own."""

    def __init__(
        self,
        core: ThreadedCore[OutputT],
        *,
        clock: Clock,
        deliver: Callable[[Sequence[OutputT]], None],
        report: ProgressReport,
        on_death: Callable[[Exception], None],
    ) -> None:
        self.core = core
        self._clock = clock
        self._deliver = deliver
        self._report = report
        self._on_death = on_death
        self._mailbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._phase = "waiting"
        self._reported = clock.monotonic() - REPORT_S
        self._cycles = 0
        self._gathering = ArrivalWait()
        self._meter = EngineTimeMeter(core.rows, clock.monotonic())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def sums(self) -> EngineTimeSums:
        """What the time until now was. May be called from any thread."""
        return self._meter.read(self._clock.monotonic())

    def perform(self, action: Callable[[], T]) -> Future[T]:
        """Carry out `action` in the thread, between two steps; its result, or the exception it raised."""
        future: Future[T] = Future()

        def carry_out() -> None:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001  # goes to whoever asked
                future.set_exception(error)
            else:
                future.set_result(result)

        self._mailbox.put(carry_out)
        return future

    def _run(self) -> None:
        try:
            while True:
                self._read_mail()
                self._note()
                if self.core.can_work:
                    self._tell("generate")
                    self.core.cycle()
                    self._cycles += 1
                    self._note()
                if self.core.outbox:
                    outbox, self.core.outbox = self.core.outbox, []
                    self._deliver(outbox)
        except Exception as error:  # noqa: BLE001  # the thread's edge
            self._on_death(error)

    def _note(self) -> None:
        core = self.core
        doing = current_activity(paused=core.paused, asleep=bool(core.asleep))
        self._meter.note(doing, core.running + core.waiting, self._clock.monotonic())

    def _read_mail(self) -> None:
        """All that is there; waits for the first when there is nothing else to do."""
        if not self.core.can_work and not self.core.outbox:
            self._wait()
        while True:
            try:
                action = self._mailbox.get_nowait()
            except queue.Empty:
                return
            action()
            self._gathering.arrives(self._clock.monotonic())

    def _wait(self) -> None:
        """Until there is mail; meanwhile "waiting" is reported, once the last report is a second old."""
        try:
            action = self._mailbox.get(timeout=REPORT_S if self._phase != "waiting" else None)
        except queue.Empty:
            self._tell("waiting")
            return
        action()
        self._note()
        if self.core.can_work:
            more = self._gather() if self._gathering.waits else 0
            self._gathering.begins(self._clock.monotonic(), more=more)

    def _gather(self) -> int:
        """More of a burst; how much there was."""
        until = self._clock.monotonic() + GATHER_MOST_S
        more = 0
        while self.core.can_work and self._clock.monotonic() < until:
            try:
                action = self._mailbox.get(timeout=GATHER_S)
            except queue.Empty:
                break
            action()
            more += 1
        return more

    def _tell(self, phase: str) -> None:
        now = self._clock.monotonic()
        begins = phase == "generate" and self._phase != "generate"
        if begins or now - self._reported >= REPORT_S:
            self._phase, self._reported = phase, now
            self._report(phase, self._cycles)


# -------------------- post
# From the event loop to the model's thread and back: what was asked for goes out under its names, and what arrives is kept
# until it is taken.
#
# Of what streams only the newest delivery is kept, for it holds all that came before: a client that reads slowly skips steps,
# and costs no memory that grows. What is asked, and how an answer is worded, is the desks' business.


class NumberedRequest(Protocol):
    """One task. `number`: the engine's own name for it."""

    @property
    def number(self) -> int:
        """Unique in the engine's life."""
        ...

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its tokens."""
        ...


class NumberedOutput(Protocol):
    """What there is of one task."""

    @property
    def number(self) -> int:
        """Of its task."""
        ...

    @property
    def ending(self) -> Finish | None:
        """None while more is to come."""
        ...


A = TypeVar("A", bound=NumberedRequest)


D = TypeVar("D", bound=NumberedOutput)


class RequestSink(Protocol[A]):
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


class AsyncEngine(Generic[A, D]):
    """Between one event loop and one model's thread. `open` it before the first request."""

    def __init__(self, core: RequestSink[A], clock: Clock) -> None:
        self._taker = core
        self.clock = clock
        self._arrivals: dict[int, _Arrivals[D]] = {}
        """By the task's number, while it is under way."""
        self._names: set[str] = set()
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: ModelThread[Any] | None = None
        self.gate = UpdateLock(lambda: core.paused or bool(core.asleep))
        self.prompt_tokens = 0
        self.requests = 0

    def open(self, runner: ModelThread[Any]) -> None:
        """Called on the event loop that requests arrive on."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()

    @property
    def runner(self) -> ModelThread[Any]:
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


# -------------------- served
# What the routes that control an engine need of it, whatever it is that it serves.
#
# A generator's core and a classifier's are told apart by nobody here: both are paused, put to sleep and given other weights
# in the same words.

PauseMode = Literal["abort", "retract", "in_place"]


ABORTED = "aborted on request"


class NamedRequest(Protocol):
    """Something that was asked for, by the client's name for it."""

    @property
    def rid(self) -> str:
        """Its name."""
        ...


class ServedModel(Protocol):
    """A model that serves. But for what is read here, it is the model's thread's."""

    version: str
    paused: bool
    asleep: frozenset[str]

    @property
    def model(self) -> LoadedModel:
        """What is loaded."""
        ...

    @property
    def running(self) -> int:
        """How many are worked on."""
        ...

    @property
    def waiting(self) -> int:
        """How many wait."""
        ...

    @property
    def generated_tokens(self) -> int:
        """How many tokens were made."""
        ...

    def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End these now; `unwanted` is asked about each by its name (`NamedRequest`)."""

    def abort_all(self, message: str = ABORTED) -> None:
        """End everything now."""

    def pause(self, mode: PauseMode) -> None:
        """Do nothing more."""

    def resume(self) -> None:
        """Go on."""

    def flush(self) -> None:
        """Give the cache back."""

    def check_version(self, version: str | None) -> None:
        """Raises EngineError for a version older than what is served."""

    def change_weights(self, staged: StagedWeights, version: str | None, *, flush: bool, abort: bool) -> None:
        """Serve these weights. Raises EngineError; then nothing has changed."""

    def rename(self, version: str) -> None:
        """Call the served weights so."""

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back. Raises EngineError while anything runs."""

    def wake(self, tags: frozenset[str]) -> None:
        """Take memory again."""


class EngineThread(Protocol):
    """The model's thread."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        ...

    def sums(self) -> EngineTimeSums:
        """What its time was."""
        ...


class EngineFrontend(Protocol):
    """What stands between HTTP and the model's thread."""

    clock: Clock
    gate: UpdateLock
    requests: int
    prompt_tokens: int

    @property
    def runner(self) -> EngineThread:
        """The model's thread."""
        ...

    async def perform(self, action: Callable[[], T]) -> T:
        """Carry out `action` between two steps."""
        ...
