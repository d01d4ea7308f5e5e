"""Read the time totals of this node's engines, and write the slot account of each step.

Engines keep cumulative totals, so it does not matter for the amount of accounted time when they are read, only for the
precision of idle causes. They are read when a step ends, when the cause of idleness changes, and at least every
`READ_S`, but readings take at most the share `READ_SHARE` of the time.

An account is written to the node's record in the store (`placement/books/NODE`, under the controller's lease), to
`books/NODE.jsonl` in the run folder, to the metrics, and to the usage of the job. If one of these fails, the account is
missing there, and nothing else is affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from controllers.accounting.attribution import find_idle_cause
from controllers.accounting.states import IdleCause
from controllers.accounting.step_account import REPORT_DELAY_S, ClosedStep, StepAccountBuilder
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
from gcore.system.concurrency import cancel_all, limit_time
from gcore.types import Version

log = logging.getLogger(__name__)

READ_S = 1.0
"""Maximum seconds between two readings if nothing triggers one."""

READ_SHARE = 0.01
"""Maximum share of the time that is spent on readings. A reading at the end of a step is done at once regardless."""

LEAST_REST_S, LONGEST_REST_S = 0.05, 10.0
"""Minimum and maximum pause after a reading."""

TOGETHER = 32
"""Maximum number of engines that are read concurrently."""

ANSWER_S = 4.0
"""Timeout of one reading."""

BEGIN_S = 2.0
"""Maximum seconds to read the last line of the node's file, because the folder may hang."""

LONGEST_GAP_S = 600.0
"""If the controller was absent for longer than this, the time since the last line is not accounted for."""

FINISH_S = 1.0
"""Maximum seconds for each part of the last step's account at the end, because the folder may hang."""


