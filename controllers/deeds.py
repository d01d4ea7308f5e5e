"""What a driver has under way: each decision at most once at a time, and not again before what it did has been heard.

What moves or reads many bytes goes on beside the driver, which must not wait for it. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from controllers.actions import (
    Accumulate,
    Apply,
    Archive,
    BringStart,
    Discard,
    Feed,
    FetchCheckpoint,
    FetchWeights,
    ForgetEvaluations,
    Gather,
    Intent,
    Prune,
    Publish,
    ReleaseRank,
    RestoreRank,
    Retain,
    Rollback,
    SayFolder,
    Sleep,
    Sweep,
    TakeStock,
    Wake,
)
from controllers.apply import apply
from controllers.changes import Changes
from controllers.gauges import count_checkpoints, count_moves
from controllers.hands import Applied, Hands
from controllers.view import JobView
from gcore.clock import Clock
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.guarded import TxnOutcome
from gcore.ledger.mirror import JobMirror
from gcore.metrics import Metrics

log = logging.getLogger(__name__)

MOVES_MUCH = (
    *(Feed, Apply, Accumulate, Prune, Sweep, ForgetEvaluations, Publish, Retain, Rollback, TakeStock),
    *(SayFolder, FetchWeights, FetchCheckpoint, BringStart, Gather, Archive, Discard, Sleep, Wake),
    *(ReleaseRank, RestoreRank),
)
"""What reads or writes many bytes."""
SEEN_AT_ONCE = (Publish, Sleep, Wake)
"""What writes nothing to the store, and shows in the view as soon as it is done: there is nothing to hear of."""
LOOK_AGAIN_S = 0.2
"""After a lost compare or an unknown answer, until the action is tried again if nothing was heard."""
STOP_S = 2.0
HEARD_WITHIN_S = 5.0
"""A deed that was done and is not heard of for so long is decided on again."""


class Doer(Protocol):
    """The job whose deeds these are."""

    uid: str
    changes: Changes
    mirror: JobMirror

    def hands(self) -> Hands:
        """What actions are carried out with."""
        ...

    def look_anew(self) -> None:
        """What is under way has changed."""
        ...

    async def fail(self, reason: str) -> None:
        """End the job as failed."""
        ...


class Deeds:
    """Intents by their condition: those in the background, and those that are held off until they are heard of."""

    def __init__(self, job: Doer, metrics: Metrics, clock: Clock) -> None:
        self._job = job
        self._metrics = metrics
        self._clock = clock
        self._background: dict[str, asyncio.Task[None]] = {}
        self._held_off: dict[str, tuple[int, float]] = {}
        """By condition: the revision with which it is heard of, and until when it is waited for."""
        self._defect: BaseException | None = None

    @property
    def held_off(self) -> bool:
        """Whether anything is."""
        return bool(self._held_off)

    def under_way(self) -> frozenset[str]:
        """Conditions on which nothing is to be decided now."""
        now, heard = self._clock.monotonic(), self._job.mirror.revision
        held = (c for c, (revision, until) in self._held_off.items() if now < until and heard < revision)
        return frozenset((*self._background, *held))

    def forget_what_is_over(self, now: float) -> None:
        """Drop what was heard of, or has been held off for long enough."""
        heard = self._job.mirror.revision
        self._held_off = {c: held for c, held in self._held_off.items() if now < held[1] and heard < held[0]}

    def raise_defect(self) -> None:
        """A defect in the background must not end in silence."""
        if self._defect is not None:
            raise self._defect

    async def stop(self) -> None:
        """Give up what is under way, and let it end, for a moment: a publication lets its engine go on."""
        tasks = tuple(self._background.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def carry_out(self, intent: Intent, view: JobView) -> None:
        """Do it, or begin to."""
        if isinstance(intent.action, MOVES_MUCH):
            task = asyncio.create_task(self._in_background(intent, view), name=intent.condition)
            task.add_done_callback(self._background_done)
            self._background[intent.condition] = task
            self._job.look_anew()
            return
        await self._now(intent, view)

    async def _now(self, intent: Intent, view: JobView) -> None:
        try:
            done = await apply(intent.action, view, self._job.hands())
        except StoreUnavailable as error:
            done = Applied(TxnOutcome.UNKNOWN, f"{intent.condition}: {error}")
        except GcoreError as error:
            await self._job.fail(str(error))
            return
        self._metrics.count_transaction(type(intent.action).__name__.lower(), done.outcome.value)
        if done.outcome is TxnOutcome.WON:
            count_checkpoints(self._metrics, intent.action, view)
            count_moves(self._metrics, intent.action)
        level = logging.INFO if done.outcome is TxnOutcome.WON else logging.DEBUG
        log.log(level, "%s: %s", done.sentence, done.outcome, extra={"job": self._job.uid})
        if done.outcome is TxnOutcome.WON and isinstance(intent.action, SEEN_AT_ONCE):
            self._job.look_anew()
            return
        # Until what was written is heard, the view is older than the deed; deciding on it again would only lose.
        until = self._clock.monotonic() + (HEARD_WITHIN_S if done.outcome is TxnOutcome.WON else LOOK_AGAIN_S)
        self._held_off[intent.condition] = (done.revision or self._job.mirror.revision + 1, until)
        self._job.look_anew()

    async def _in_background(self, intent: Intent, view: JobView) -> None:
        try:
            await self._now(intent, view)
        finally:
            self._background.pop(intent.condition, None)
            self._job.changes.notify()

    def _background_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._defect = self._defect or defect
            self._job.changes.notify()
