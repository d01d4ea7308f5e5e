"""The driver of one job on one controller: decide at every change, carry out what is ripe, wake up when something becomes so.

It also keeps the lines to engines and ranks pointed at those of head's world, and starts and stops this node's workers as
`controllers.staffing` says. What is decided is `controllers.decide`'s, how it is carried out `controllers.deeds`'.
"""

from __future__ import annotations

import logging
import signal
from typing import Protocol

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.decide import decide
from controllers.deeds import LOOK_AGAIN_S, Deeds
from controllers.engines import EngineBook, responsible_for
from controllers.gauges import show_flights
from controllers.holdings import Holdings
from controllers.ranks import RankLinks
from controllers.staffing import Staff, StopWorker, staffing
from controllers.turns import Waits
from controllers.view import JobView
from controllers.waiting import waiting_for
from gcore.clock import Clock
from gcore.ledger.job import JobPhase
from gcore.ledger.mirror import JobMirror
from gcore.metrics import Metrics
from gcore.train.feed_state import WorldName
from gcore.worker.process import send_signal

log = logging.getLogger(__name__)

LOOK_ANYWAY_S = 1.0
"""A look is taken so often even if nothing was heard."""


class Job(Protocol):
    """What is driven."""

    uid: str
    changes: Changes
    mirror: JobMirror
    holdings: Holdings
    waits: Waits

    @property
    def me(self) -> str:
        """This incarnation."""
        ...

    def look(self) -> JobView:
        """The view now."""
        ...

    def look_anew(self) -> None:
        """What is under way has changed."""
        ...


class Driver:
    """Of one job, on one controller."""

    def __init__(
        self,
        job: Job,
        cluster: ClusterMirror,
        staff: Staff,
        engines: EngineBook,
        ranks: RankLinks,
        deeds: Deeds,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._staff = staff
        self._engines = engines
        self._ranks = ranks
        self._deeds = deeds
        self._metrics = metrics
        self._clock = clock
        self._asked_to_stop: set[str] = set()

    async def run(self) -> None:
        """For ever. Raises what a deed in the background raised that is no GcoreError."""
        while True:
            self._deeds.raise_defect()
            await self._aim()
            view = self._job.look()
            now = self._clock.monotonic()
            self._staff_up(view, now)
            show_flights(self._metrics, view.mirror, self._job.holdings, now)
            intents = decide(view)
            waiting = {w.key: w for w in waiting_for(view)}
            self._job.waits = self._job.waits.note([*(i.condition for i in intents), *waiting], now)
            delays = [LOOK_AGAIN_S if self._deeds.held_off else LOOK_ANYWAY_S]
            acted = False
            for intent in intents:
                if self._job.waits.ripe(intent.condition, intent.turn, now, after=intent.after):
                    acted = True
                    await self._deeds.carry_out(intent, view)
                else:
                    ripe_at = self._job.waits.since[intent.condition] + Waits.wait(intent.turn, intent.after)
                    delays.append(max(ripe_at - now, 0.01))
            self._deeds.forget_what_is_over(now)
            if not acted:
                await self._job.changes.wait(min(delays))
                if self._deeds.held_off:
                    self._job.look_anew()

    def _staff_up(self, view: JobView, now: float) -> None:
        """Start and stop this node's workers of the job."""
        if view.mirror.status is None or view.mirror.status.record.phase is not JobPhase.RUNNING:
            return
        for action in staffing(view, self._staff.launches(view.workers), now):
            if isinstance(action, StopWorker):
                # Once: asked twice, a worker does not drain.
                if action.instance not in self._asked_to_stop:
                    self._asked_to_stop.add(action.instance)
                    log.info("stop %s: %s", action.instance, action.reason)
                    send_signal(view.workers[action.instance].process, signal.SIGTERM)
            else:
                self._staff.start(action, view)

    async def _aim(self) -> None:
        """Point the lines at the ranks of head's world and at the engines that are mine."""
        mirror = self._job.mirror
        mine = responsible_for(
            self._job.uid,
            self._cluster.workers,
            {incarnation: stored.record for incarnation, stored in mirror.members.items()},
            self._job.me,
        )
        await self._engines.aim(mine if mirror.members else {})
        if mirror.head is None or mirror.plan is None:
            return
        head = mirror.head.record
        addresses = {}
        for place in mirror.plan.record.ranks:
            claim = mirror.claim(head.world, place.rank)
            worker = self._cluster.workers.get(claim.instance) if claim else None
            if worker is not None and worker.state == "serving":
                addresses[place.rank] = worker.address
        self._ranks.aim(WorldName(self._job.uid, head.world, head.lineage), addresses)
