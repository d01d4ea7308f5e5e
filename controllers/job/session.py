"""The session: all parts of one running job on one controller, built and connected.

`JobSession` builds the parts and holds the state that they share. `JobWork` builds those that need the job's data,
after preparation. Parts communicate through the change signal and the view, which is computed once for each change. The
daemon and the simulation build the same session; they differ in the `JobDependencies` (store, workers, telemetry,
folders).
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from controllers.accounting.usage import UsageWriter
from controllers.changes import LOOK_AGAIN_S, ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.shares import change_claim
from controllers.flow.curriculum_orders import CurriculumOrders
from controllers.flow.episodes import EpisodePool, new_episode_pool, new_episode_runner
from controllers.flow.evaluation import LedgerEvaluations
from controllers.flow.group_buffer import GroupBuffer
from controllers.flow.job_data import JobData, rewards_of
from controllers.flow.peer import JobPeer
from controllers.flow.peer_collectives import PeerCollectives
from controllers.identity import Identity
from controllers.inference.judge_engines import JudgePool
from controllers.inference.judges import ExternalJudges, JudgeMetricsObserver, answers_of_a_step, open_judges
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from controllers.job.effects import Effects, no_stores
from controllers.job.executor import apply_action
from controllers.job.preparation import Preparation
from controllers.job.reconciler import ActionsInFlight, Reconciler
from controllers.job.supervision import NodeNotReady
from controllers.planning.lender import own_loads
from controllers.planning.planner import Planner
from controllers.rules.actions import SetPhase
from controllers.rules.view import JobView, Memo, Timers
from controllers.rules.world import note_rank_failures
from controllers.storage.garbage import TOPIC as DISK_TOPIC
from controllers.storage.garbage import DiskQuota, DiskUsage, QuotaLevel
from controllers.storage.replication import Replicator
from controllers.storage.run_folder import (
    LocalRunFolder,
    LocalRunFolders,
    StagedWeightsMonitor,
    has_own_folder,
)
from controllers.telemetry.notices import LiveJob, PluginErrorLog, WarningLog, report_waits
from controllers.telemetry.run_recorder import JobTelemetry, RunRecorder, start_background_task
from controllers.workers.blobs import NodeBlobs
from controllers.workers.job_media import JobMedia
from controllers.workers.launcher import WorkerLauncher
from controllers.workers.ranks import RankConnections
from gcore.api.tls import Connector
from gcore.api.v1.placement_pb2 import LoadsReply
from gcore.config.load import find_flow
from gcore.config.spec import JobSpec, outdated_settings, uses_blobs
from gcore.data.dataset import DataChanged
from gcore.errors import GcoreError
from gcore.flows.api import Flow, Peer
from gcore.flows.filters import find_filters
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.cluster import Claim
from gcore.ledger.records.job import JobPhase, JobRecord
from gcore.ledger.selection import StreamRules, rules_of
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.observability.metrics import Metrics
from gcore.plugins import RAISED, plugin_trace
from gcore.reward.pool import RewardPool
from gcore.rollout.client import EngineReach
from gcore.schema import written_version
from gcore.store.keys import JobKeys
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all
from gcore.types import Version
from gcore.worker.sandbox.pool import PoolStatus
from placement.moves import MoveProposal, MoveReport

log = logging.getLogger(__name__)


SPEC_TOPIC = "spec"
"""Topic of the warning about settings of an old job that are no longer accepted for new jobs."""

UNJUDGED_LOOK_S = 1.0
"""Seconds between checks whether any answer of a judge could be parsed."""

LONGEST_REASON = 2000
"""Maximum characters of the reason for which a job failed. Plug-ins may raise errors of any length; the store accepts
values up to 1.5 MiB."""


@dataclass(frozen=True)
class JobDependencies:
    """What a session needs from outside: store, workers, telemetry, folders. The simulation provides its own."""

    store: Store
    ledger: TransactionExecutor
    clock: Clock
    metrics: Metrics
    connector: Connector
    connect_engine: EngineReach
    launcher: WorkerLauncher
    ranks: RankConnections
    telemetry: JobTelemetry
    warnings: WarningLog
    errors: PluginErrorLog
    folders: LocalRunFolders
    """This node's own folders of runs, for jobs whose nodes share no folder."""
    memory_dir: Path | None
    """The folder of in-memory copies of the job's train states on this node; None: no copies are kept."""
    cache_dir: Path
    blobs: NodeBlobs | None
    """The blob store of this node; None: jobs with pictures cannot run here."""
    disk_gib: float | None
    """The disk quota of the job; None: no quota."""
    new_recorder: Callable[[Callable[[], JobMirror]], RunRecorder]
    """Builds the run recorder; called with a function that returns the mirror."""
    run_root: Path
    """The folder of this node's runs, for jobs whose nodes share no folder."""
    folder_loss: Callable[[Path], str]
    """Returns why this node no longer sees the run's folder; empty if it does. Blocks."""
    group_of_job: Callable[[], str]
    """Returns the cgroup of the job's processes; empty without one. Blocks."""
    timers: Timers = field(default_factory=lambda: Timers({}))
    prepare: Callable[[Preparation, JobSpec, JobRecord], Awaitable[JobData | None]] = Preparation.prepare
    find_flow: Callable[[str], Flow] = find_flow
    new_staged_weights: Callable[..., StagedWeightsMonitor] = StagedWeightsMonitor


