"""One incarnation of a daemon: what it does from the grant of a lease in the store until the lease is lost.

`Incarnation` registers its node (`controllers.cluster.registration`), watches the other nodes and the unfinished jobs,
and runs a runner for each job that has slots. `DaemonState` is the state that a daemon keeps across incarnations.
Modules that only jobs need (data, tokenizers, engine clients) are imported with the first job, in a thread. So a daemon
without a job is small and starts fast, and its lease is renewed during the import.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.cluster.registration import NodeFactsReader, NodeRegistration, raise_version
from controllers.cluster.shares import ShareWriter
from controllers.cluster.slot_health import SlotHealth
from controllers.identity import Identity, new_incarnation
from controllers.job.supervision import work_on_job
from controllers.storage.run_folder import LocalRunFolders
from controllers.workers.blobs import NodeBlobs
from gcore.api.tls import PLAIN, Connector
from gcore.config.node import NodeConfig
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.ledger.records.cluster import Claim, Shares, slots_of_share
from gcore.ledger.records.job import NodeRecord
from gcore.ledger.transactions import Versioned
from gcore.models.replicas import sweep_memory
from gcore.observability.metrics import Metrics
from gcore.observability.tracing import StepTraces
from gcore.store.keys import full_name
from gcore.store.session import Session
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.memory import trim_memory
from gcore.system.process import send_signal
from gcore.worker.control_groups import JobGroups
from gcore.worker.records import WorkerRecord

if TYPE_CHECKING:
    from controllers.job.runner import JobRunner

_ONE_IMPORT = threading.Lock()

log = logging.getLogger(__name__)

RETRY_S = 0.5


class Incarnation:
    """A daemon under one lease. `own`: the state that outlives the lease. `addresses`: registered for other nodes and
    users. `ready`: called whenever it changes whether the daemon can work, with that and a sentence: it can while its
    lease is certainly valid and its node is registered."""

    def __init__(
        self,
        own: DaemonState,
        store: Store,
        addresses: Addresses,
        ready: Callable[[bool, str], Awaitable[None]],
    ) -> None:
        self._own = own
        self._config = own.config
        self._clock = own.clock
        self._store = store
        self._addresses = addresses
        self._ready = ready
        self._changes = ChangeSignal()
        self._cluster = own.cluster = ClusterMirror(store, self._changes)
        self._shown: tuple[object, object] = (None, None)
        """The claims and shares that the metrics show at present."""

    async def run(self) -> None:
        """Get a lease, and run under it until it is lost. Return at once if it is not granted."""
        try:
            lease = self._config.lease_times
            session = await Session.open(self._store, ttl=lease.ttl_s, interval_s=lease.tick_s, clock=self._clock)
        except StoreUnavailable as error:
            log.warning("%s", error)
            await self._ready(False, f"waiting for the store: {error}")
            await self._clock.sleep(RETRY_S)
            return
        node, at = self._config.node, self._addresses
        identity = Identity(node, new_incarnation(node), at.people, session.lease, at.peers)
        log.info("%s starts", identity.incarnation)
        own, cluster = self._own, self._cluster
        own.metrics.lives.inc()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(session.run(), name="lease")
                for prefix, watch in cluster.watches.items():
                    group.create_task(watch(), name=f"watch {prefix}")
                group.create_task(self._speak(), name="schema version")
                sharing = ShareWriter(self._config.node, self._store, cluster, self._changes, self._clock)
                group.create_task(sharing.run(), name="shares")
                registration = NodeRegistration(
                    own.config,
                    own.health,
                    own.facts,
                    self._is_version_agreed,
                    self._clock,
                    self._store,
                    identity,
                    at.metrics,
                    own.blobs.address,
                    self._changes,
                    session,
                    self._ready,
                )
                group.create_task(registration.run(), name="register")
                group.create_task(registration.watch_readiness(), name="readiness")
                group.create_task(own.health.run(cluster, self._changes), name="slots")
                group.create_task(self._run_jobs(identity), name="jobs")
        except* LeaseLost:
            log.warning("%s lost its lease; starting a new incarnation", identity.incarnation)
        finally:
            self._own.runners.clear()
            await self._ready(False, "has no lease")
            # After a clean end, peers need not wait until the lease expires.
            with contextlib.suppress(StoreUnavailable):
                await session.close()

    def _is_version_agreed(self) -> bool:
        return self._own.spoken > 0

    async def _speak(self) -> None:
        """Whenever all nodes can read a newer schema version, write that version from then on; never returns."""
        own, cluster, store, changes = self._own, self._cluster, self._store, self._changes
        while True:
            own.spoken = await raise_version(own.spoken, self._config.node, cluster, store, changes, self._clock)
            changes.notify()

    async def _run_jobs(self, identity: Identity) -> None:
        """Run a runner for every job that needs one, and stop this node's workers of jobs that have ended; never
        returns."""
        cluster = self._cluster
        # Before the workers are known, a job would seem to have lost all of them.
        await self._changes.until(lambda: cluster.is_complete and self._is_version_agreed())
        running: dict[str, asyncio.Task[None]] = {}
        asked: set[str] = set()
        swept: frozenset[str] | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                seen = self._changes.count
                self._forget_ended(running)
                self._show()
                due = cluster.working - running.keys()
                if due:
                    await import_in_thread("controllers.job.runner")
                for uid in due:
                    begin = functools.partial(self._begin, uid, identity)
                    is_active = functools.partial(self._is_active, uid)
                    running[uid] = group.create_task(work_on_job(begin, is_active, self._changes), name=f"job {uid}")
                    running[uid].add_done_callback(lambda _: self._changes.notify())
                for runner in self._own.runners.values():
                    runner.changes.notify()
                self._sweep(asked)
                if swept != cluster.active:
                    swept = cluster.active
                    memory = Path(self._config.memory_dir)
                    await asyncio.to_thread(sweep_memory, memory, self._config.home, self._config.node, swept)
                    await asyncio.to_thread(self._own.groups.sweep, swept)
                    await self._own.blobs.forget_ended(swept)
                if self._changes.count == seen:  # otherwise something changed during the thread calls
                    await self._changes.wait()

    # Separate methods, because a variable of the loop above would keep the last job's memory alive.

    def _begin(self, uid: str, identity: Identity) -> JobRunner:
        new = self._own.runners[uid] = self._new_runner(uid, identity)
        return new

    def _new_runner(self, uid: str, identity: Identity) -> JobRunner:
        from controllers.job.runner import JobRunner, make_dependencies

        own, changes = self._own, ChangeSignal()
        needs = make_dependencies(
            uid,
            identity,
            self._store,
            changes,
            own.metrics,
            self._clock,
            self._config,
            own.folders,
            own.connector,
            groups=own.groups,
            blobs=own.blobs,
            traces=own.traces,
            released=self._changes.notify,
        )
        return JobRunner(uid, identity, self._cluster, changes, needs)

    def _is_active(self, uid: str) -> bool:
        return uid in self._cluster.active

    def _goes_on(self, uid: str) -> bool:
        """Whether a job was extended after the end that its runner saw, because its claim on slots is newer than that
        end."""
        runner = self._own.runners.get(uid)
        status = None if runner is None else runner.mirror.status
        return status is not None and self._cluster.claimed.get(uid, 0) > status.revision

    def _show(self) -> None:
        cluster = self._cluster
        mine = [worker for worker in cluster.workers.values() if worker.node == self._config.node]
        self._own.metrics.show_cluster(len(cluster.nodes), Counter((worker.role, worker.state) for worker in mine))
        self._own.metrics.show_slots(len(self._config.slots), len(self._own.health.sick))
        if self._shown[0] is not cluster.claims or self._shown[1] is not cluster.shares:
            self._shown = cluster.claims, cluster.shares
            self._own.metrics.show_jobs(*job_counts(cluster.claims, cluster.working, cluster.shares))

    def _forget_ended(self, running: dict[str, asyncio.Task[None]]) -> None:
        done = (uid for uid, task in running.items() if task.done())
        ended = [uid for uid in done if not self._is_active(uid) or self._goes_on(uid)]
        for uid in ended:
            del running[uid]
            self._own.runners.pop(uid, None)
        if ended:
            trim_memory()

    def _sweep(self, asked: set[str]) -> None:
        """Stop this node's workers of jobs that have ended. `asked`: those that got the signal already; a second signal
        would prevent draining."""
        needed = {uid for uid, runner in self._own.runners.items() if runner.needs_workers}
        asked &= self._cluster.workers.keys()
        for worker in unneeded_workers(self._cluster.workers, self._config.node, self._cluster.active | needed):
            if worker.instance not in asked:
                asked.add(worker.instance)
                log.info("stopping %s: its job has ended", worker.instance)
                send_signal(worker.process, signal.SIGTERM)


def unneeded_workers(workers: Mapping[str, WorkerRecord], node: str, jobs: Collection[str]) -> Iterator[WorkerRecord]:
    """The node's starting or serving workers that belong to none of the `jobs`."""
    for worker in workers.values():
        if worker.node == node and worker.job_uid not in jobs and worker.state in ("starting", "serving"):
            yield worker


