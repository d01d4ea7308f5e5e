"""One job on one controller, for one incarnation: watch → view → decide → apply, and the flow beside it.

How it stands is `controllers.standing`'s. The mirror is fed by a watch; a driver (`controllers.driving`) decides at every change and carries out what is ripe; the flow
(`controllers.producing`) produces. They meet in `ChangeSignal` and in the view, never in each other. When the incarnation ends, all of it is thrown away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from controllers.accounting.attribution import IdleEngines
from controllers.accounting.usage import UsageWriter
from controllers.changes import LOOK_AGAIN_S, ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.shares import change_claim
from controllers.flow.episodes import EpisodePool, EpisodeRunner, new_episode_pool, new_episode_runner
from controllers.flow.evaluation import LedgerEvaluations
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import CurriculumOrders, rewards_of
from controllers.flow.peer import JobPeer
from controllers.flow.step import Collectives
from controllers.identity import Identity
from controllers.inference.judge_engines import JudgePools
from controllers.inference.judges import ExternalJudges, JudgeMetricsObserver, open_judges
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from controllers.job import supervision as quitting
from controllers.job.effects import Effects
from controllers.job.executor import apply_action
from controllers.job.preparation import Preparation
from controllers.job.reconciler import ActionsInFlight, Reconciler
from controllers.job.supervision import NodeNotReady
from controllers.planning.lender import own_loads
from controllers.planning.planner import Planner
from controllers.rules.actions import SetPhase
from controllers.rules.decide import has_handed_over
from controllers.rules.view import EngineView, JobView, Memo, Timers
from controllers.storage import garbage as quota
from controllers.storage.garbage import DiskQuota
from controllers.storage.replication import Replicator
from controllers.storage.run_folder import (
    NOTHING_STAGED,
    LocalRunFolder,
    LocalRunFolders,
    StagedWeightsMonitor,
    folder_loss,
    has_own_folder,
    localize_mirror,
)
from controllers.telemetry.events import split_by_revision
from controllers.telemetry.notices import PluginErrorLog, WarningLog, report_waits
from controllers.telemetry.run_recorder import JobTelemetry, RunRecorder, start_background_task
from controllers.workers.launcher import JobGroups, WorkerLauncher
from controllers.workers.ranks import RankConnections
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1.placement_pb2 import LoadsReply
from gcore.config.load import find_flow, stored_spec
from gcore.config.node import NodeConfig
from gcore.config.spec import JobSpec
from gcore.data.dataset import DataChanged
from gcore.errors import GcoreError
from gcore.flows.api import Flow, Peer
from gcore.flows.filters import find_filters
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Claim
from gcore.ledger.records.job import JobPhase
from gcore.ledger.selection import StreamRules, rules_of
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.observability.metrics import Metrics
from gcore.observability.tracing import StepTraces
from gcore.plugins import RAISED, plugin_trace
from gcore.reward.pool import FunctionScorer, RewardPool
from gcore.rollout.client import engine_reach
from gcore.schema import written_version
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch
from gcore.system import daemon as logs
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.types import Version
from gcore.worker.sandbox.pool import PoolStatus
from placement.moves import MoveProposal, MoveReport

# -------------------- standing
# How a job stands on one controller for one incarnation: its records as they were heard, what is held of it, one view of
# all that, and the few things that follow from the view and not from a decision: that the job fails, that this controller
# leaves it.
#
# What feeds it and what works on it is another's (`controllers.job`; in a simulation, that of made-up ends): here nothing is
# started, watched or decided.


class JobRunner(ABC):
    """Mutable; one event loop. Whoever inherits it sets what is declared and not made here, before the first look."""

    _spec: JobSpec
    _staff: WorkerLauncher
    _ranks: RankConnections
    _engines: EnginePool
    _deeds: ActionsInFlight

    def __init__(self, uid: str, identity: Identity, cluster: ClusterMirror, changes: ChangeSignal) -> None:
        self.uid = uid
        self.keys = JobKeys(uid)
        self.node = identity.node
        self.changes = changes
        self.mirror = JobMirror(self.keys)
        self.holdings = GroupBuffer()
        self._identity = identity
        self._cluster = cluster
        self._rules: StreamRules | None = None
        self._view: tuple[int, JobView] | None = None
        self._remembered = Memo()
        self._leaving = False
        self.is_working = False
        """Whether there is a view to look at."""
        self._lacks = ""
        self._scoring: PoolStatus | None = None
        self._judging: PoolStatus | None = None
        self._crewing: PoolStatus | None = None

    @abstractmethod
    def hands(self) -> Effects:
        """What this job's actions are carried out with."""

    @abstractmethod
    def _staged(self) -> frozenset[Version]:
        """The versions whose weights lie in the run's folder."""

    def _brought(self) -> frozenset[str]:
        """The train worlds whose starting checkpoint lies proved in this node's own folder."""
        return frozenset()

    def _judge_views(self) -> Mapping[str, EngineView]:
        """The engines of the job's judges."""
        return {}

    def _proposed(self) -> tuple[MoveProposal | None, MoveReport | None]:
        """What this controller wants to change of the placement, and what it has to tell of earlier changes."""
        return None, None

    def _is_arranging(self) -> bool:
        """Whether a curriculum's order is being worked out."""
        return False

    @property
    def me(self) -> str:
        """This incarnation."""
        return self._identity.incarnation

    @property
    def has_handed_over(self) -> bool:
        """Whether nothing is left that it is worth staying for."""
        return not self.is_working or has_handed_over(self.look())

    def has_more(self) -> bool:
        """Whether there are steps to make. It may be so again after the last: by a rollback."""
        return not self._ended() and self.mirror.head is not None and not self.look().is_over

    def leave(self) -> None:
        """Hand over: this controller is about to end."""
        self._leaving = True
        for ref in list(self.holdings.in_flight):
            self.holdings.in_flight.give_up(ref, stale=False)
        self.changes.notify()

    async def fail(self, reason: str) -> None:
        """End the job as failed, however long the store is away."""
        while not self._ended():
            done = await apply_action(SetPhase(JobPhase.FAILED, reason), self.look(), self.hands())
            if done.outcome is not TxnOutcome.WON:
                await self.changes.wait(LOOK_AGAIN_S)
            else:
                await self.changes.until(self._ended)

    def look_anew(self) -> None:
        """What is under way has changed, which no record tells."""
        self._view = None

    def look(self) -> JobView:
        """The view now; computed once for each change."""
        if self._view is None or self._view[0] != self.changes.count:
            self._view = (self.changes.count, self._build())
        return self._view[1]

    def _ended(self) -> bool:
        return self.mirror.has_ended

    def _rules_or_none(self) -> StreamRules | None:
        if self.mirror.job is None:
            return None
        job = self.mirror.job.record
        # A spec is checked whole to give them: too much for whatever is heard.
        return self._remembered.get("rules", (job,), lambda: rules_of(job))

    def _prune(self, before: JobMirror) -> None:
        """Drop what a new head has made terminal, cut off or too old."""
        rules = self._rules_or_none()
        if rules is not None and self.mirror.head is not None and self.mirror.head != before.head:
            self.holdings.prune(rules, self.mirror.head.record)

    def _build(self) -> JobView:
        assert self._rules is not None
        head = self.mirror.head
        return JobView(
            spec=self._spec,
            rules=self._rules,
            mirror=self.mirror,
            me=self.me,
            node=self.node,
            nodes=self._cluster.able(written_version()),
            share=self._cluster.share_of(self.uid),
            claim=self._cluster.claims.get(self.uid, Claim()),
            queued=self._cluster.queue.get(self.uid),
            unable=self._cluster.unable(written_version()),
            workers=self._cluster.workers,
            ranks=self._ranks.views,
            engines=self._engines.views,
            judges=self._judge_views(),
            holdings=self.holdings.offers,
            outcomes=self.holdings.outcomes,
            in_flight=self.holdings.in_flight.versions(head.record) if head is not None else {},
            busy=bool(self.holdings.in_flight),
            under_way=self._deeds.under_way(),
            saved=self._ranks.saved,
            staged=self._staged(),
            brought=self._brought(),
            arranging=self._is_arranging(),
            lacks=self._lacks,
            scoring=self._scoring,
            judging=self._judging,
            crewing=self._crewing,
            hopeless=self._staff.hopeless(self._cluster.workers),
            proposal=self._proposed()[0],
            account=self._proposed()[1],
            remembered=self._remembered,
            leaving=self._leaving,
        )