class JobRecords:
    """A job's records as last received, and the groups that this controller holds for it. They exist before and after
    the session."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.keys = JobKeys(uid)
        self.mirror = JobMirror(self.keys)
        self.buffer = GroupBuffer()
        self.leaving = False
        """Whether this controller is about to end and hands the job over."""


class FlowRunner:
    """Runs a job's flow (the user's program of a step). Runs it again if a rollback comes after its end, so that steps
    are left to train.

    An error of the flow or of a plug-in ends the job. The plug-in's traceback is recorded before that, so that its
    event comes first.
    """

    def __init__(self, job: JobSession, errors: PluginErrorLog, clock: Clock) -> None:
        self._job = job
        self._errors = errors
        self._clock = clock

    async def run(self, flow: Flow, peer: Peer) -> None:
        """Run the flow until cancelled. Raises NodeNotReady if the data has changed."""
        me = asyncio.current_task()
        assert me is not None
        while True:
            try:
                await flow(peer)
            except DataChanged as error:  # training must not be lost for a file that can be restored
                raise NodeNotReady(error.what, where=error.where, fix=error.fix) from error
            except GcoreError as error:
                await self.fail_with(error)
            except (*RAISED, asyncio.CancelledError) as error:  # the boundary to plug-in code
                if me.cancelling():
                    raise
                # This task was not cancelled: the cancellation belongs to a task of the flow.
                log.error(
                    "the flow of job %s raised a %s", self._job.uid, type(error).__name__
                )  # the fault contains the details
                last = traceback.extract_tb(error.__traceback__)[-1]
                await self.fail_with(error, f"the flow raised {error!r} at {last.filename}:{last.lineno}")
            if me.cancelling():  # the flow swallowed the cancellation
                return
            await self._job.changes.until(self._job.has_more)
            # A flow that always returns at once must not starve other tasks.
            await self._clock.sleep(LOOK_AGAIN_S)

    async def fail_with(self, error: BaseException, reason: str = "") -> None:
        """End the job as failed because of `error`. `reason`: sentence for users; empty: that of the error. If a
        plug-in raised it, its traceback is recorded first."""
        reason = reason or str(error)
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[: LONGEST_REASON - 1]}…"
        if trace := plugin_trace(error):
            self._errors.note(reason, trace)
            await self._errors.finish()
        await self._job.fail(reason)


class Unprepared:
    """Placeholder for `JobWork` until the job's data is prepared."""

    is_ordering = is_held_back = False
    proposal: MoveProposal | None = None
    move_report: MoveReport | None = None

    def note(self, before: JobMirror, after: JobMirror) -> None:
        """Do nothing: changes of records only matter after preparation."""


