"""A controller of the simulated cluster: production's driver, deeds, decisions, peer and session over simulated messages.

One life is one incarnation under one lease, as in `controllers.life`; what a job's controller is made of is what
`controllers.job` makes it of. Simulated are only the ends: prompts come from nowhere, engines and ranks are those of
`simulated_workers`, and starting a worker starts a simulated one. Nothing here decides, seals or commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from simulated_ends import (
    SOURCE,
    Land,
    SilentFaults,
    SilentTroubles,
    SimulatedClient,
    SimulatedLinks,
    SimulatedStaff,
    Stream,
    TellingLedger,
    flow,
)
from simulated_files import SimulatedFiles
from simulated_network import RemoteStore
from virtual_time import ProcessClock

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.flow.evaluation import LedgerEvaluations
from controllers.flow.job_data import CurriculumOrders, JobData, SourcePipeline, sampling_of
from controllers.flow.peer import JobPeer
from controllers.flow.step import Collectives
from controllers.identity import Identity
from controllers.inference.judge_engines import JudgePools
from controllers.inference.pool import EnginePool
from controllers.inference.rules import HealthLimits
from controllers.job.effects import Effects
from controllers.job.reconciler import ActionsInFlight, Reconciler
from controllers.job.runner import FlowRunner, JobRunner
from controllers.planning.planner import Planner
from controllers.rules.view import EngineView, Timers
from controllers.storage.replication import Replicator
from controllers.storage.run_folder import LocalRunFolder, staged_versions
from controllers.telemetry.notices import WarningLog
from controllers.telemetry.step_stats import StepTimer
from gcore.config import NodeConfig
from gcore.config.spec import training_sources
from gcore.data.stream import PromptStream
from gcore.ledger.selection import rules_of
from gcore.reward.pool import DirectScorer
from gcore.reward.scorer import Scorer
from gcore.types import Version
from placement.moves import MoveProposal, MoveReport


def _tell_nobody(topic: str, sentence: str) -> None:
    """Nobody reads what a simulated disk does not take."""


class SimulatedJob(JobRunner):
    """The job on one controller, for one incarnation (`controllers.job`)."""

    def __init__(
        self,
        identity: Identity,
        store: RemoteStore,
        cluster: ClusterMirror,
        clock: ProcessClock,
        land: Land,
        waits: Timers,
        config: NodeConfig,
    ) -> None:
        super().__init__(land.uid, identity, cluster, ChangeSignal())
        self._spec = land.spec
        self.waits = waits
        self._store = store
        self._clock = clock
        self._land = land
        self._faults = SilentFaults(store, self.keys, identity.node)
        self.troubles: WarningLog = SilentTroubles(store, self.keys, identity.node, clock)
        self._own: LocalRunFolder | None = None
        if land.spec.storage.copies is not None:
            self._own = LocalRunFolder(SimulatedFiles(land.floor, identity.node, land.serves, identity.incarnation))
        self._staff = SimulatedStaff(config, clock, land)
        self._ranks = SimulatedLinks(clock, self.changes.notify, identity.node, land)
        rollout = land.spec.rollout
        patience = HealthLimits(rollout.silent_s, rollout.watchdog_s, rollout.timeout_s)
        self._engines = EnginePool(
            self.changes, rollout.timeout_s, self._connect, clock=clock, patience=patience, rows=1
        )
        self._judge_engines = JudgePools(
            self._spec, self.uid, self.me, self.changes, clock, land.metrics, self._connect
        )
        self._planner: Planner | None = None
        self._deeds = ActionsInFlight(self, land.metrics, clock)

    async def run(self) -> None:
        """Until the job has ended, or this life has."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            await self.changes.until(lambda: self.mirror.job is not None and self.mirror.status is not None)
            if not self._ended():
                await self._work()
            watching.cancel()

    async def _work(self) -> None:
        assert self.mirror.job is not None
        self._rules = rules_of(self.mirror.job.record)
        self.is_working = True
        driver = Reconciler(
            self,
            self._cluster,
            self._staff,
            self._engines,
            self._judge_engines,
            self._ranks,
            self._deeds,
            self._land.metrics,
            self._clock,
        )
        peer = self._peer()
        if self._land.plans:
            self._planner = Planner(self, self._spec, self._clock, self._land.floor.folder(self.node))
        producing = FlowRunner(self, self._faults, self._clock)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(driver.run(), name="drive"),
                    group.create_task(producing.run(flow(self._land), peer), name="flow"),
                ]
                if self._planner is not None:
                    tasks.append(group.create_task(self._planner.run(), name="planning"))
                await self.changes.until(self._ended)
                for task in tasks:
                    task.cancel()
        finally:
            await self._deeds.stop()
            await peer.close()
            await self._engines.close()
            await self._judge_engines.close()
            self._ranks.aim(None, {})

    def _peer(self) -> JobPeer:
        spec = self._land.spec
        # Of a stream it is what a peer asks of it.
        stream = cast(PromptStream, Stream())
        (source,) = training_sources(spec)
        # Nobody asks the judges anything.
        judges: dict[str, Any] = {
            judge.name: SimpleNamespace(forget=lambda _: None, is_full=False) for judge in spec.served_judges
        }
        practice = SourcePipeline(source, sampling_of(spec, source), Scorer(DirectScorer(), judges))
        material = JobData(spec, self.uid, stream, {SOURCE: practice}, evaluation=(), evaluated={})
        collectives = Collectives(
            self._store, lambda: self.mirror, self.me, self._identity.lease, self.changes, self._clock
        )
        return JobPeer(
            material,
            self.look,
            self.changes,
            self._engines,
            self.holdings,
            LedgerEvaluations(self._ledger(), lambda: self.mirror),
            self._clock,
            StepTimer(),
            CurriculumOrders(spec, stream, self.changes.notify),
            (),
            collectives,
            self._faults,
        )

    async def _watch(self) -> None:
        async for batch in self._store.watch(self.mirror.keys.prefix):
            before = self.mirror
            self.mirror = before.fold(batch)
            self._prune(before)
            if self._planner is not None:
                self._planner.note(before, self.mirror)
            self.changes.notify()

    def _connect(self, url: str, *, timeout_s: float, instance: str) -> Any:
        return SimulatedClient(self._identity.node, self._land.floor.engines[url.removeprefix("http://")], self._land)

    def _judge_views(self) -> Mapping[str, EngineView]:
        return self._judge_engines.views

    def _proposed(self) -> tuple[MoveProposal | None, MoveReport | None]:
        return (None, None) if self._planner is None else (self._planner.proposal, self._planner.account)

    def note_scoring(self) -> None:
        """There are no rewards."""

    def note_engines(self) -> None:
        """Nobody looks at it."""

    def _staged(self) -> frozenset[Version]:
        return self._land.floor.staged(staged_versions, self.node)

    def _brought(self) -> frozenset[str]:
        return frozenset() if self._own is None else frozenset(self._own.brought)

    def _ledger(self) -> TellingLedger:
        return TellingLedger(self._store, self.mirror.keys, self.me, self._land.floor.tell)

    def hands(self) -> Effects:
        """What actions are carried out with."""
        ledger, run_dir, lease = self._ledger(), self._land.floor.folder(self.node), self._identity.lease
        replicator: Replicator | None = None
        if self._own is not None:
            replicator = Replicator(self._store, ledger, lease, self._clock, run_dir, _tell_nobody, self._own)
        return Effects(
            store=self._store,
            ledger=ledger,
            lease=lease,
            address=self._identity.address,
            ranks=self._ranks,
            engines=self._engines,
            judges=self._judge_engines,
            holdings=self.holdings,
            clock=self._clock,
            stats=lambda view: {"seconds": 1.0 + self._land.chance.random()} if self._land.plans else {},
            run_dir=run_dir,
            replicator=replicator,
        )
