"""Keeps the books of a node's slots, for one job: reads the node's engines, and writes each step's book.

Engines sum their time up themselves, so when they are read is of no matter to how much is booked; it is to what their idle time is booked
on, for that is what this controller knew of the job meanwhile. So they are read when a step ends and when what keeps the idle ones changes, but
for a share of the time at most (`SHARE`), and every `READ_S` or so else.

A step's book goes into the node's record (`placement/books/NODE`, under the controller's lease), as a line into `books/NODE.jsonl` in the run's
folder, on the counters, and into what the job has used (`controllers.using`). Nothing waits for it: what cannot be written is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from controllers.accounting.attribution import find_idle_cause
from controllers.accounting.states import Cause
from controllers.accounting.step_account import WORD_S, ClosedStep, StepAccountBuilder
from controllers.accounting.usage import UsageWriter
from controllers.changes import ChangeSignal
from controllers.rules.view import JobView
from gcore.config.spec import JobSpec
from gcore.errors import EngineError, StoreUnavailable
from gcore.ledger.records.slot_accounting import AccountLine, NodeAccounts, StepAccount, append_line, newest_line
from gcore.observability.metrics import Metrics
from gcore.rollout.api import Engine
from gcore.rollout.client import EngineReach, plain_reach
from gcore.rollout.engine_time import parse_reading
from gcore.store.keys import JobKeys
from gcore.store.types import Put, Store
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.types import Version

log = logging.getLogger(__name__)


READ_S = 1.0
"""Between two readings when nothing happens."""


SHARE = 0.01
"""Of the time, for reading; a step's end is not waited for."""


LEAST_REST_S, LONGEST_REST_S = 0.05, 10.0


TOGETHER = 32
"""Engines that are read at once."""


ANSWER_S = 4.0


BEGIN_S = 2.0
"""For the end of the books that are there, in a folder that may hang."""


LONGEST_GAP_S = 600.0
"""A controller that was away for longer has left no step unbooked, but a job alone."""


FINISH_S = 1.0
"""For the last step's book, at the end of the job: a folder may take nothing any more."""