@dataclass
class DaemonState:
    """The state that a daemon keeps from one incarnation to the next."""

    config: NodeConfig
    clock: Clock
    metrics: Metrics = field(default_factory=Metrics)
    connector: Connector = PLAIN
    """Connects to other daemons."""
    folders: LocalRunFolders = field(init=False)
    runners: dict[str, JobRunner] = field(default_factory=dict)
    """The runners of the jobs that this daemon works on, by job ID."""
    cluster: ClusterMirror | None = None
    """The cluster mirror of this or the last incarnation; None before the first."""
    spoken: int = 0
    """The schema version in which this process writes records; 0: not determined yet."""
    facts: NodeFactsReader = field(init=False)
    """Reads the hardware facts of the node."""
    health: SlotHealth = field(init=False)
    """Tracks which of the node's slots are unhealthy."""
    groups: JobGroups = field(init=False)
    """The control groups of the jobs' processes."""
    blobs: NodeBlobs = field(init=False)
    """The blob store of the node."""
    traces: StepTraces | None = field(init=False)
    """Exports steps as spans; None: no export."""

    def __post_init__(self) -> None:
        self.traces = None if self.config.collector is None else StepTraces(self.config.collector, self.config.node)
        self.folders = LocalRunFolders(self.connector)
        self.facts = NodeFactsReader(self.config)
        self.health = SlotHealth(self.config.node, self.config.slots, self.clock)
        self.groups = JobGroups(self.config.limits)
        self.blobs = NodeBlobs(self.config, self.clock, self._nodes, self.metrics, self.connector)

    def _nodes(self) -> Mapping[str, NodeRecord]:
        return {} if self.cluster is None else self.cluster.nodes


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a daemon, each as host:port: for users, for metrics, and for other nodes (`peers` empty: the
    same as for users)."""

    people: str
    metrics: str
    peers: str = ""


def job_counts(
    claims: Mapping[str, Claim], working: Collection[str], shares: Versioned[Shares] | None
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Count the unfinished jobs by state (running, paused, queued), and the slots by job, for metrics. `working`: IDs
    of the jobs that have a runner."""
    states = Counter(_state(claim, works=uid in working) for uid, claim in claims.items())
    shared = {} if shares is None else shares.record.jobs
    slots = {
        full_name(claims[uid].name or uid, claims[uid].namespace): len(slots_of_share(share.granted))
        for uid, share in shared.items()
        if uid in claims
    }
    return states, slots


def _state(claim: Claim, *, works: bool) -> str:
    if works:
        return "running"
    return "paused" if claim.paused else "queued"


async def import_in_thread(module: str) -> None:
    """Import a module that only jobs need in a thread; return when it is imported. Only one import runs at a time.

    If two threads imported packages that depend on each other, Python would resolve the deadlock with an error in one
    of them.
    """
    await asyncio.to_thread(_import, module)


def _import(module: str) -> None:
    with _ONE_IMPORT:
        importlib.import_module(module)
