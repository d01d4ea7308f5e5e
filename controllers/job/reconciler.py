"""The loop of one job on one controller (a cycle is: decide, execute what is due, wait for a change or until the next
action is due), and the actions in flight.

Each cycle also updates the connections to engines and train ranks, and starts and stops this node's workers. An action
runs at most once at a time, and is not decided again before the view shows its result. Actions that transfer or read
many bytes run in the background.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping

from controllers.changes import LOOK_AGAIN_S, rest_s
from controllers.cluster.mirror import ClusterMirror
from controllers.flow.group_buffer import GroupBuffer
from controllers.inference.pool import EnginePool
from controllers.job.effects import Effects
from controllers.job.executor import apply_action
from controllers.rules.actions import ActionResult, Intent
from controllers.rules.decide import decide
from controllers.rules.memory import owned_engines, sleeping_engines
from controllers.rules.step import waits_for_others
from controllers.rules.view import JobView, Memo, Timers
from controllers.rules.workers import StartEngine, StopWorker, schedule_workers
from controllers.telemetry.gauges import count_checkpoints, count_moves, show_in_flight
from controllers.telemetry.notices import LiveJob, WaitReporter
from controllers.workers.launcher import WorkerLauncher
from controllers.workers.ranks import RankConnections
from gcore.engines.emulated.launch import is_emulated
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.transactions import TxnOutcome
from gcore.observability.metrics import Metrics
from gcore.system.clock import Clock
from gcore.system.process import send_signal
from gcore.train.rank.feed import WorldName

log = logging.getLogger(__name__)

STOP_S = 2.0
"""Maximum seconds to wait for the end of cancelled background actions."""

NOTIFIED_WITHIN_S = 5.0
"""Seconds after which a successful action may be decided again even if the watch of the store has not shown its
result."""


class ActionsInFlight:
    """Executes intents, and knows which must not be decided again now: those that run in the background, and those that
    were executed and whose result the watch of the store has not shown yet. Intents are identified by their
    condition."""

    def __init__(
        self,
        job: LiveJob,
        effects: Effects,
        fail: Callable[[str], Awaitable[None]],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`effects`: the collaborators of the executor; `fail`: ends the job as failed."""
        self._job = job
        self._effects = effects
        self._fail = fail
        self._metrics = metrics
        self._clock = clock
        self._background: dict[str, asyncio.Task[None]] = {}
        self._held_off: dict[str, tuple[int, float]] = {}
        """By condition: the store revision at which the watch will show the result, and the time until which to wait
        for it."""
        self._defect: BaseException | None = None

    @property
    def held_off(self) -> bool:
        """Whether the result of any executed action has still to be shown by the watch."""
        return bool(self._held_off)

    def under_way(self) -> frozenset[str]:
        """The conditions of intents that must not be decided now."""
        now, revision_seen = self._clock.monotonic(), self._job.mirror.revision
        held = (c for c, (revision, until) in self._held_off.items() if now < until and revision_seen < revision)
        return frozenset((*self._background, *held))

    def forget_what_is_over(self, now: float) -> None:
        """Drop the conditions whose result the watch has shown, or for which the wait is over."""
        revision_seen = self._job.mirror.revision
        self._held_off = {c: held for c, held in self._held_off.items() if now < held[1] and revision_seen < held[0]}

    def raise_defect(self) -> None:
        """Raise the unexpected exception of a background action, if there was one."""
        if self._defect is not None:
            raise self._defect

    async def stop(self) -> None:
        """Cancel all background actions and wait at most `STOP_S` for their end; a cancelled weight sync resumes its
        engine first."""
        tasks = tuple(self._background.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)

    async def carry_out(self, intent: Intent, view: JobView) -> None:
        """Execute the action of an intent, or start it in the background."""
        if intent.action.runs_in_background:
            task = asyncio.create_task(self._in_background(intent, view), name=intent.condition)
            task.add_done_callback(self._background_done)
            self._background[intent.condition] = task
            self._job.look_anew()
            return
        await self._now(intent, view)

    async def _now(self, intent: Intent, view: JobView) -> None:
        try:
            done = await apply_action(intent.action, view, self._effects)
        except StoreUnavailable as error:
            done = ActionResult(TxnOutcome.UNKNOWN, f"{intent.condition}: {error}")
        except GcoreError as error:
            await self._fail(str(error))
            return
        self._metrics.count_transaction(intent.action.kind, done.outcome.value)
        if done.outcome is TxnOutcome.WON:
            count_checkpoints(self._metrics, intent.action, view)
            count_moves(self._metrics, intent.action)
        level = logging.INFO if done.outcome is TxnOutcome.WON else logging.DEBUG
        log.log(level, "%s: %s", done.sentence, done.outcome, extra={"job": self._job.uid})
        if done.outcome is TxnOutcome.WON and intent.action.seen_at_once:
            self._job.look_anew()
            return
        # Until the watch shows the result, the view is older than the action, and deciding again would lose the compare.
        until = self._clock.monotonic() + (NOTIFIED_WITHIN_S if done.outcome is TxnOutcome.WON else LOOK_AGAIN_S)
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