class JobSession(LiveJob):
    """All parts of a running job, and the state that they share (records, view). Not thread-safe."""

    def __init__(
        self,
        records: JobRecords,
        identity: Identity,
        cluster: ClusterMirror,
        changes: ChangeSignal,
        dependencies: JobDependencies,
        recorder: RunRecorder,
        spec: JobSpec,
        job: JobRecord,
        control_group: str,
    ) -> None:
        """`job`: the record, with the run's folder on this node; `control_group`: cgroup of the job's processes."""
        super().__init__(
            records.uid,
            identity.node,
            identity.incarnation,
            changes,
            lambda: records.mirror,
            self._new_view,
            dependencies.warnings,
            dependencies.timers,
        )
        self.buffer = records.buffer
        self.dependencies = dependencies
        self.run_dir = Path(job.run_dir)
        self.spec, self.rules = spec, rules_of(job)
        self.recorder = recorder
        self.work: Unprepared | JobWork = Unprepared()
        self.identity = identity
        self.cluster = cluster
        self._records = records
        self._job_revision = 0 if records.mirror.job is None else records.mirror.job.revision
        self._unanswered = (0, 0)
        """The number of transactions without a response so far, and the revision of the mirror at the last of them."""
        self._memo = Memo()
        self._missing_input = ""
        self._rank_failures: Mapping[str, str] = {}
        self._pools: tuple[PoolStatus | None, PoolStatus | None, PoolStatus | None] = (None, None, None)
        """Load of reward functions, of judges, and of the processes of agents and tools, as last polled."""
        clock, metrics = dependencies.clock, dependencies.metrics
        rollout = spec.rollout
        self.engines = EnginePool(
            self.changes,
            rollout.timeout_s,
            dependencies.connect_engine,
            clock=clock,
            patience=HealthLimits(rollout.silent_s, rollout.watchdog_s, rollout.timeout_s),
            metrics=metrics,
            told_every=rollout.told_every,
            rows=rollout.batch_slots,
        )
        self.media: JobMedia | None = None
        """The media of the job's prompts; None: it has none."""
        if uses_blobs(spec) and dependencies.blobs is not None:
            dependencies.blobs.need()
            self.media = JobMedia(
                dependencies.blobs,
                self.uid,
                self.me,
                held=self.buffer.refs,
                worlds=self._needed_worlds,
                changes=self.changes,
                warn=lambda sentence: self.warnings.hold(f"blobs-{self.node}", sentence),
                clock=clock,
            )
        self.judges = {
            judge.name: JudgePool(
                spec, judge, self.uid, self.me, self.changes, clock, metrics, dependencies.connect_engine, self.media
            )
            for judge in spec.judges
            if judge.external is None
        }
        self.pools: dict[str, EnginePool] = {"": self.engines, **self.judges}
        """All engine pools by judge; the key of the policy's pool is empty."""
        self._judge_counts = JudgeMetricsObserver(
            metrics, lambda topic, said: self.warnings.note(f"{topic}-{self.node}", said)
        )
        self.external = ExternalJudges(
            spec=spec,
            store=dependencies.store,
            keys=records.keys,
            node=self.node,
            me=self.me,
            clock=clock,
            counts=self._judge_counts,
            mirror=lambda: self.mirror,
            nodes=lambda: cluster.nodes,
            tell=self.warnings.note,
            environ=os.environ,
            media=self.media,
        )
        self._rewards = RewardPool(
            rewards_of(spec),
            spec.scoring,
            clock,
            lambda error: dependencies.errors.note(str(error), error.trace),
            lambda news: self.warnings.note(f"reward-{self.node}", news),
            group=control_group,
        )
        self.episodes: EpisodePool | None = new_episode_pool(spec, clock, dependencies.errors.note, control_group)
        self.own_folder: LocalRunFolder | None = (
            dependencies.folders.of(job.uid, self.run_dir) if has_own_folder(job) else None
        )
        self.staged = dependencies.new_staged_weights(
            self.run_dir,
            self.node,
            self._head_version,
            self.changes,
            self.warnings.hold,
            self.changes.notify,
            clock,
        )
        self.effects = self._make_effects()
        self.actions = ActionsInFlight(self, self.effects, self.fail, metrics, clock)
        self.flow = FlowRunner(self, dependencies.errors, clock)
        self.collectives = PeerCollectives(
            dependencies.store, lambda: self.mirror, self.me, identity.lease, self.changes, clock
        )

    def _make_effects(self) -> Effects:
        dependencies, lease = self.dependencies, self.identity.lease
        replicator: Replicator | None = None
        if self.own_folder is not None:
            replicator = Replicator(
                dependencies.store,
                dependencies.ledger,
                lease,
                dependencies.clock,
                self.run_dir,
                self.warnings.hold,
                self.own_folder,
            )
        return Effects(
            store=dependencies.store,
            ledger=dependencies.ledger,
            lease=lease,
            address=self.identity.address,
            ranks=dependencies.ranks,
            pools=self.pools,
            buffer=self.buffer,
            clock=dependencies.clock,
            stats=dependencies.telemetry.stats,
            tell=self.warnings.hold,
            run_dir=self.run_dir,
            away=partial(dependencies.folder_loss, self.run_dir),
            replicator=replicator,
            memory_dir=dependencies.memory_dir,
            locate=no_stores if self.media is None else self.media.locate,
        )

    @property
    def record(self) -> JobRecord:
        """The job's record. Requires that it was received."""
        assert self.mirror.job is not None
        return self.mirror.job.record

    @property
    def is_current(self) -> bool:
        """Whether the job's record is the one that this session was built with. Otherwise another session replaces it."""
        return self.mirror.job is None or self.mirror.job.revision == self._job_revision

    def has_more(self) -> bool:
        """Whether steps are left to train. A rollback after the last step makes this true again."""
        return not self.mirror.has_ended and self.mirror.head is not None and not self.look().is_over

    async def fail(self, reason: str) -> None:
        """End the job as failed for this reason; retry until that is written."""
        while not self.mirror.has_ended:
            done = await apply_action(SetPhase(JobPhase.FAILED, reason), self.look(), self.effects)
            if done.outcome is not TxnOutcome.WON:
                await self.changes.wait(LOOK_AGAIN_S)
            else:
                await self.changes.until(lambda: self.mirror.has_ended)

    def prune(self, before: JobMirror) -> None:
        """If head has moved, drop held groups that can no longer be trained. `before`: the records before the
        change."""
        mirror = self.mirror
        if mirror.job is not None and mirror.head is not None and mirror.head != before.head:
            self.buffer.prune(self._current_rules(mirror.job.record), mirror.head.record)

    async def loads(self) -> LoadsReply:
        """The load of the engines that this controller manages, as the answer to a poll of the planner."""
        return await own_loads(self.look(), self.pools)

    def note_scoring(self) -> None:
        """Poll the load of reward functions, judges, and processes of agents and tools, which do not notify of
        changes."""
        seen = (
            self._rewards.scoring,
            self._judge_counts.scoring,
            self.episodes.waits if self.episodes is not None else None,
        )
        if seen != self._pools:
            self._pools, self._view = seen, None

    async def fail_unjudged(self) -> None:
        """Watch until no response can be judged, then end the job as failed: a judge gave as many answers here as a
        step needs and none could be parsed, and no response was scored anywhere since the job started. Without this the
        job would run to the end of its first data epoch."""
        answers = answers_of_a_step(self.spec)
        while not (reason := self._judge_counts.unreadable_judge_reason(answers)) or self._has_scores():
            await self.dependencies.clock.sleep(UNJUDGED_LOOK_S)
        await self.fail(reason)

    def _has_scores(self) -> bool:
        """Whether any response of the job was scored so far, as far as this controller knows."""
        if self.mirror.head is None:
            return False
        view = self.look()
        tally = view.head.tally
        kept = view.head.step or tally.since_step.scored or any(source.kept for source in tally.sources.values())
        return bool(kept or view.offered.groups or view.holdings)

    def note_engines(self) -> None:
        """Record which engines are idle now, for slot accounting."""
        if self.mirror.head is not None:
            self.dependencies.telemetry.note_engines(self.look(), self.engines.busy, held_back=self.work.is_held_back)

    async def run(self) -> None:
        """Prepare this node and work on the job until it has ended or its settings have changed."""
        head, dependencies = self._head_version(), self.dependencies
        usage = UsageWriter(dependencies.store, self.record, self.node, dependencies.clock)
        await dependencies.telemetry.slot_accounting.begin(self.spec, self.run_dir, head, usage)
        try:
            if (work := await self._prepare()) is not None:
                self.work = work
                await work.run()
        finally:
            await self.external.close()
            await self._rewards.close()
            if self.episodes is not None:
                await self.episodes.close()

    async def _prepare(self) -> JobWork | None:
        """Prepare this node and build the parts that need the data; None if the job has ended or failed meanwhile."""
        preparation = self._make_preparation()
        try:
            async with report_waits(self, self.dependencies.metrics, self.dependencies.clock):
                data = await self.dependencies.prepare(preparation, self.spec, self.record)
                await self._wait_for_keys(preparation.report_missing)
            if data is None:
                return None
            if self.own_folder is not None:
                await self.own_folder.files.sweep()
            self.spec = data.spec
            self.warnings.hold(SPEC_TOPIC, outdated_settings(data.spec))
            blobs = None if self.media is None else self.media.folder
            self.recorder.samples.open(data.spec, data.stream, self.run_dir, blobs)
            self.look_anew()
            return JobWork(self, data)
        except GcoreError as error:
            await self.flow.fail_with(error)
            return None

    async def _wait_for_keys(self, report_missing: Callable[[str], None]) -> None:
        """If the job has media, wait until the keys of the blob stores are known, or the job has ended."""
        if self.media is None:
            return
        report_missing("the keys of the blob stores could not be read from the store yet")
        waits = {asyncio.create_task(self.media.ready()), asyncio.create_task(self.changes.until(self._has_ended))}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(waits)
        report_missing("")

    def _has_ended(self) -> bool:
        return self.mirror.has_ended

    def _needed_worlds(self) -> frozenset[str]:
        """The train worlds whose ranks on this node may need their blobs: the present one, and those whose ranks have
        not ended."""
        head = self.mirror.head
        if head is None:
            return frozenset()
        ranks = (w for w in self.cluster.workers.values() if w.job_uid == self.uid and w.node == self.node)
        return frozenset({head.record.world} | {w.world for w in ranks if w.world and w.state != "failed"})

    def _make_preparation(self) -> Preparation:
        def report_missing(reason: str) -> None:
            # No decisions are made during preparation, so the start times of its waits are recorded here.
            models = [f"wait model {node}" for node in (self.node, *self.cluster.nodes)]
            conditions = ["wait start", *models] + ["wait material"] * bool(reason)
            self.waits = self.waits.note(conditions, self.dependencies.clock.monotonic())
            self._missing_input, self._view = reason, None

        report_missing("")
        return Preparation(
            self.dependencies.store,
            self._records.keys,
            self.identity,
            self.dependencies.cache_dir,
            self.changes,
            lambda: self.mirror,
            self._rewards,
            report_missing,
            lambda spec: open_judges(spec, self.judges, self._judge_counts, self.dependencies.clock, self.external),
            self.media,
        )

    def _head_version(self) -> Version | None:
        return None if self.mirror.head is None else self.mirror.head.record.version

    def _current_rules(self, job: JobRecord) -> StreamRules:
        # `rules_of` validates the whole spec, which is too expensive for each change.
        return self._memo.get("rules", (job,), lambda: rules_of(job))

    def _find_store_trouble(self) -> str:
        """Why the last write to the store got no response; empty if a later change by any writer was received, which
        shows that the store accepts writes."""
        ledger, revision = self.dependencies.ledger, self.mirror.revision
        if ledger.unanswered != self._unanswered[0]:
            self._unanswered = ledger.unanswered, revision
        return ledger.trouble if revision <= self._unanswered[1] else ""

    def _new_view(self) -> JobView:
        cluster, dependencies, head = self.cluster, self.dependencies, self.mirror.head
        reward_pool, judge_pool, tool_pool = self._pools
        self._rank_failures = note_rank_failures(self._rank_failures, self.mirror, cluster.workers)
        return JobView(
            spec=self.spec,
            rules=self.rules,
            mirror=self.mirror,
            me=self.me,
            node=self.node,
            nodes=cluster.able(written_version()),
            share=cluster.share_of(self.uid),
            claim=cluster.claims.get(self.uid, Claim()),
            queued=cluster.queue.get(self.uid),
            surplus_reasons=cluster.surplus_reasons(self.uid),
            outdated_nodes=cluster.unable(written_version()),
            workers=cluster.workers,
            ranks=dependencies.ranks.views,
            engines=self.engines.views,
            judges={
                name: view for judge in self.spec.served_judges for name, view in self.judges[judge.name].views.items()
            },
            holdings=self.buffer.offers,
            outcomes=self.buffer.outcomes,
            in_flight=self.buffer.in_flight.versions(head.record) if head is not None else {},
            busy=bool(self.buffer.in_flight),
            under_way=self.actions.under_way(),
            saved=dependencies.ranks.saved,
            staged=self.staged.versions,
            fetched_starts=frozenset() if self.own_folder is None else frozenset(self.own_folder.brought),
            is_ordering=self.work.is_ordering,
            missing_input=self._missing_input,
            reward_pool=reward_pool,
            judge_pool=judge_pool,
            tool_pool=tool_pool,
            store_trouble=self._find_store_trouble(),
            rank_failures=self._rank_failures,
            failed_start=dependencies.launcher.failed_start(cluster.workers),
            proposal=self.work.proposal,
            move_report=self.work.move_report,
            remembered=self._memo,
            leaving=self._records.leaving,
        )


