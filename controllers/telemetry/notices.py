"""What a controller reports about a job beside its steps, for the job's events: waits, warnings, and errors of plug-ins.

`WaitReporter` publishes what the job waits for and since when, as metrics, and as a warning once a wait has lasted too long. The
reconciler calls it at each look at the job; `report_waits` runs it while the node prepares and there is no reconciler yet. What is waited
for is worked out once a second, since it is for people and the reconciler looks at its job many times in one.
`controllers.rules.waits` decides which waits there are, and which are reported.

`LiveJob` is the job as the reporter and the reconciler see it. `WarningLog` and `PluginErrorLog` write to the store what others note; an
event tells each record. What follows from a warning or an error is decided elsewhere.
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
"""Sentences that the store has not taken yet: the newest."""

LOOK_S = 1.0

MOST_FAULTS = 16
"""Of one job, by one controller: a plug-in whose every error is another one must not fill the store."""

MOST_OF_JOB = 64
"""Of one job, by all controllers that it ever had; each may write one more."""


class WaitReporter:
    """Notes what the job waits for and since when, and reports waits that last."""

    def __init__(self, job: LiveJob, metrics: Metrics, clock: Clock) -> None:
        self._job = job
        self._metrics = metrics
        self._clock = clock
        self._told: set[str] = set()
        """Waits without progress that were told and last."""
        self._waiting: tuple[Wait, ...] = ()
        self._looked = -LOOK_S
        """When what is waited for was worked out last."""

    async def run(self) -> None:
        """Until cancelled, for a job that nobody drives yet."""
        while True:
            self.look(self._job.look(), (), self._clock.monotonic())
            await self._clock.sleep(LOOK_S)

    def look(self, view: JobView, others: Iterable[str], now: float) -> None:
        """Note since when everything holds that is waited for, and the conditions in `others`; tell what is to be told."""
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
    """Report what the job waits for while the block runs. Raises what the reporting raised, which is a defect."""
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
    """A job as this controller sees it: its records, its view, what it waits for and since when, and its warnings."""

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
        """`node`, `me`: this node and this incarnation. `mirror`: gives the job's records as last heard."""
        self.uid, self.node, self.me, self.changes = uid, node, me, changes
        self.warnings, self.waits = warnings, waits
        self._mirror = mirror
        self._make_view = make_view
        self._view: tuple[int, JobView] | None = None

    @property
    def mirror(self) -> JobMirror:
        """The job's records as last heard."""
        return self._mirror()

    def look(self) -> JobView:
        """The view now; computed once for each change."""
        if self._view is None or self._view[0] != self.changes.count:
            self._view = (self.changes.count, self._make_view())
        return self._view[1]

    def look_anew(self) -> None:
        """Something that the view holds has changed, which no record tells."""
        self._view = None


class WarningLog:
    """Writes warnings about a job from one controller to the store.

    A sentence is written under its topic, over the one before. While the store is away the newest `MOST_WAITING` sentences wait, and come
    late. The caller sees to it that it notes a sentence once.
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
        """Report a sentence. `topic`: one of few, a word."""
        log.warning("%s", sentence)
        now = self._clock.wall()
        self._waiting.append(Trouble(topic=topic, node=self._node, sentence=sentence, time=now))
        self._news.set()

    def hold(self, topic: str, sentence: str) -> None:
        """Report a sentence once, for as long as it is the one of its topic. An empty sentence: the trouble is over."""
        if sentence and self._held.get(topic) != sentence:
            self.note(topic, sentence)
        self._held[topic] = sentence

    async def run(self) -> None:
        """For ever: write what was noted, and what was left."""
        self._news.set()
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                trouble = self._waiting[0]  # which it stays until it is written, also if this is cancelled
                if not await self._is_written(trouble):
                    await self._clock.sleep(RETRY_S)
                elif self._waiting and self._waiting[0] is trouble:
                    self._waiting.popleft()

    async def _is_written(self, trouble: Trouble) -> bool:
        # An unknown answer is asked again: an event twice is better than none.
        try:
            await self._store.transact((), (Put(self._keys.trouble(trouble.topic), trouble.encode()),))
        except StoreUnavailable:
            return False
        return True


EQUAL_STEPS = 10
LEAST_EQUAL_GROUPS = 16
"""Steps, and groups, in which all responses to a source must have had the same reward before a warning. Without any step: as many groups as
`EQUAL_STEPS` steps have."""


@dataclass
class _EqualRewards:
    reward: float
    step: int
    """Head's, when the first of the groups was scored."""
    refs: set[PromptRef] = field(default_factory=set)
    responses: int = 0
    told: bool = False


class EqualRewardsWatch:
    """Warns of a source whose responses have all had the same reward for `EQUAL_STEPS` steps: a policy learns nothing from them.

    Of the groups that this controller has scored since it began on the job, before filters.
    """

    def __init__(self, groups_per_step: int, warnings: WarningLog) -> None:
        self._most = EQUAL_STEPS * groups_per_step
        self._warnings = warnings
        self._equal: dict[str, _EqualRewards] = {}
        """By source: its newest groups in a row whose rewards are equal."""

    def note(self, source: str, ref: PromptRef, rewards: Sequence[float], step: int) -> None:
        """Note the rewards of a prompt's responses, which may come in several calls; `step` is head's."""
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
                f"source {source!r}: the last {known.responses} responses, to {groups} prompts, all had reward {known.reward:g}; equal "
                "rewards teach the policy nothing. Compare responses with the expected answers: gcore samples"
            )
            self._warnings.note("equal-rewards", sentence)


class PluginErrorLog:
    """Writes each error of a plug-in, and why prompts failed, to the store: once for the job, whichever controller meets it.

    Errors have the plug-in's own traceback; a controller writes a bounded number. What the store did not take is in the controller's log,
    and is written when it is met again.
    """

    def __init__(self, store: Store, keys: JobKeys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._known: set[str] = set()
        self._to_write: asyncio.Queue[tuple[str, FaultRecord]] = asyncio.Queue()

    def note(self, what: str, trace: str = "") -> None:
        """Report an error, unless it is known."""
        name = hashlib.blake2b((trace or what).encode(errors="replace"), digest_size=8).hexdigest()
        if name in self._known or len(self._known) >= MOST_FAULTS:
            return
        self._known.add(name)
        told = f"{what}\n{trace}" if trace else what
        log.warning("%s", told.encode(errors="backslashreplace").decode())  # a log takes no half surrogate pair
        self._to_write.put_nowait((name, FaultRecord(node=self._node, what=what, trace=trace)))

    async def run(self) -> None:
        """For ever: write down what was noted."""
        while True:
            await self._write(*await self._to_write.get())

    async def finish(self) -> None:
        """Write down what is left."""
        while not self._to_write.empty():
            await self._write(*self._to_write.get_nowait())

    async def _write(self, name: str, record: FaultRecord) -> None:
        key = self._keys.fault(name)
        try:
            if len((await self._store.list(self._keys.fault_prefix)).kvs) >= MOST_OF_JOB:
                return
            await self._store.transact((Compare(key, 0),), (Put(key, record.encode()),))
        except StoreUnavailable:
            self._known.discard(name)  # it is told when it is met again