class AccountCollector:
    """Of one job on one controller. Mutable; one event loop."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        node: str,
        lease: int,
        metrics: Metrics,
        clock: Clock,
        connect: EngineReach = plain_reach,
        tell: Callable[[AccountLine], None] = lambda line: None,
    ) -> None:
        """`tell`: who else wants to hear of a step that was booked; never blocks."""
        self._store = store
        self._keys = keys
        self._node = node
        self._lease = lease
        self._metrics = metrics
        self._clock = clock
        self._connect = connect
        self._tell = tell
        self._books: StepAccountBuilder | None = None
        self._run_dir = Path()
        self._clients: dict[str, tuple[str, Engine]] = {}
        self._record = NodeAccounts(node=node)
        self._wanted = ChangeSignal()
        self._stage: Cause | None = None
        self._hurry = False
        self._usage: UsageWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        """Of steps that were closed: once begun it is not given up with who reads the engines, or those steps stood nowhere."""

    @property
    def stage(self) -> Cause:
        """What keeps those idle that have nothing to do, as it was last seen."""
        return self._stage or "no_work"

    async def begin(self, spec: JobSpec, run_dir: Path, head: Version | None, usage: UsageWriter | None = None) -> None:
        """The job is at `head`, and time is booked from now on; where another life of this controller's did so until lately, the time since then is not left out."""
        self._run_dir, self._usage = run_dir, usage
        before: AccountLine | None = None
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                before = await asyncio.to_thread(newest_line, run_dir, self._node)
        now, wall = self._clock.monotonic(), self._clock.wall()
        gap = 0.0 if before is None else wall - before.until
        if before is None or not 0 < gap < LONGEST_GAP_S:
            self._books = StepAccountBuilder(spec, now, wall, head=head)
        else:
            self._books = StepAccountBuilder(spec, now, wall, head=head, gap_s=gap, kept=before.kept)

    def head_moved(self, version: Version) -> None:
        """Head is at `version`, as was just heard."""
        if self._books is not None:
            self._books.head_moved(version, self._clock.monotonic(), self._clock.wall())
            self._hurry = True
            self._wanted.notify()

    def look(self, view: JobView, *, held_back: bool) -> None:
        """The job is so now."""
        stage = find_idle_cause(view, held_back=held_back)
        if self._books is not None:
            self._books.look(view, stage, self._clock.monotonic())
        if stage != self._stage:
            self._stage = stage
            self._wanted.notify()

    async def run(self) -> None:
        """For ever."""
        while True:
            seen, self._hurry = self._wanted.count, False
            took = await self._round()
            again = self._clock.monotonic() + min(max(took / SHARE, LEAST_REST_S), LONGEST_REST_S)
            while not self._hurry and (rest := again - self._clock.monotonic()) > 0:
                await self._rest(min(rest, WORD_S) if self._is_behind else rest)
                if self._is_behind and not self._hurry and self._books is not None:
                    await self._round(self._books.unheard)
            if self._wanted.count == seen and not self._is_behind:
                await self._wanted.wait(READ_S)

    async def _rest(self, seconds: float) -> None:
        """For so long, or until a step has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._hurry:
                    await self._wanted.wait()

    async def finish(self) -> None:
        """The job has ended: what was not closed yet is, as far as it can be heard in time. Closes all connections."""
        closing = asyncio.create_task(self._round(last=True), name=f"last books {self._keys.uid}")
        await self._in_time(closing)
        if self._writing is not None:
            await self._in_time(self._writing)
        if self._usage is not None:
            await self._in_time(asyncio.create_task(self._usage.write(), name=f"last usage {self._keys.uid}"))
        clients, self._clients = self._clients, {}
        for _, client in clients.values():
            await client.close()

    async def _in_time(self, last: asyncio.Task[Any]) -> None:
        await asyncio.wait({last}, timeout=FINISH_S)
        await cancel_all([last])

    @property
    def _is_behind(self) -> bool:
        return self._books is not None and self._books.is_behind

    async def _round(self, some: Collection[str] | None = None, *, last: bool = False) -> float:
        """Read all engines, or only these, and write what is over; how long the reading took. `last`: there is no round after it."""
        if self._books is None:
            return 0.0
        began = self._clock.monotonic()
        await self._aim(self._books.engines)
        turns = asyncio.Semaphore(TOGETHER)
        names = self._clients if some is None else self._clients.keys() & some
        tasks = [asyncio.create_task(self._read(self._books, name, turns)) for name in names]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        took = self._clock.monotonic() - began
        if closed := self._books.close(self._clock.monotonic(), last=last):
            self._writing = asyncio.create_task(
                self._write_all(closed, self._writing), name=f"write books {self._keys.uid}"
            )
            await asyncio.shield(self._writing)
        return took

    async def _write_all(self, closed: Collection[ClosedStep], before: asyncio.Task[None] | None) -> None:
        """In their order: `before` is what is being written still."""
        if before is not None and not before.done():
            await asyncio.gather(before, return_exceptions=True)
        for one in closed:
            await self._write(one)

    async def _aim(self, engines: Mapping[str, str]) -> None:
        for instance, (address, client) in list(self._clients.items()):
            if engines.get(instance) != address:
                del self._clients[instance]
                await client.close()
        for instance, address in engines.items():
            if instance not in self._clients:
                self._clients[instance] = (
                    address,
                    self._connect(f"http://{address}", timeout_s=ANSWER_S, instance=instance),
                )

    async def _read(self, books: StepAccountBuilder, instance: str, turns: asyncio.Semaphore) -> None:
        _, client = self._clients[instance]
        async with turns:
            asked = self._clock.monotonic()
            try:
                books.read(instance, parse_reading(await client.metrics(), asked, self._clock.monotonic()))
            except EngineError as error:
                log.debug("%s: %s", instance, error)
                books.unread(instance, asked)

    async def _write(self, closed: ClosedStep) -> None:
        book = closed.book
        count_step_seconds(self._metrics, book)
        self._record = self._record.plus(book)
        line = closed.line(self._node)
        self._tell(line)
        put = Put(self._keys.books(self._node), self._record.encode(), self._lease)
        try:
            await asyncio.to_thread(append_line, self._run_dir, line)
        except OSError as error:
            log.warning("step %s is not in the books of the run's folder: %s", book.version, error)
        with contextlib.suppress(StoreUnavailable):  # the next step's write has this one too
            await self._store.transact((), (put,))
        if self._usage is not None:
            await self._usage.add(book)


def count_step_seconds(metrics: Metrics, book: StepAccount) -> None:
    """Add a step's seconds to the counters."""
    for state, seconds in book.booked.items():
        kind, _, rest = state.partition(" ")
        before, _, after = rest.partition(">")
        pool, _, cause = rest.partition(" ")
        labels = (after, kind, before) if kind == "switching" else (pool, kind, cause)
        metrics.slot_seconds.labels(*labels).inc(seconds)
    metrics.slot_seconds.labels("", "unbooked", "").inc(book.unbooked)