# -------------------- producing
# Running a job's flow, again and again, and what ends the job when it, or another plug-in, raises.
#
# What a plug-in raised is noted with its own traceback before the job ends, so that the event is there first. The flow is begun
# anew when there are steps to make again: after a rollback from behind the last step. Nothing is decided here.

log = logging.getLogger(__name__)


LONGEST_REASON = 2000
"""Characters. Foreign code may say whatever it likes, and the store takes 1.5 MiB."""


class FlowJob(Protocol):
    """What is needed of the job whose flow it is."""

    uid: str
    changes: ChangeSignal

    def has_more(self) -> bool:
        """Whether there are steps to make."""
        ...

    async def fail(self, reason: str) -> None:
        """End it."""
        ...


class FlowRunner:
    """Of one job, on one controller."""

    def __init__(self, job: FlowJob, faults: PluginErrorLog, clock: Clock) -> None:
        self._job = job
        self._faults = faults
        self._clock = clock

    async def run(self, flow: Flow, peer: Peer) -> None:
        """Until cancelled: the flow to its end, and again when there is more to do. Raises NodeNotReady."""
        me = asyncio.current_task()
        assert me is not None
        while True:
            try:
                await flow(peer)
            except DataChanged as error:  # all that is trained would be lost for a file that can be put back
                raise NodeNotReady(error.what, where=error.where, fix=error.fix) from error
            except GcoreError as error:
                await self.fail_with(error)
            except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
                if me.cancelling():
                    raise
                # A cancellation that was not meant for it is of a task of the flow's own.
                log.error("the flow of job %s raised a %s", self._job.uid, type(error).__name__)  # the rest is a fault
                last = traceback.extract_tb(error.__traceback__)[-1]
                await self.fail_with(error, f"the flow raised {error!r} at {last.filename}:{last.lineno}")
            if me.cancelling():  # which the flow has kept to itself
                return
            await self._job.changes.until(self._job.has_more)
            # A flow that always ends at once must not keep everything else from running.
            await self._clock.sleep(LOOK_AGAIN_S)

    async def fail_with(self, error: BaseException, reason: str = "") -> None:
        """End the job because of `error`; first the traceback of a plug-in that raised it."""
        reason = reason or str(error)
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[: LONGEST_REASON - 1]}…"
        if trace := plugin_trace(error):
            self._faults.note(reason, trace)
            await self._faults.finish()
        await self._job.fail(reason)


