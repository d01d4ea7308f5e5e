"""Async engine: the thread that owns the model, its mailbox, and the streams of outputs on the event loop.

`ModelThread` executes actions from a mailbox between two decode steps, in order of arrival; a result is returned as a
future. Without work it sleeps on the mailbox. Outputs are delivered with one call per step. An exception in a step is a
defect (or out of memory) that may have corrupted the KV cache: the thread reports it through `on_death` and ends, and
the process must end with it. Progress for the supervisor's watchdog: the thread reports "generate" at once when work
begins, so that a step that hangs is detected, then at most once a second; and "waiting" when there is no work.

`AsyncEngine` connects one event loop with one such thread. It sends requests to the thread, and keeps their outputs
until the request handler reads them. Of a stream only the newest output is kept, because it contains all earlier ones:
a slow reader skips steps, and its memory does not grow.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from gcore.engines.detokenizer import Detokenizer
from gcore.engines.request import ABORTED, NumberedOutput, NumberedRequest, PauseMode
from gcore.engines.serving.engine import ServedEngine
from gcore.engines.torch.engine import EngineBase
from gcore.engines.torch.model import StagedWeights
from gcore.rollout.engine_time import EngineTimeMeter, EngineTimeSums, current_activity
from gcore.system.clock import Clock

T = TypeVar("T")
A = TypeVar("A", bound=NumberedRequest)
D = TypeVar("D", bound=NumberedOutput)

ProgressReport = Callable[[str, int], None]
"""Function that reports progress to the supervisor: the phase, and a counter that grows with progress."""

REPORT_S = 1.0

GATHER_S = 0.002
"""Seconds without a further request after which an idle engine stops gathering a burst and starts."""

GATHER_MOST_S = 0.02
"""Maximum seconds that the first request of a burst waits. Requests within this time of the first count as a burst."""


class ArrivalWait:
    """Decides whether an idle engine waits for more requests when one arrives: only if the previous one was followed by
    others.

    Requests of a training step arrive in bursts. Starting with the first alone would cause many small forward passes
    instead of one, and take the GIL from the event loop that still parses the others. But a client that sends single
    requests must not wait for others that never arrive. `waits`: the decision for the next request.
    """

    def __init__(self) -> None:
        self._began = float("-inf")
        self.waits = False

    def begins(self, now: float, *, more: int) -> None:
        """Note that an idle engine has started work, with `more` requests gathered in addition to the first."""
        self._began = now
        self.waits = more > 0

    def arrives(self, now: float) -> None:
        """Note that a request has arrived while the engine was working."""
        if now - self._began < GATHER_MOST_S:
            self.waits = True


class ModelThread(Generic[D]):
    """Runs an engine core in its own thread.

    `deliver`: called in this thread with new outputs. `report`: for progress; None: no supervisor. `on_death`: called
    with the exception if the thread ends.
    """

    def __init__(
        self,
        core: EngineBase[Any, D],
        *,
        clock: Clock,
        deliver: Callable[[Sequence[D]], None],
        report: ProgressReport | None,
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
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def sums(self) -> EngineTimeSums:
        """Return how the thread's time until now was spent. May be called from any thread."""
        return self._meter.read(self._clock.monotonic())

    def perform(self, action: Callable[[], T]) -> Future[T]:
        """Execute `action` in the model's thread, between two steps. The future gets its result or exception."""
        future: Future[T] = Future()

        def carry_out() -> None:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001  # raised again where it is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        self._mailbox.put(carry_out)
        return future

    def post(self, action: Callable[[], None]) -> None:
        """Execute `action` in the model's thread, between two steps. An error ends the thread: no caller would learn of it."""
        self._mailbox.put(action)

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
        """Execute all actions in the mailbox; wait for the first if the core has no work."""
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
        """Wait for an action and execute it. After a second without one, report "waiting" and return."""
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
        """Execute actions as long as a burst of requests continues. Return their number."""
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
            if self._report is not None:
                self._report(phase, self._cycles)


class _Arrivals(Generic[D]):
    """Buffer between the model's thread and one client request: the newest output of each of its samples."""

    def __init__(self) -> None:
        self._newest: dict[int, D] = {}
        self._there = asyncio.Event()

    def put(self, delivery: D) -> None:
        """Store an output in place of the sample's older one."""
        self._newest[delivery.number] = delivery
        self._there.set()

    async def take(self) -> list[D]:
        """Wait until there is an output; remove and return all."""
        await self._there.wait()
        self._there.clear()
        newest, self._newest = self._newest, {}
        return list(newest.values())


