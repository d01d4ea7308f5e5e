"""The surroundings of a controller in the simulated cluster: production's session of a job, over simulated messages.

One life is one incarnation under one lease, as in `controllers.daemon.incarnation`, and `controllers.job.session` builds the job's parts as in the
daemon. Only the ends are simulated: prompts are generated, engines and ranks are those of `simulated_workers`, starting a worker
starts a simulated one, and no logs or samples are written.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from simulated_blobs import SimulatedStores
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
from simulated_pictures import picture_requests
from virtual_time import ProcessClock

from controllers.accounting.collector import AccountCollector
from controllers.changes import ChangeSignal
from controllers.flow.job_data import JobData, SourcePipeline, sampling_of
from controllers.identity import Identity
from controllers.job.preparation import Preparation
from controllers.job.session import JobDependencies
from controllers.rules.view import JobView, Timers
from controllers.storage.run_folder import (
    LocalRunFolder,
    LocalRunFolders,
    StagedWeightsMonitor,
    staged_versions,
)
from controllers.telemetry.run_recorder import JobTelemetry, RunRecorder
from gcore.api.tls import PLAIN
from gcore.config import JobSpec, NodeConfig
from gcore.config.spec import training_sources, uses_pictures
from gcore.data.stream import PromptStream
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobRecord
from gcore.reward.pool import DirectScorer
from gcore.reward.scorer import Scorer
from gcore.store.keys import JobKeys
from gcore.store.types import WatchBatch
from gcore.types import Version


class SilentAccounts(AccountCollector):
    """Nobody reads what slots did."""

    async def begin(self, *_: Any, **__: Any) -> None:
        """Nothing is read."""

    async def run(self) -> None:
        """Nothing is read."""

    async def finish(self) -> None:
        """Nothing is left."""


class SilentTelemetry(JobTelemetry):
    """Nobody reads it. Steps take as long as chance says where that decides something."""

    def __init__(self, store: RemoteStore, keys: JobKeys, identity: Identity, clock: ProcessClock, land: Land) -> None:
        connect: Any = None
        super().__init__(store, keys, identity, land.metrics, clock, connect, None)
        self.slot_accounting = SilentAccounts(
            store, keys, identity.node, identity.lease, land.metrics, clock, connect, _drop
        )
        self.events = cast(Any, SimpleNamespace(note=_drop))
        self._land = land

    def note(self, before: JobMirror, batch: WatchBatch, now: JobMirror) -> None:
        """Passed over."""

    def note_engines(self, view: JobView, busy: Collection[str], *, held_back: bool) -> None:
        """Passed over."""

    def stats(self, view: JobView) -> dict[str, float]:
        return {"seconds": 1.0 + self._land.chance.random()} if self._land.plans else {}


class SilentRecorder(RunRecorder):
    """Nothing is kept of the run. Its end takes as long as chance says."""

    finish_s = 0.0

    def begin(self) -> None:
        """Passed over."""

    def note(self, *_: Any) -> None:
        """Passed over."""

    async def finish(self) -> None:
        """Nothing is left."""
        await self._clock.sleep(self.finish_s)


class SimulatedStagedWeights(StagedWeightsMonitor):
    """Looks into the folder at once, in place of a thread."""

    def __init__(self, land: Land, node: str) -> None:
        self._land = land
        self._of = node

    @property
    def versions(self) -> frozenset[Version]:  # type: ignore[override]
        """Those that lie there now."""
        return self._land.floor.staged(staged_versions, self._of)

    async def run(self) -> None:
        """Nothing to wait for."""


class SimulatedFolders(LocalRunFolders):
    """One node's, whose files come over the simulated network."""

    def __init__(self, files: SimulatedFiles) -> None:
        super().__init__()
        self._own = LocalRunFolder(files)

    def of(self, uid: str, run_dir: Path) -> LocalRunFolder:
        return self._own


def _drop(*_: Any, **__: Any) -> None:
    """Report nothing."""


def simulated_dependencies(
    uid: str,
    identity: Identity,
    store: RemoteStore,
    changes: ChangeSignal,
    clock: ProcessClock,
    land: Land,
    timers: Timers,
    config: NodeConfig,
) -> JobDependencies:
    """What one job's controller reaches in the simulated cluster."""
    keys, node = JobKeys(uid), identity.node

    def connect(url: str, *, timeout_s: float, instance: str) -> Any:
        return SimulatedClient(node, land.floor.engines[url.removeprefix("http://")], land)

    async def prepare(preparation: Preparation, spec: JobSpec, job: JobRecord) -> JobData:
        return _job_data(spec, uid)

    def new_recorder(look: Any) -> RunRecorder:
        recorder = SilentRecorder(identity, Path(config.home), store, keys, look, changes, clock)
        recorder.finish_s = 2.0 * land.chance.random()
        return recorder

    return JobDependencies(
        store=store,
        ledger=TellingLedger(store, keys, identity.incarnation, land.floor.tell),
        clock=clock,
        metrics=land.metrics,
        connector=PLAIN,
        connect_engine=connect,
        launcher=SimulatedStaff(config, clock, land),
        ranks=SimulatedLinks(clock, changes.notify, node, land),
        telemetry=SilentTelemetry(store, keys, identity, clock, land),
        warnings=SilentTroubles(store, keys, node, clock),
        errors=SilentFaults(store, keys, node),
        folders=SimulatedFolders(SimulatedFiles(land.floor, node, land.serves, identity.incarnation)),
        memory_dir=None,
        blobs=cast(Any, SimulatedStores(node, node, land.floor.stores)),
        cache_dir=Path(config.home) / "cache",
        disk_gib=None,
        new_recorder=new_recorder,
        run_root=Path(config.run_root),
        folder_loss=lambda run_dir: "",
        group_of_job=str,
        timers=timers,
        prepare=prepare,
        find_flow=lambda name: flow(land),
        new_staged_weights=lambda *_: SimulatedStagedWeights(land, node),
    )


def _job_data(spec: JobSpec, uid: str) -> JobData:
    # Of a stream it is what a peer asks of it.
    stream = cast(PromptStream, Stream(pictures=uses_pictures(spec)))
    (source,) = training_sources(spec)
    # Nobody asks the judges anything.
    judges: dict[str, Any] = {
        judge.name: SimpleNamespace(forget=lambda _: None, is_full=False) for judge in spec.served_judges
    }
    pipeline = SourcePipeline(source, sampling_of(spec, source), Scorer(DirectScorer(), judges))
    # What a filter looks at is not made here.
    spec = spec.model_copy(update={"flow": spec.flow.model_copy(update={"filters": ()})})
    return JobData(spec, uid, stream, {SOURCE: pipeline}, evaluation=(), evaluated={}, pictures=picture_requests(spec))
