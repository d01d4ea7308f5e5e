"""Wait reports (what a job waits for, and since when), warnings and plug-in errors of a job. Warnings and errors become
events.

`WaitReporter` publishes wait reports as metrics, and as a warning if a wait lasts too long. The reconciler calls it in
each cycle; `report_waits` runs it while the node prepares the job and has no reconciler yet. Wait reports are computed
once a second, because only people read them and the reconciler runs many cycles a second. `controllers.rules.waits`
decides which waits exist and which are reported.

`LiveJob` is the job as the reporter and the reconciler see it. `WarningLog` and `PluginErrorLog` write warnings and
errors to the store. Reactions to them are decided elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from controllers.changes import ChangeSignal
from controllers.rules.view import JobView, Timers
from controllers.rules.waits import LOCAL, Wait, current_waits, overdue_waits, wait_sentence
from controllers.telemetry.gauges import show_waits
from gcore.errors import StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import FaultRecord, Trouble
from gcore.observability.metrics import Metrics
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put, Store
from gcore.system.clock import Clock
from gcore.types import PromptRef

log = logging.getLogger(__name__)

RETRY_S = 1.0

MOST_WAITING = 64
"""Maximum number of warnings that wait for the store: the newest."""

LOOK_S = 1.0
"""Seconds between two computations of the wait reports."""

MOST_FAULTS = 16
"""Maximum number of plug-in errors of one job from one controller, so that ever-different errors do not fill the store."""

MOST_OF_JOB = 64
"""Maximum number of plug-in errors of one job from all controllers. Each controller may exceed it by one."""


class WaitReporter:
    """Tracks what the job waits for and since when; publishes this as metrics, and posts a warning for each long wait."""

    def __init__(self, job: LiveJob, metrics: Metrics, clock: Clock) -> None:
        self._job = job
        self._metrics = metrics
        self._clock = clock
        self._told: set[str] = set()
        """Current waits (their `stall` keys, which change with progress) that were already reported as a warning."""
        self._waiting: tuple[Wait, ...] = ()
        self._looked = -LOOK_S
        """When the waits were last computed, in monotonic seconds."""

    async def run(self) -> None:
        """Compute and publish the waits once a second until cancelled; for a job that has no reconciler to call `look`."""
        while True:
            self.look(self._job.look(), (), self._clock.monotonic())
            await self._clock.sleep(LOOK_S)

    def look(self, view: JobView, others: Iterable[str], now: float) -> None:
        """Update since when each wait lasts; once a second, compute and publish the waits.

        `others`: the conditions of all actions that the reconciler would take now; it needs their start times. `now`:
        monotonic seconds.
        """
        due = now >= self._looked + LOOK_S
        if due:
            self._looked, self._waiting = now, tuple(current_waits(view))
        waiting = self._waiting
        held = [*others, *(w.key for w in waiting), *(w.stall for w in waiting)]
        self._job.waits = self._job.waits.note(held, now)
        if due:
            show_waits(self._metrics, view.mirror, waiting, self._job.waits, now)
            self._tell(view, waiting, now)

    def _tell(self, view: JobView, waiting: Sequence[Wait], now: float) -> None:
        """Post a warning for each wait that has lasted too long, once until it makes progress or ends."""
        due = {wait.stall: wait for wait in overdue_waits(view, waiting, self._job.waits, now)}
        for stall, wait in due.items():
            if stall not in self._told:
                topic = f"wait-{wait.cause}" + (f"-{view.node}" if wait.cause in LOCAL else "")
                self._job.warnings.note(topic, wait_sentence(wait))
                self._metrics.stalls.labels(wait.cause).inc()
        self._told &= {wait.stall for wait in waiting}
        self._told |= due.keys()


@asynccontextmanager
async def report_waits(job: LiveJob, metrics: Metrics, clock: Clock) -> AsyncIterator[None]:
    """Run a `WaitReporter` and write the job's warnings while the block runs. An exception of these tasks is a bug; it
    is raised at the end."""
    tasks = [asyncio.create_task(work) for work in (WaitReporter(job, metrics, clock).run(), job.warnings.run())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


class LiveJob:
    """A job as this controller sees it: its records (`mirror`), the view that decisions use, start times of waits, and
    the log of its warnings."""

    def __init__(
        self,
        uid: str,
        node: str,
        me: str,
        changes: ChangeSignal,
        mirror: Callable[[], JobMirror],
        make_view: Callable[[], JobView],
        warnings: WarningLog,
        waits: Timers,
    ) -> None:
        """`node`, `me`: names of this node and of this incarnation of its controller. `changes`: notified at each
        change of the job.

        `mirror`: returns the newest known records of the job. `make_view`: computes the view. `waits`: initial start
        times.
        """
        self.uid, self.node, self.me, self.changes = uid, node, me, changes
        self.warnings, self.waits = warnings, waits
        self._mirror = mirror
        self._make_view = make_view
        self._view: tuple[int, JobView] | None = None

    @property
    def mirror(self) -> JobMirror:
        """The newest known records of the job."""
        return self._mirror()

    def look(self) -> JobView:
        """The current view; computed only if something changed since the last call."""
        if self._view is None or self._view[0] != self.changes.count:
            self._view = (self.changes.count, self._make_view())
        return self._view[1]

    def look_anew(self) -> None:
        """Discard the cached view, after a change of local state that `changes` does not count."""
        self._view = None


class WarningLog:
    """Writes warnings about a job from one controller to the store.

    A warning overwrites the previous one of its topic. While the store is unavailable, the newest `MOST_WAITING`
    warnings are queued. A caller must not pass the same warning to `note` repeatedly; `hold` drops repetitions.
    """

    def __init__(self, store: Store, keys: JobKeys, node: str, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._clock = clock
        self._waiting: deque[Trouble] = deque(maxlen=MOST_WAITING)
        self._held: dict[str, str] = {}
        self._news = asyncio.Event()

    def note(self, topic: str, sentence: str) -> None:
        """Log a warning and queue it for the store. `topic`: key of the warning, from a small fixed set; the next one
        with this key replaces it."""
        log.warning("%s", sentence)
        now = self._clock.wall()
        self._waiting.append(Trouble(topic=topic, node=self._node, sentence=sentence, time=now))
        self._news.set()

    def hold(self, topic: str, sentence: str) -> None:
        """Log a warning as `note` does, but only if its sentence differs from the last one of the topic. An empty
        sentence: the problem is solved."""
        if sentence and self._held.get(topic) != sentence:
            self.note(topic, sentence)
        self._held[topic] = sentence

    async def run(self) -> None:
        """Write queued warnings, until cancelled."""
        self._news.set()
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                trouble = self._waiting[0]  # It stays queued until it is written, also if this task is cancelled.
                if not await self._is_written(trouble):
                    await self._clock.sleep(RETRY_S)
                elif self._waiting and self._waiting[0] is trouble:
                    self._waiting.popleft()

    async def _is_written(self, trouble: Trouble) -> bool:
        # Retry if the result is unknown: a duplicate event is better than a missing one.
        try:
            await self._store.transact((), (Put(self._keys.trouble(trouble.topic), trouble.encode()),))
        except StoreUnavailable:
            return False
        return True


EQUAL_STEPS = 10
LEAST_EQUAL_GROUPS = 16
"""`EQUAL_STEPS` and `LEAST_EQUAL_GROUPS`: the number of steps and of groups with equal rewards after which a warning is
posted. If no step commits, it is posted after as many groups as `EQUAL_STEPS` steps have."""


@dataclass
class _EqualRewards:
    """Consecutive groups of one source whose responses all had the same reward. `told`: whether the warning was posted."""

    reward: float
    step: int
    """The newest committed step when the first of the groups was scored."""
    refs: set[PromptRef] = field(default_factory=set)
    responses: int = 0
    told: bool = False


class EqualRewardsWatch:
    """Posts a warning if all responses of a source have had the same reward for `EQUAL_STEPS` steps: the policy cannot
    learn from them.

    Counts the groups that this controller has scored, including those that filters drop.
    """

    def __init__(self, groups_per_step: int, warnings: WarningLog) -> None:
        self._most = EQUAL_STEPS * groups_per_step
        self._warnings = warnings
        self._equal: dict[str, _EqualRewards] = {}
        """By source: the newest consecutive groups with equal rewards."""

    def note(self, source: str, ref: PromptRef, rewards: Sequence[float], step: int) -> None:
        """Count the rewards of responses to one prompt; a group may come in several calls. `ref`: id of the prompt;
        `step`: the newest committed step."""
        known = self._equal.get(source)
        if len(set(rewards)) != 1:
            self._equal.pop(source, None)
            return
        if known is None or known.reward != rewards[0]:
            known = self._equal[source] = _EqualRewards(rewards[0], step)
        if known.told:
            return
        known.responses += len(rewards)
        known.refs.add(ref)
        groups = len(known.refs)
        long = step - known.step >= EQUAL_STEPS and groups >= LEAST_EQUAL_GROUPS
        if long or groups >= self._most:
            known.told = True
            sentence = (
                f"source {source!r}: the last {known.responses} responses to {groups} prompts all had reward {known.reward:g}. The policy "
                "cannot learn from equal rewards. Compare responses with the expected answers: gcore samples"
            )
            self._warnings.note("equal-rewards", sentence)


class PluginErrorLog:
    """Writes errors of plug-ins and reasons of failed prompts to the store, each once per job.

    Errors include the plug-in's traceback. A controller writes a bounded number of errors. If the store is unavailable, the error is only in
    the controller's log, until it occurs again.
    """

    def __init__(self, store: Store, keys: JobKeys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._known: set[str] = set()
        self._to_write: asyncio.Queue[tuple[str, FaultRecord]] = asyncio.Queue()

    def note(self, what: str, trace: str = "") -> None:
        """Log an error and queue it for the store, unless the same error was reported before. `trace`: the plug-in's
        traceback."""
        name = hashlib.blake2b((trace or what).encode(errors="replace"), digest_size=8).hexdigest()
        if name in self._known or len(self._known) >= MOST_FAULTS:
            return
        self._known.add(name)
        told = f"{what}\n{trace}" if trace else what
        log.warning("%s", told.encode(errors="backslashreplace").decode())  # Logs cannot encode lone surrogates.
        self._to_write.put_nowait((name, FaultRecord(node=self._node, what=what, trace=trace)))

    async def run(self) -> None:
        """Write queued errors, until cancelled."""
        while True:
            await self._write(*await self._to_write.get())

    async def finish(self) -> None:
        """Write the remaining errors."""
        while not self._to_write.empty():
            await self._write(*self._to_write.get_nowait())

    async def _write(self, name: str, record: FaultRecord) -> None:
        key = self._keys.fault(name)
        try:
            if len((await self._store.list(self._keys.fault_prefix)).kvs) >= MOST_OF_JOB:
                return
            await self._store.transact((Compare(key, 0),), (Put(key, record.encode()),))
        except StoreUnavailable:
            self._known.discard(name)  # Report it when it occurs again.