class JobSession(JobRunner):
    """Runs one job until it has ended, or the incarnation has."""

    def __init__(
        self,
        uid: str,
        identity: Identity,
        store: Store,
        cluster: ClusterMirror,
        changes: ChangeSignal,
        metrics: Metrics,
        clock: Clock,
        config: NodeConfig,
        folders: LocalRunFolders | None = None,
        connector: Connector = PLAIN,
        groups: JobGroups | None = None,
        traces: StepTraces | None = None,
    ) -> None:
        """`folders`: this node's own folders of runs, for jobs whose nodes share none; None: nobody else reads them. `traces`: where steps
        are told as spans; None: nowhere."""
        super().__init__(uid, identity, cluster, changes)
        self._run_root = Path(config.run_root)
        self._folders = folders or LocalRunFolders(connector)
        self._connector = connector
        self._reach = engine_reach(connector)
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._cache_dir = Path(config.home) / "cache"
        self._staff = WorkerLauncher(config, clock, connector, groups)
        self._groups = groups
        self._disk_gib = config.limits.disk_gib
        self.chronicle = JobTelemetry(store, self.keys, identity, metrics, clock, self._reach, traces)
        self._faults = PluginErrorLog(store, self.keys, identity.node)
        self.troubles = WarningLog(store, self.keys, identity.node, clock)
        self._rewards: RewardPool | None = None
        self._worlds: EpisodePool | None = None
        self._judge_engines: JudgePools | None = None
        self._external_judges: ExternalJudges | None = None
        self._judge_counts = JudgeMetricsObserver(
            metrics, lambda topic, said: self.troubles.note(f"{topic}-{self.node}", said)
        )
        self._staged_weights: StagedWeightsMonitor | None = None
        self.closed = False
        """Whether nothing more will be heard here."""
        self._held_back: Callable[[], bool] = lambda: False
        self.waits = Timers({})
        self._ranks = RankConnections(clock, changes.notify, connector)
        self._deeds = ActionsInFlight(self, metrics, clock)
        home = Path(config.home)
        self._reading = RunRecorder(identity, home, store, self.keys, lambda: self.mirror, changes, clock)
        self._orders: CurriculumOrders | None = None
        self._planner: Planner | None = None

    async def withdraw(self) -> None:
        """Be no member of a job that cannot be worked on here."""
        await quitting.withdraw_member(self._store, self.keys, self._identity, self._clock)

    async def end_left(self, reason: str) -> None:
        """End the job as failed, if nobody works on it any more."""
        await quitting.fail_abandoned_job(self._store, self.keys, self._clock, reason)

    async def run(self) -> None:
        """Until the job has ended."""
        logs.set_log_context(lambda: self.chronicle.about)
        watching = asyncio.create_task(self._watch(), name=f"watch {self.uid}")
        try:
            while self.mirror.job is None or self.mirror.status is None:
                await self._unless(watching, self.changes.wait())
            if not self.mirror.has_ended:
                self._reading.begin()
                await self._unless(watching, self._work())
            if self.mirror.has_ended:
                await self._reading.finish()
        finally:
            self.closed, self.is_working = True, False
            self.chronicle.close()
            self.changes.notify()
            watching.cancel()
            await self._deeds.stop()
            await self._reading.stop()
            await self._ranks.close()

    async def _unless(self, watching: asyncio.Task[None], work: object) -> None:
        """Await `work`, and fail with the watch if that fails first."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        try:
            await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await task
        finally:
            task.cancel()

    async def _watch(self) -> None:
        async for batch in self._store.watch(self.keys.prefix):
            self._note(batch)
            self.changes.notify()

    def _note(self, batch: WatchBatch) -> None:
        before, wall = self.mirror, self._clock.wall()
        for one in split_by_revision(batch):
            so_far = self.mirror
            self.mirror = localize_mirror(so_far.fold(one), self._run_root)
            self.chronicle.events.note(so_far, one, self.mirror, wall)
        for key in self.mirror.unreadable.keys() - before.unreadable.keys():
            sentence = f"{self.mirror.unreadable[key].why}; it is as if it were not there"
            self.troubles.note(f"record-{self.node}", sentence)
        self._reading.note(self.mirror, self.holdings.group)
        self._prune(before)
        self.chronicle.note(before, batch, self.mirror)
        if self._planner is not None:
            self._planner.note(before, self.mirror)

    async def _work(self) -> None:
        assert self.mirror.job is not None
        spec = stored_spec(self.mirror.job.record.spec)
        rollout = spec.rollout
        patience = HealthLimits(rollout.silent_s, rollout.watchdog_s, rollout.timeout_s)
        self._engines = EnginePool(
            self.changes,
            rollout.timeout_s,
            self._reach,
            clock=self._clock,
            patience=patience,
            metrics=self._metrics,
            told_every=rollout.told_every,
            rows=rollout.batch_slots,
        )
        self._judge_engines = JudgePools(spec, self.uid, self.me, self.changes, self._clock, self._metrics, self._reach)
        self._external_judges = self._new_external(spec)
        self._spec = spec
        self._rules = self._rules_or_none()
        self.is_working = True
        head = self.mirror.head.record.version if self.mirror.head is not None else None
        job = self.mirror.job.record
        usage = UsageWriter(self._store, job, self.node, self._clock)
        await self.chronicle.booking.begin(spec, Path(job.run_dir), head, usage)
        group = await asyncio.to_thread(self._group)
        rewards = RewardPool(
            rewards_of(spec),
            spec.scoring,
            self._clock,
            lambda error: self._faults.note(str(error), error.trace),
            lambda news: self.troubles.note(f"reward-{self.node}", news),
            group=group,
        )
        self._rewards = rewards
        worlds = self._worlds = new_episode_pool(spec, self._clock, self._faults.note, group)
        try:
            await self._work_on(spec, rewards, worlds)
        finally:
            await self._external_judges.close()
            await rewards.close()
            if worlds is not None:
                await worlds.close()

    async def _work_on(self, spec: JobSpec, rewards: RewardPool, worlds: EpisodePool | None) -> None:
        assert self.mirror.job is not None
        producing = FlowRunner(self, self._faults, self._clock)
        try:
            async with report_waits(self, self._metrics, self._clock):
                material = await self._preparation(rewards).material(spec, self.mirror.job.record)
            if material is None:
                return
            self._spec = material.spec
            own = self._own_folder()
            if own is not None:
                await own.files.sweep()
            self._reading.samples.open(material.spec, material.stream, Path(self.mirror.job.record.run_dir))
            self.look_anew()
            self._held_back = lambda: material.is_held_back
            flow = find_flow(spec.flow.name)
            filters = find_filters(material.spec.flow.filters)
            conversing = self._new_responding(material.spec, worlds)
            orders = self._orders = CurriculumOrders(spec, material.stream, self.changes.notify)
        except GcoreError as error:
            await producing.fail_with(error)
            return
        me = self._identity
        collectives = Collectives(self._store, lambda: self.mirror, me.incarnation, me.lease, self.changes, self._clock)
        peer = JobPeer(
            material,
            self.look,
            self.changes,
            self._engines,
            self.holdings,
            LedgerEvaluations(TransactionExecutor(self._store, self.keys), lambda: self.mirror),
            self._clock,
            self.chronicle.stopwatch,
            orders,
            filters,
            collectives,
            self._faults,
            conversing,
        )
        external = self._external_judges
        assert self._judge_engines is not None
        assert external is not None
        driver = Reconciler(
            self,
            self._cluster,
            self._staff,
            self._engines,
            self._judge_engines,
            self._ranks,
            self._deeds,
            self._metrics,
            self._clock,
        )
        run_dir = Path(self.mirror.job.record.run_dir)
        staged = self._staged_weights = self._new_staged(run_dir)
        planner = self._planner = Planner(self, material.spec, self._clock, run_dir, self._connector)
        books = start_background_task(self.chronicle.booking.run(), f"books {self.uid}")
        try:
            async with asyncio.TaskGroup() as group:
                work = {
                    "flow": producing.run(flow, peer),
                    "drive": driver.run(),
                    "staged": staged.run(),
                    "faults": self._faults.run(),
                    "troubles": self.troubles.run(),
                    "collectives": collectives.answer_others(),
                    "external": external.run(),
                } | ({"placement": planner.run()} if material.spec.placement.is_live else {})
                if self._disk_gib is not None:
                    work["quota"] = self._quota(run_dir, self._disk_gib).run()
                tasks = [group.create_task(one, name=f"{name} {self.uid}") for name, one in work.items()]
                await self.changes.until(self._ended)
                for task in tasks:
                    task.cancel()
        finally:
            # Before this process may be ended too.
            await cancel_all([books])
            await self.chronicle.booking.finish()
            # First of all what is being published: it lets its engine go on.
            await self._deeds.stop()
            await peer.close()
            await self._engines.close()
            await self._judge_engines.close()
            await orders.close()

    def _preparation(self, scorer: FunctionScorer) -> Preparation:
        def lacks(reason: str) -> None:
            # Nobody decides while this is under way, so nobody else notes since when the job waits for it.
            models = [f"wait model {node}" for node in (self.node, *self._cluster.nodes)]
            conditions = ["wait start", *models] + ["wait material"] * bool(reason)
            self.waits = self.waits.note(conditions, self._clock.monotonic())
            self._lacks, self._view = reason, None

        lacks("")
        engines, external = self._judge_engines, self._external_judges
        assert engines is not None
        return Preparation(
            self._store,
            self.keys,
            self._identity,
            self._cache_dir,
            self.changes,
            lambda: self.mirror,
            scorer,
            lacks,
            lambda spec: open_judges(spec, engines, self._judge_counts, self._clock, external),
        )

    def note_scoring(self) -> None:
        """See what the rewards, the judges and the processes of agents and tools are at, of which no change tells."""
        seen = (
            self._rewards.scoring if self._rewards is not None else None,
            self._judge_counts.scoring,
            self._worlds.waits if self._worlds is not None else None,
        )
        if seen != (self._scoring, self._judging, self._crewing):
            (self._scoring, self._judging, self._crewing), self._view = seen, None

    def note_engines(self) -> None:
        """See which engines have nothing to do, and why."""
        if self.mirror.head is not None:
            view = self.look()
            self.chronicle.booking.look(view, held_back=self._held_back())
            idle = IdleEngines.of(view, self._engines.busy, self.chronicle.booking.stage)
            self.chronicle.stopwatch.engines.note(idle, self._clock.monotonic())

    def _judge_views(self) -> Mapping[str, EngineView]:
        return {} if self._judge_engines is None else self._judge_engines.views

    def _staged(self) -> frozenset[Version]:
        return NOTHING_STAGED if self._staged_weights is None else self._staged_weights.versions

    def _new_staged(self, run_dir: Path) -> StagedWeightsMonitor:
        def wanted() -> Version | None:
            return None if self.mirror.head is None else self.mirror.head.record.version

        return StagedWeightsMonitor(
            run_dir, self.node, wanted, self.changes, self.troubles.hold, self.changes.notify, self._clock
        )

    def _new_responding(self, spec: JobSpec, worlds: EpisodePool | None) -> EpisodeRunner | None:
        """Of a job with an environment, or an agent. Raises PluginFault."""
        return new_episode_runner(spec, self._engines, worlds, self._clock, self._faults.note)

    def _new_external(self, spec: JobSpec) -> ExternalJudges:
        return ExternalJudges(
            spec,
            self._store,
            self.keys,
            self.node,
            self.me,
            self._clock,
            self._judge_counts,
            lambda: self.mirror,
            lambda: self._cluster.nodes,
            self.troubles.note,
            os.environ,
        )

    def _proposed(self) -> tuple[MoveProposal | None, MoveReport | None]:
        return (None, None) if self._planner is None else (self._planner.proposal, self._planner.account)

    async def loads(self) -> LoadsReply:
        """What the engines that this controller sees to have to do."""
        return await own_loads(self.look(), self._engines, self._judge_engines)

    def _is_arranging(self) -> bool:
        return self._orders is not None and self._orders.arranging

    def hands(self) -> Effects:
        """What this job's actions are carried out with."""
        assert self.mirror.job is not None
        run_dir, ledger = Path(self.mirror.job.record.run_dir), TransactionExecutor(self._store, self.keys)
        return Effects(
            store=self._store,
            ledger=ledger,
            lease=self._identity.lease,
            address=self._identity.address,
            ranks=self._ranks,
            engines=self._engines,
            holdings=self.holdings,
            clock=self._clock,
            stats=self.chronicle.stats,
            tell=self.troubles.hold,
            run_dir=run_dir,
            away=partial(folder_loss, run_dir, self.node),
            replicator=self._replicator(run_dir, ledger),
            memory_dir=self._staff.memory_dir(self.uid),
            judges=self._judge_engines,
        )

    def _replicator(self, run_dir: Path, ledger: TransactionExecutor) -> Replicator | None:
        own = self._own_folder()
        if own is None:
            return None
        lease = self._identity.lease
        return Replicator(self._store, ledger, lease, self._clock, run_dir, self.troubles.hold, own)

    def _quota(self, run_dir: Path, disk_gib: float) -> DiskQuota:
        def show(found: quota.DiskUsage) -> None:
            self._reading.samples.has_room = found.level is quota.QuotaLevel.FREE
            self.troubles.note(f"{quota.TOPIC}-{self.node}", found.sentence)

        return DiskQuota(run_dir, disk_gib, lambda: len(self.mirror.members), show, self._pause, self._clock)

    async def _pause(self) -> None:
        await change_claim(self._store, self.uid, lambda claim: claim.model_copy(update={"paused": True}))

    def _group(self) -> str:
        return "" if self._groups is None else self._groups.group_of(self.uid)

    def _own_folder(self) -> LocalRunFolder | None:
        assert self.mirror.job is not None
        job = self.mirror.job.record
        return self._folders.of(job.uid, Path(job.run_dir)) if has_own_folder(job) else None

    def _brought(self) -> frozenset[str]:
        own = self._own_folder()
        return frozenset() if own is None else frozenset(own.brought)