class AccountCollector:
    """Reads this node's engines of one job, and writes the account of each step."""

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
        finished: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell`: called with each line of the node's file. `finished`: called after the last reading. Neither may
        block."""
        self._store = store
        self._keys = keys
        self._node = node
        self._lease = lease
        self._metrics = metrics
        self._clock = clock
        self._connect = connect
        self._tell = tell
        self._finished = finished
        self.is_reading = False
        """Whether workers must not be stopped yet, because their last totals have still to be read; else their last
        seconds stay unbooked."""
        self._account: StepAccountBuilder | None = None
        self._run_dir = Path()
        self._clients: dict[str, tuple[str, Engine]] = {}
        self._record = NodeAccounts(node=node)
        self._wanted = ChangeSignal()
        self._cause: IdleCause | None = None
        self._step_ended = False
        self._usage: UsageWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        """Task that writes closed steps. It is not cancelled together with a reading, so that these steps are not
        lost."""

    @property
    def stage(self) -> IdleCause:
        """Why idle workers are idle, as of the last call of `look`."""
        return self._cause or "no_work"

    async def begin(self, spec: JobSpec, run_dir: Path, head: Version | None, usage: UsageWriter | None = None) -> None:
        """Begin to account for time: since the last line in this node's file, or from now on if that is older than
        `LONGEST_GAP_S`. `head`: the newest committed version. `usage`: gets each closed step."""
        self._run_dir, self._usage = run_dir, usage
        before: AccountLine | None = None
        with contextlib.suppress(OSError, TimeoutError):
            async with limit_time(BEGIN_S):
                before = await asyncio.to_thread(newest_line, run_dir, self._node)
        now, wall = self._clock.monotonic(), self._clock.wall()
        gap = 0.0 if before is None else wall - before.until
        if before is None or not 0 < gap < LONGEST_GAP_S:
            self._account = StepAccountBuilder(spec, now, wall, head=head)
        else:
            self._account = StepAccountBuilder(spec, now, wall, head=head, gap_s=gap, kept=before.kept)

    def head_moved(self, version: Version) -> None:
        """Record that a commit or rollback has just moved head to `version`, so that a step has ended."""
        if self._account is not None:
            self._account.head_moved(version, self._clock.monotonic(), self._clock.wall())
            self._step_ended = True
            self._wanted.notify()

    def look(self, view: JobView, *, held_back: bool) -> None:
        """Update the state of the job from a new view. `held_back`: whether the request limit of a judge delays
        prompts."""
        cause = find_idle_cause(view, held_back=held_back)
        if self._account is not None:
            self._account.update(view, cause, self._clock.monotonic())
        if cause != self._cause:
            self._cause = cause
            self._wanted.notify()

    async def run(self) -> None:
        """Read engines and write accounts until cancelled. Call `finish` afterwards."""
        self.is_reading = True
        while True:
            seen, self._step_ended = self._wanted.count, False
            took = await self._round()
            again = self._clock.monotonic() + min(max(took / READ_SHARE, LEAST_REST_S), LONGEST_REST_S)
            while not self._step_ended and (rest := again - self._clock.monotonic()) > 0:
                await self._rest(min(rest, REPORT_DELAY_S) if self._is_behind else rest)
                if self._is_behind and not self._step_ended and self._account is not None:
                    await self._round(self._account.unread)
            if self._wanted.count == seen and not self._is_behind:
                await self._wanted.wait(READ_S)

    async def _rest(self, seconds: float) -> None:
        """Wait for these seconds, or until a step has ended."""
        with contextlib.suppress(TimeoutError):
            async with limit_time(seconds):
                while not self._step_ended:
                    await self._wanted.wait()

    async def finish(self) -> None:
        """Read the engines a last time, close and write the last step, each within `FINISH_S`, and close all
        connections."""
        try:
            closing = asyncio.create_task(self._round(last=True), name=f"last books {self._keys.uid}")
            await self._in_time(closing)
        finally:
            self.is_reading = False
            self._finished()
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
        """Whether an ended step waits for readings to be closed."""
        return self._account is not None and self._account.is_behind

    async def _round(self, some: Collection[str] | None = None, *, last: bool = False) -> float:
        """Read all engines (or only `some`), and write the steps that can be closed. Return the seconds that the
        reading took. `last`: no further reading follows."""
        if self._account is None:
            return 0.0
        began = self._clock.monotonic()
        await self._aim(self._account.engines)
        turns = asyncio.Semaphore(TOGETHER)
        names = [name for name in self._clients if some is None or name in some]
        tasks = [asyncio.create_task(self._read(self._account, name, turns)) for name in names]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_all(tasks)
        took = self._clock.monotonic() - began
        if closed := self._account.close(self._clock.monotonic(), final=last):
            self._writing = asyncio.create_task(
                self._write_all(closed, self._writing), name=f"write books {self._keys.uid}"
            )
            await asyncio.shield(self._writing)
        return took

    async def _write_all(self, closed: Collection[ClosedStep], before: asyncio.Task[None] | None) -> None:
        """Write closed steps in order, after the task `before`, which writes earlier ones, has ended."""
        if before is not None and not before.done():
            await asyncio.gather(before, return_exceptions=True)
        for one in closed:
            await self._write(one)

    async def _aim(self, engines: Mapping[str, str]) -> None:
        """Connect to these engines (address by instance), and close other connections."""
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

    async def _read(self, account: StepAccountBuilder, instance: str, turns: asyncio.Semaphore) -> None:
        _, client = self._clients[instance]
        async with turns:
            asked = self._clock.monotonic()
            try:
                account.engine_read(instance, parse_reading(await client.metrics(), asked, self._clock.monotonic()))
            except EngineError as error:
                log.debug("%s: %s", instance, error)
                account.engine_unreachable(instance, asked)

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
            log.warning("cannot write the slot account of step %s to the run's folder: %s", book.version, error)
        with contextlib.suppress(StoreUnavailable):  # the next write includes this step
            await self._store.transact((), (put,))
        if self._usage is not None:
            await self._usage.add(book)


def count_step_seconds(metrics: Metrics, book: StepAccount) -> None:
    """Add the seconds of a step, by pool, state and cause, to the metric `slot_seconds`."""
    for state, seconds in book.booked.items():
        kind, _, rest = state.partition(" ")
        before, _, after = rest.partition(">")
        pool, _, cause = rest.partition(" ")
        labels = (after, kind, before) if kind == "switching" else (pool, kind, cause)
        metrics.slot_seconds.labels(*labels).inc(seconds)
    metrics.slot_seconds.labels("", "unbooked", "").inc(book.unbooked)