LOOK_ANYWAY_S = 1.0
"""Maximum seconds between two cycles if nothing changes."""

JOIN_S = 15.0
"""Seconds for which the engines of a node are not managed by other controllers while its own is registered but has not
joined the job yet."""

SHOW_S = 1.0
"""Seconds between two updates of the metrics of prompts in flight."""


class Reconciler:
    """Runs the cycles of one job on one controller: decides, executes actions, updates workers and connections."""

    def __init__(
        self,
        job: LiveJob,
        buffer: GroupBuffer,
        note_scoring: Callable[[], None],
        note_engines: Callable[[], None],
        is_current: Callable[[], bool],
        cluster: ClusterMirror,
        launcher: WorkerLauncher,
        pools: Mapping[str, EnginePool],
        ranks: RankConnections,
        actions: ActionsInFlight,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`note_scoring`: polls the load of reward functions and judges; `note_engines`: records which engines are
        idle. Both are called in each cycle. `is_current`: whether the session has the job's present settings; without
        them it must not act on newer records."""
        self._job = job
        self._buffer = buffer
        self._note_scoring = note_scoring
        self._note_engines = note_engines
        self._is_current = is_current
        self._cluster = cluster
        self._launcher = launcher
        self._pools = pools
        self._ranks = ranks
        self._actions = actions
        self._metrics = metrics
        self._clock = clock
        self._remembered = Memo()
        self._joined: set[str] = set()
        """Nodes that have ever been members of the job."""
        self._absent: dict[str, float] = {}
        """Registered nodes that have never been members, and since when they are registered."""
        self._joining: frozenset[str] = frozenset()
        self._workers_seen: tuple[float, tuple[object, ...]] | None = None
        """When this node's workers were last checked, and the records that the check used."""
        self._asked_to_stop: dict[str, str] = {}
        """By instance: the state in which a worker was last asked to stop."""
        self._failed: set[str] = set()
        """Failed engines that were reported already."""
        self._wait_reporter = WaitReporter(job, metrics, clock)
        self._shown = -SHOW_S
        self._connected_to: tuple[object, ...] | None = None

    async def run(self) -> None:
        """Run cycles until cancelled. Raises the unexpected exception of a background action."""
        while True:
            began = self._clock.monotonic()
            self._actions.raise_defect()
            self._ranks.raise_defect()
            await self._update_connections()
            for pool in self._pools.values():
                pool.look_after(len(self._job.mirror.members))
            self._note_scoring()
            view = self._job.look()
            if not self._is_current():
                await self._job.changes.wait(LOOK_ANYWAY_S)
                continue
            asleep = sleeping_engines(view)
            for pool in self._pools.values():
                pool.shut(asleep)
            self._note_engines()
            now = self._clock.monotonic()
            self._start_and_stop_workers(view, now)
            if now >= self._shown + SHOW_S:
                self._shown = now
                self._show_in_flight(view, now)
            intents = decide(view)
            self._wait_reporter.look(view, (i.condition for i in intents), now)
            delays = [LOOK_AGAIN_S if self._actions.held_off else LOOK_ANYWAY_S]
            acted = False
            for intent in intents:
                if self._job.waits.ripe(intent.condition, intent.turn, now, after=intent.after):
                    acted = True
                    await self._actions.carry_out(intent, view)
                else:
                    ripe_at = self._job.waits.since[intent.condition] + Timers.wait(intent.turn, intent.after)
                    delays.append(max(ripe_at - now, 0.01))
            self._actions.forget_what_is_over(now)
            if not acted:
                took = self._clock.monotonic() - began
                rest = min(rest_s(took, off_duty=waits_for_others(view)), *delays)
                changed = self._job.changes.count
                if rest > 0:
                    await self._clock.sleep(rest)
                if self._job.changes.count == changed:
                    await self._job.changes.wait(min(delays) - rest)
                if self._actions.held_off:
                    self._job.look_anew()

    def _show_in_flight(self, view: JobView, now: float) -> None:
        if view.mirror.head is not None:
            buffer, head = self._buffer, view.head
            versions = buffer.in_flight.versions(head).values()
            show_in_flight(self._metrics, view.mirror, versions, len(buffer.offers), buffer.in_flight.oldest_s(now))

    def _start_and_stop_workers(self, view: JobView, now: float) -> None:
        """Start and stop the job's workers on this node as `schedule_workers` decides."""
        if not view.mirror.is_running:
            return
        # Each check asks the kernel for every process, so it does not run in every cycle.
        engines = {**view.engines, **view.judges}
        mirror, hung = view.mirror, {name for name, engine in engines.items() if engine.hung}
        inputs = (view.workers, mirror.plan, mirror.head, mirror.claims, hung)
        if self._workers_seen is not None and now < self._workers_seen[0] + LOOK_ANYWAY_S:
            before = self._workers_seen[1]
            if all(one is other for one, other in zip(inputs[:-1], before[:-1], strict=True)) and hung == before[-1]:
                return
        self._workers_seen = (now, inputs)
        self._tell_failures(view)
        emulated: list[StartEngine] = []
        for action in schedule_workers(view, self._launcher.launches(view.workers), now):
            if isinstance(action, StopWorker):
                # Only once: a second signal prevents draining. A hung worker gets two.
                worker = view.workers[action.instance]
                asked_in = self._asked_to_stop.get(action.instance)
                if asked_in is None or (action.at_once and worker.state == "stopping" and asked_in != "stopping"):
                    self._asked_to_stop[action.instance] = worker.state
                    log.warning("stopping %s: %s", action.instance, action.reason)
                    send_signal(worker.process, signal.SIGTERM)
            elif isinstance(action, StartEngine) and is_emulated(action.place.slot):
                emulated.append(action)
            else:
                judge = f"-{action.place.judge}" if isinstance(action, StartEngine) and action.place.judge else ""
                topic = f"{type(action).__name__}-{view.node}-{action.place.slot}{judge}"
                self._job.warnings.hold(topic, self._launcher.start(action, view))
        if emulated:
            self._launcher.start_emulated(emulated, view)

    def _tell_failures(self, view: JobView) -> None:
        """Warn users of engines of this node that have failed. A failed train rank is reported by the rollback."""
        mine = {
            i: w
            for i, w in view.workers.items()
            if (w.node, w.job_uid) == (view.node, self._job.uid) and w.role != "train"
        }
        for instance, worker in mine.items():
            if worker.state == "failed" and instance not in self._failed:
                why = worker.reason or "no reason reported"
                self._job.warnings.note(f"engine-{view.node}", f"{instance} failed and will be replaced: {why}")
        self._failed = {instance for instance, worker in mine.items() if worker.state == "failed"}

    async def _update_connections(self) -> None:
        """Connect to the ranks of the present train world and to the engines that this controller manages."""
        mirror = self._job.mirror
        workers, members = self._cluster.workers, mirror.members
        # A leaving member sends no more requests to engines.
        staying = {name: stored.record for name, stored in members.items() if not stored.record.leaving}
        joining = self._note_joining()
        inputs = (workers, members, joining, mirror.head, mirror.plan, mirror.claims)
        if self._connected_to is not None and all(
            one is other for one, other in zip(inputs, self._connected_to, strict=True)
        ):
            return
        mine = self._remembered.get(
            "mine",
            (workers, members, joining),
            lambda: owned_engines(self._job.uid, workers, staying, self._job.me, joining),
        )
        for judge, pool in self._pools.items():  # every member queries judges
            await pool.aim(workers if judge else mine if mirror.members else {})
        self._connected_to = inputs
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

    def _note_joining(self) -> frozenset[str]:
        """The registered nodes whose controller will soon join the job for the first time: those that have never been
        members, for at most `JOIN_S`.

        A node that was a member before is not among them: other controllers manage its engines until it has joined
        again.
        """
        now = self._clock.monotonic()
        self._joined |= {stored.record.node for stored in self._job.mirror.members.values()}
        self._absent = {node: self._absent.get(node, now) for node in self._cluster.nodes if node not in self._joined}
        joining = frozenset(node for node, since in self._absent.items() if now < since + JOIN_S)
        # An equal set stays the same object: `_update_connections` and the memo compare by identity.
        if joining != self._joining:
            self._joining = joining
        return self._joining