class JobWork:
    """The parts of a session that need the job's data: the flow and its peer, the reconciler, the planner. The
    constructor raises GcoreError."""

    def __init__(self, session: JobSession, data: JobData) -> None:
        dependencies, spec, clock = session.dependencies, data.spec, session.dependencies.clock
        self._session = session
        self._data = data
        self._flow = dependencies.find_flow(spec.flow.name)
        filters = find_filters(spec.flow.filters)
        episodes = new_episode_runner(
            spec, session.engines, session.episodes, clock, dependencies.errors.note, session.media
        )
        self._orders = CurriculumOrders.find(spec, data.stream, session.changes.notify)
        self._peer = JobPeer(
            data=data,
            look=session.look,
            changes=session.changes,
            engines=session.engines,
            buffer=session.buffer,
            evaluations=LedgerEvaluations(dependencies.ledger, lambda: session.mirror),
            clock=clock,
            stopwatch=dependencies.telemetry.stopwatch,
            orders=self._orders,
            filters=filters,
            collectives=session.collectives,
            faults=dependencies.errors,
            warnings=session.warnings,
            episodes=episodes,
            media=session.media,
        )
        self._reconciler = Reconciler(
            job=session,
            buffer=session.buffer,
            note_scoring=session.note_scoring,
            note_engines=session.note_engines,
            is_current=lambda: session.is_current,
            cluster=session.cluster,
            launcher=dependencies.launcher,
            pools=session.pools,
            ranks=dependencies.ranks,
            actions=session.actions,
            metrics=dependencies.metrics,
            clock=clock,
        )
        self._planner = Planner(session, spec, clock, session.run_dir, dependencies.connector)

    @property
    def is_ordering(self) -> bool:
        """Whether the prompt order of a curriculum is being computed."""
        return self._orders is not None and self._orders.arranging

    @property
    def is_held_back(self) -> bool:
        """Whether no prompts are started now because a judge's queue is full."""
        return self._data.is_held_back

    @property
    def proposal(self) -> MoveProposal | None:
        """The placement change that the policy has decided and that is not written yet; None: none."""
        return self._planner.proposal

    @property
    def move_report(self) -> MoveReport | None:
        """The results of earlier placement changes that are not written yet; None: none."""
        return self._planner.move_report

    def note(self, before: JobMirror, after: JobMirror) -> None:
        """Process a change of the job's records."""
        self._planner.note(before, after)

    async def run(self) -> None:
        """Run all parts concurrently until the job has ended or its settings have changed, then stop them in order."""
        session, dependencies = self._session, self._session.dependencies
        accounting = dependencies.telemetry.slot_accounting
        accounting_task = start_background_task(accounting.run(), f"books {session.uid}")
        try:
            async with asyncio.TaskGroup() as parts:
                work = {
                    "flow": session.flow.run(self._flow, self._peer),
                    "drive": self._reconciler.run(),
                    "staged": session.staged.run(),
                    "faults": dependencies.errors.run(),
                    "troubles": dependencies.warnings.run(),
                    "collectives": session.collectives.answer_others(),
                    "external": session.external.run(),
                } | ({"placement": self._planner.run()} if self._data.spec.placement.is_live else {})
                if session.media is not None:
                    work["media"] = session.media.run()
                    work["room"] = self._peer.make_room_for_ranks()
                if answers_of_a_step(self._data.spec):
                    work["unjudged"] = session.fail_unjudged()
                if dependencies.disk_gib is not None:
                    work["quota"] = self._quota(dependencies.disk_gib).run()
                tasks = [parts.create_task(one, name=f"{name} {session.uid}") for name, one in work.items()]
                await session.changes.until(lambda: session.mirror.has_ended or not session.is_current)
                for task in tasks:
                    task.cancel()
        finally:
            # Finished before the daemon stops the job's workers or this process ends.
            await cancel_all([accounting_task])
            await accounting.finish()
            # First of all, running publications are stopped, because they resume their engines.
            await session.actions.stop()
            await self._peer.close()
            for pool in session.pools.values():
                await pool.close()
            if self._orders is not None:
                await self._orders.close()
            if session.media is not None:
                await session.media.close(ended=session.mirror.has_ended)

    def _quota(self, disk_gib: float) -> DiskQuota:
        session = self._session

        def show(found: DiskUsage) -> None:
            session.recorder.samples.has_room = found.level is QuotaLevel.FREE
            session.warnings.note(f"{DISK_TOPIC}-{session.node}", found.sentence)

        async def pause() -> None:
            await change_claim(
                session.dependencies.store, session.uid, lambda claim: claim.model_copy(update={"paused": True})
            )

        clock = session.dependencies.clock
        return DiskQuota(session.run_dir, disk_gib, lambda: len(session.mirror.members), show, pause, clock)
