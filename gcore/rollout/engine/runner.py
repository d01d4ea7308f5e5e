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

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from gcore.clock import Clock
from gcore.rollout.metered import Meter, Sums, doing_of

T = TypeVar("T")
D = TypeVar("D")
REPORT_S = 1.0
GATHER_S = 0.002
"""An idle engine that has seen bursts begins when for so long no further request has come,"""
GATHER_MOST_S = 0.02
"""or when the first has waited for so long. What follows the first within this time makes a burst."""


class Gathering:
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


class Report(Protocol):
    """Where progress goes."""

    def __call__(self, phase: str, progress: int) -> None:
        """`progress` grows whenever anything got done."""
        ...


class Working(Protocol[D]):
    """A core, as its thread sees it."""

    outbox: list[D]
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


class Runner(Generic[D]):
    """Runs `core` in a thread of its own."""

    def __init__(
        self,
        core: Working[D],
        *,
        clock: Clock,
        deliver: Callable[[Sequence[D]], None],
        report: Report,
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
        self._gathering = Gathering()
        self._meter = Meter(core.rows, clock.monotonic())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def sums(self) -> Sums:
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
        doing = doing_of(paused=core.paused, asleep=bool(core.asleep))
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
