"""A controller of the simulated cluster: production's driver, deeds, decisions, peer and session over simulated messages.

One life is one incarnation under one lease, as in `controllers.wire`; what a job's controller is made of is what
`controllers.job` makes it of. Simulated are only the ends: prompts come from nowhere, engines and ranks are those of
`simulated_workers`, and starting a worker starts a simulated one. Nothing here decides, seals or commits.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simulated_ends import (
    SOURCE,
    InOrder,
    Land,
    Silent,
    SimulatedClient,
    SimulatedLinks,
    SimulatedStaff,
    Stream,
    TellingLedger,
    flow,
)
from simulated_network import RemoteStore
from virtual_time import ProcessClock

from controllers.changes import Changes
from controllers.cluster import ClusterMirror
from controllers.collectives import Collectives
from controllers.deeds import Deeds
from controllers.driving import Driver
from controllers.engines import EngineBook
from controllers.hands import Hands
from controllers.identity import Identity
from controllers.peer import JobPeer
from controllers.producing import Producing
from controllers.pulse import EnginePatience
from controllers.staged import staged_versions
from controllers.standing import JobStanding
from controllers.turns import Waits
from gcore.config import NodeConfig
from gcore.ledger.rules import rules_of
from gcore.rollout.client import SamplingParams
from gcore.types import Version


class SimulatedJob(JobStanding):
    """The job on one controller, for one incarnation (`controllers.job`)."""

    def __init__(
        self,
        identity: Identity,
        store: RemoteStore,
        cluster: ClusterMirror,
        clock: ProcessClock,
        land: Land,
        waits: Waits,
        config: NodeConfig,
    ) -> None:
        super().__init__(land.uid, identity, cluster, Changes())
        self._spec = land.spec
        self.waits = waits
        self._store = store
        self._clock = clock
        self._land = land
        self.troubles = Silent()
        self._staff = SimulatedStaff(config, clock, land)
        self._ranks = SimulatedLinks(clock, self.changes.notify, identity.node, land)
        rollout = land.spec.rollout
        patience = EnginePatience(rollout.silent_s, rollout.watchdog_s, rollout.timeout_s)
        self._engines = EngineBook(self.changes, rollout.timeout_s, self._connect, clock=clock, patience=patience)
        self._deeds = Deeds(self, land.metrics, clock)

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
        driver = Driver(
            self,
            self._cluster,
            self._staff,
            self._engines,
            self._ranks,
            self._deeds,
            self._land.metrics,
            self._clock,
        )
        peer = self._peer()
        producing = Producing(self, Silent(), self._clock)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(driver.run(), name="drive"),
                    group.create_task(producing.run(flow(self._land), peer), name="flow"),
                ]
                await self.changes.until(self._ended)
                for task in tasks:
                    task.cancel()
        finally:
            self._deeds.cancel()
            await peer.close()
            await self._engines.close()
            self._ranks.aim(None, {})

    def _peer(self) -> JobPeer:
        params = SamplingParams(temperature=1.0, max_new_tokens=4)
        sources = {SOURCE: SimpleNamespace(params=params)}
        material = SimpleNamespace(
            spec=self._land.spec, uid=self.uid, stream=Stream(), sources=sources, evaluation=(), evaluated={}
        )
        collectives = Collectives(
            self._store, lambda: self.mirror, self.me, self._identity.lease, self.changes, self._clock
        )
        watch = SimpleNamespace(produced=lambda now: None)
        return JobPeer(
            material,
            self.look,
            self.changes,
            self._engines,
            self.holdings,
            None,
            self._clock,
            watch,
            InOrder(),
            (),
            collectives,
            Silent(),
        )

    async def _watch(self) -> None:
        async for batch in self._store.watch(self.mirror.keys.prefix):
            before = self.mirror
            self.mirror = before.fold(batch)
            self._prune(before)
            self.changes.notify()

    def _connect(self, url: str, timeout_s: float) -> Any:
        return SimulatedClient(self._identity.node, self._land.floor.engines[url.removeprefix("http://")], self._land)

    def note_scoring(self) -> None:
        """There are no rewards."""

    def _staged(self) -> frozenset[Version]:
        return self._land.floor.staged(staged_versions)

    def hands(self) -> Hands:
        """What actions are carried out with."""
        return Hands(
            store=self._store,
            ledger=TellingLedger(self._store, self.mirror.keys, self.me, self._land.floor.tell),
            lease=self._identity.lease,
            address=self._identity.address,
            ranks=self._ranks,
            engines=self._engines,
            holdings=self.holdings,
            clock=self._clock,
            stats=lambda view: {},
            run_dir=Path(self._land.floor.run_dir),
        )