class AsyncEngine(ServedEngine[StagedWeights], Generic[A, D]):
    """A served engine whose core runs in a `ModelThread`. Call `open` before the first request.

    `core`: the generator's or the classifier's. `text`: the tokenizer; None: the model folder has none.
    """

    def __init__(
        self, core: EngineBase[A, D], text: Detokenizer | None, clock: Clock, description: dict[str, Any]
    ) -> None:
        super().__init__(clock, core, description)
        self.core = core
        self._text = text
        self._arrivals: dict[int, _Arrivals[D]] = {}
        """Buffer for the outputs of each running sample, by its number."""
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: ModelThread[D] | None = None

    def open(self, runner: ModelThread[D]) -> None:
        """Connect to the model's thread. Call it on the event loop that serves requests."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()

    @property
    def runner(self) -> ModelThread[D]:
        """The model's thread. Call `open` first (asserted)."""
        assert self._runner is not None
        return self._runner

    def deliver(self, deliveries: Sequence[D]) -> None:
        """Pass new outputs to the event loop. Called in the model's thread."""
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
        """Execute `action` in the model's thread, between two steps, and return its result."""
        return await asyncio.wrap_future(self.runner.perform(action))

    def number(self) -> int:
        """Return a new number for a sample, unique for the life of the engine."""
        self._next += 1
        return self._next - 1

    def encode(self, prompts: Sequence[str | list[int]]) -> tuple[str | list[int], ...]:
        """Tokenize the prompts that are texts; without a tokenizer they stay texts.

        May be called from any thread: a long text takes seconds.
        """
        if (text := self._text) is None:
            return tuple(prompts)
        return tuple(list(text.encode(prompt)) if isinstance(prompt, str) else prompt for prompt in prompts)

    def names(self, rids: Sequence[str] | None, count: int) -> Sequence[str]:
        """Return the request IDs of `count` requests: `rids`, or random ones if the client gave none.

        Raises EngineError if a request with one of these IDs is running.
        """
        names = rids or tuple(uuid.uuid4().hex for _ in range(count))
        self.check_names(set(names))
        return names

    def _send(self, tasks: list[A], arrivals: _Arrivals[D]) -> None:
        self._arrivals.update((task.number, arrivals) for task in tasks)
        self.requests += len(tasks)
        self.prompt_tokens += sum(len(task.prompt) for task in tasks)
        self.runner.post(lambda: self.core.submit(tasks))

    def _take_back(self, tasks: Sequence[A]) -> None:
        """Abort those of these samples that still run, because no client waits for them any more."""
        left = {task.number for task in tasks if self._arrivals.pop(task.number, None) is not None}
        if left:
            self.runner.post(lambda: self.core.abort(lambda task: task.number in left))

    async def deliveries(self, tasks: list[A], names: set[str]) -> AsyncIterator[list[D]]:
        """Start these samples, and yield their outputs until all have ended.

        `names`: their request IDs. Closing the generator aborts the samples that still run. Raises EngineError if a
        request with one of these IDs is running.
        """
        # Check again: two requests admitted in the same turn of the loop had not registered their names yet.
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
        """Start these samples and wait for all. Returns the last output of each, by its number."""
        found: dict[int, D] = {}
        stream = self.deliveries(tasks, names)
        try:
            async for arrived in stream:
                found.update((delivery.number, delivery) for delivery in arrived)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        return found

    @property
    def alive(self) -> bool:
        """Whether the model's thread runs."""
        return self.runner.alive

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated since the start."""
        return self.core.generated_tokens

    def time_sums(self) -> EngineTimeSums:
        """How the time of the model's thread was spent."""
        return self.runner.sums()

    async def abort(self, unwanted: Callable[[Any], bool], message: str = ABORTED) -> None:
        """End the requests for which `unwanted` is true, between two steps, with the tokens that they have."""
        await self.perform(lambda: self.core.abort(unwanted, message))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating tokens. `mode`: see `EngineBase.pause`."""
        await self.perform(lambda: self.core.pause(mode))

    async def resume(self) -> None:
        """Generate tokens again."""
        await self.perform(self.core.resume)

    async def flush(self) -> bool:
        """Drop the KV cache. Returns False, without effect, while requests use it."""
        core = self.core

        def flush() -> bool:
            if core.running or (core.waiting and not core.paused):
                return False
            core.flush()
            return True

        return await self.perform(flush)

    async def release(self, tags: frozenset[str]) -> None:
        """Release the memory named by `tags`; new requests wait. Raises EngineError while requests run."""
        await self.perform(lambda: self.core.release(tags))

    async def wake(self, tags: frozenset[str]) -> None:
        """Restore the released memory named by `tags`."""
        await self.perform(lambda: self.core.wake(tags))

    async def rename(self, version: str, *, abort: bool) -> None:
        """Change the version name of the served weights. `abort`: end all requests first.

        Raises EngineError for an older version.
        """
        core = self.core

        def rename() -> None:
            core.check_version(version)
            if abort:
                core.abort_all("aborted by a change of the weight version")
            core.rename(version)

        await self.perform(rename)

    async def stage_weights(self, folder: Path) -> StagedWeights:
        """Load a folder's weights into host memory, outside the model's thread. Raises EngineError."""
        return await asyncio.to_thread(self.core.stage_weights, folder)

    async def install_weights(self, staged: StagedWeights, version: str | None, *, flush: bool) -> None:
        """Write staged weights into the model, between two steps. Raises EngineError; then nothing has changed."""
        await self.perform(lambda: self.core.change_weights(staged, version, flush=flush, abort=False))
