"""One job on one controller, for one incarnation: watch → view → decide → apply, and the flow beside it.

How it stands is `controllers.standing`'s. The mirror is fed by a watch; a driver (`controllers.driving`) decides at every change and carries out what is ripe; the flow
(`controllers.producing`) produces. They meet in `Changes` and in the view, never in each other. When the incarnation ends, all of it is thrown away.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from controllers import quitting, quota
from controllers.acting import Worlds, new_responding, new_worlds
from controllers.changes import Changes
from controllers.chronicle import Chronicle
from controllers.cluster import ClusterMirror
from controllers.collectives import Collectives
from controllers.conversing import Responding
from controllers.deeds import Deeds
from controllers.driving import Driver
from controllers.engine_waits import Idle
from controllers.engines import EngineBook
from controllers.eval_book import StoredEvaluations
from controllers.external_judges import ExternalJudges
from controllers.faults import FaultBook
from controllers.hands import Hands
from controllers.identity import Identity
from controllers.job_groups import JobGroups
from controllers.judge_counts import JudgeCounts
from controllers.judge_engines import JudgeEngines
from controllers.judges import open_judges
from controllers.material import rewards_of
from controllers.ordering import EpochOrders
from controllers.own_files import OwnFolder, OwnFolders
from controllers.peer import JobPeer
from controllers.planner import Planner
from controllers.polling import own_loads
from controllers.preparing import Preparation
from controllers.producing import Producing
from controllers.pulse import EnginePatience
from controllers.quota import RunQuota
from controllers.ranks import RankLinks
from controllers.reading import Reading, beside
from controllers.service.events import by_revision
from controllers.sharing import change_claim
from controllers.staff import Staff
from controllers.staged import NOTHING_STAGED, StagedWeights
from controllers.standing import JobStanding
from controllers.storage import away, is_apart, seen_here
from controllers.telling import telling
from controllers.troubles import TroubleBook
from controllers.turns import Waits
from controllers.using import UsageBook
from controllers.view import EngineView
from gcore import logs
from gcore.api.v1.placement_pb2 import LoadsReply
from gcore.clock import Clock
from gcore.config import JobSpec, NodeConfig, stored_spec
from gcore.errors import GcoreError
from gcore.flows import find_filters, find_flow
from gcore.ledger.guarded import Ledger
from gcore.metrics import Metrics
from gcore.otel import StepTraces
from gcore.reward.pool import RewardPool
from gcore.reward.scoring import Scorer
from gcore.rollout.reaching import reach_by
from gcore.store.types import Store, WatchBatch
from gcore.tls.connecting import PLAIN, Connector
from gcore.together import end_all
from gcore.types import Version
from placement.moves import Accounted, Proposal


class JobRunner(JobStanding):
    """Runs one job until it has ended, or the incarnation has."""

    def __init__(
        self,
        uid: str,
        identity: Identity,
        store: Store,
        cluster: ClusterMirror,
        changes: Changes,
        metrics: Metrics,
        clock: Clock,
        config: NodeConfig,
        folders: OwnFolders | None = None,
        connector: Connector = PLAIN,
        groups: JobGroups | None = None,
        traces: StepTraces | None = None,
    ) -> None:
        """`folders`: this node's own folders of runs, for jobs whose nodes share none; None: nobody else reads them. `traces`: where steps
        are told as spans; None: nowhere."""
        super().__init__(uid, identity, cluster, changes)
        self._run_root = Path(config.run_root)
        self._folders = folders or OwnFolders(connector)
        self._connector = connector
        self._reach = reach_by(connector)
        self._store = store
        self._metrics = metrics
        self._clock = clock
        self._cache_dir = Path(config.home) / "cache"
        self._staff = Staff(config, clock, connector, groups)
        self._groups = groups
        self._disk_gib = config.limits.disk_gib
        self.chronicle = Chronicle(store, self.keys, identity, metrics, clock, self._reach, traces)
        self._faults = FaultBook(store, self.keys, identity.node)
        self.troubles = TroubleBook(store, self.keys, identity.node, clock)
        self._rewards: RewardPool | None = None
        self._worlds: Worlds | None = None
        self._judge_engines: JudgeEngines | None = None
        self._external_judges: ExternalJudges | None = None
        self._judge_counts = JudgeCounts(metrics, lambda topic, said: self.troubles.note(f"{topic}-{self.node}", said))
        self._staged_weights: StagedWeights | None = None
        self.closed = False
        """Whether nothing more will be heard here."""
        self._held_back: Callable[[], bool] = lambda: False
        self.waits = Waits({})
        self._ranks = RankLinks(clock, changes.notify, connector)
        self._deeds = Deeds(self, metrics, clock)
        home = Path(config.home)
        self._reading = Reading(identity, home, store, self.keys, lambda: self.mirror, changes, clock)
        self._orders: EpochOrders | None = None
        self._planner: Planner | None = None

    async def withdraw(self) -> None:
        """Be no member of a job that cannot be worked on here."""
        await quitting.withdraw(self._store, self.keys, self._identity, self._clock)

    async def end_left(self, reason: str) -> None:
        """End the job as failed, if nobody works on it any more."""
        await quitting.end_left(self._store, self.keys, self._clock, reason)

    async def run(self) -> None:
        """Until the job has ended."""
        logs.about(lambda: self.chronicle.about)
        watching = asyncio.create_task(self._watch(), name=f"watch {self.uid}")
        try:
            while self.mirror.job is None or self.mirror.status is None:
                await self._unless(watching, self.changes.wait())
            if not self.mirror.status.record.phase.ended:
                self._reading.begin()
                await self._unless(watching, self._work())
            if self.mirror.status.record.phase.ended:
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
        for one in by_revision(batch):
            so_far = self.mirror
            self.mirror = seen_here(so_far.fold(one), self._run_root)
            self.chronicle.events.note(so_far, one, self.mirror, wall)
        for key in self.mirror.unreadable.keys() - before.unreadable.keys():
            sentence = f"{self.mirror.unreadable[key].why}; it is as if it were not there"
            self.troubles.note(f"record-{self.node}", sentence)
        self._reading.note(self.mirror, self.holdings)
        self._prune(before)
        self.chronicle.note(before, batch, self.mirror)
        if self._planner is not None:
            self._planner.note(before, self.mirror)

    async def _work(self) -> None:
        assert self.mirror.job is not None
        spec = stored_spec(self.mirror.job.record.spec)
        rollout = spec.rollout
        patience = EnginePatience(rollout.silent_s, rollout.watchdog_s, rollout.timeout_s)
        self._engines = EngineBook(
            self.changes,
            rollout.timeout_s,
            self._reach,
            clock=self._clock,
            patience=patience,
            metrics=self._metrics,
            told_every=rollout.told_every,
            rows=rollout.batch_slots,
        )
        self._judge_engines = JudgeEngines(
            spec, self.uid, self.me, self.changes, self._clock, self._metrics, self._reach
        )
        self._external_judges = self._new_external(spec)
        self._spec = spec
        self._rules = self._rules_or_none()
        self.is_working = True
        head = self.mirror.head.record.version if self.mirror.head is not None else None
        job = self.mirror.job.record
        usage = UsageBook(self._store, job, self.node, self._clock)
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
        worlds = self._worlds = new_worlds(spec, self._clock, self._faults.note, group)
        try:
            await self._work_on(spec, rewards, worlds)
        finally:
            await self._external_judges.close()
            await rewards.close()
            if worlds is not None:
                await worlds.close()

    async def _work_on(self, spec: JobSpec, rewards: RewardPool, worlds: Worlds | None) -> None:
        assert self.mirror.job is not None
        producing = Producing(self, self._faults, self._clock)
        try:
            async with telling(self, self._metrics, self._clock):
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
            orders = self._orders = EpochOrders(spec, material.stream, self.changes.notify)
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
            StoredEvaluations(Ledger(self._store, self.keys), lambda: self.mirror),
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
        driver = Driver(
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
        books = beside(self.chronicle.booking.run(), f"books {self.uid}")
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
            await end_all([books])
            await self.chronicle.booking.finish()
            # First of all what is being published: it lets its engine go on.
            await self._deeds.stop()
            await peer.close()
            await self._engines.close()
            await self._judge_engines.close()
            await orders.close()

    def _preparation(self, scorer: Scorer) -> Preparation:
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
            idle = Idle.of(view, self._engines.busy, self.chronicle.booking.stage)
            self.chronicle.stopwatch.engines.note(idle, self._clock.monotonic())

    def _judge_views(self) -> Mapping[str, EngineView]:
        return {} if self._judge_engines is None else self._judge_engines.views

    def _staged(self) -> frozenset[Version]:
        return NOTHING_STAGED if self._staged_weights is None else self._staged_weights.versions

    def _new_staged(self, run_dir: Path) -> StagedWeights:
        def wanted() -> Version | None:
            return None if self.mirror.head is None else self.mirror.head.record.version

        return StagedWeights(
            run_dir, self.node, wanted, self.changes, self.troubles.hold, self.changes.notify, self._clock
        )

    def _new_responding(self, spec: JobSpec, worlds: Worlds | None) -> Responding | None:
        """Of a job with an environment, or an agent. Raises PluginFault."""
        return new_responding(spec, self._engines, worlds, self._clock, self._faults.note)

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

    def _proposed(self) -> tuple[Proposal | None, Accounted | None]:
        return (None, None) if self._planner is None else (self._planner.proposal, self._planner.account)

    async def loads(self) -> LoadsReply:
        """What the engines that this controller sees to have to do."""
        return await own_loads(self.look(), self._engines, self._judge_engines)

    def _is_arranging(self) -> bool:
        return self._orders is not None and self._orders.arranging

    def hands(self) -> Hands:
        """What this job's actions are carried out with."""
        assert self.mirror.job is not None
        run_dir = Path(self.mirror.job.record.run_dir)
        return Hands(
            store=self._store,
            ledger=Ledger(self._store, self.keys),
            lease=self._identity.lease,
            address=self._identity.address,
            ranks=self._ranks,
            engines=self._engines,
            holdings=self.holdings,
            clock=self._clock,
            stats=self.chronicle.stats,
            tell=self.troubles.hold,
            run_dir=run_dir,
            away=partial(away, run_dir, self.node),
            own=self._own_folder(),
            memory_dir=self._staff.memory_dir(self.uid),
            judges=self._judge_engines,
        )

    def _quota(self, run_dir: Path, disk_gib: float) -> RunQuota:
        def show(found: quota.Standing) -> None:
            self._reading.samples.has_room = found.level is quota.Level.FREE
            self.troubles.note(f"{quota.TOPIC}-{self.node}", found.sentence)

        return RunQuota(run_dir, disk_gib, lambda: len(self.mirror.members), show, self._pause, self._clock)

    async def _pause(self) -> None:
        await change_claim(self._store, self.uid, lambda claim: claim.model_copy(update={"paused": True}))

    def _group(self) -> str:
        return "" if self._groups is None else self._groups.group_of(self.uid)

    def _own_folder(self) -> OwnFolder | None:
        assert self.mirror.job is not None
        job = self.mirror.job.record
        return self._folders.of(job.uid, Path(job.run_dir)) if is_apart(job) else None

    def _brought(self) -> frozenset[str]:
        own = self._own_folder()
        return frozenset() if own is None else frozenset(own.brought)
