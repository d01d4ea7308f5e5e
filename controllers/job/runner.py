"""`JobRunner` watches one job's records and runs its session (`controllers.job.session`) until the job has ended.
`make_dependencies` builds what a session needs from outside: store, workers, telemetry and folders of a daemon's node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from controllers.changes import LOOK_AGAIN_S, ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.identity import Identity
from controllers.job.session import JobDependencies, JobRecords, JobSession
from controllers.job.supervision import (
    NodeNotReady,
    RecordsLost,
    fail_abandoned_job,
    fail_lost_job,
    find_lost_records,
    lost_sentence,
    withdraw_member,
)
from controllers.rules.decide import has_handed_over
from controllers.rules.view import JobView, Timers
from controllers.storage.run_folder import (
    LocalRunFolders,
    folder_loss,
    localize_mirror,
)
from controllers.telemetry.events import split_by_revision
from controllers.telemetry.notices import PluginErrorLog, WarningLog
from controllers.telemetry.run_recorder import JobTelemetry, RunRecorder
from controllers.workers.blobs import NodeBlobs
from controllers.workers.launcher import WorkerLauncher
from controllers.workers.ranks import RankConnections
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1.placement_pb2 import LoadsReply
from gcore.config.load import stored_spec
from gcore.config.node import NodeConfig
from gcore.config.spec import JobSpec
from gcore.errors import StoreUnavailable
from gcore.ledger.chain import job_digest
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobRecord
from gcore.ledger.transactions import TransactionExecutor
from gcore.observability.metrics import Metrics
from gcore.observability.tracing import StepTraces
from gcore.rollout.client import engine_reach
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch
from gcore.system import daemon as logs
from gcore.system.clock import Clock
from gcore.worker.control_groups import JobGroups


def make_dependencies(
    uid: str,
    identity: Identity,
    store: Store,
    changes: ChangeSignal,
    metrics: Metrics,
    clock: Clock,
    config: NodeConfig,
    folders: LocalRunFolders,
    connector: Connector = PLAIN,
    groups: JobGroups | None = None,
    blobs: NodeBlobs | None = None,
    traces: StepTraces | None = None,
    released: Callable[[], None] = lambda: None,
) -> JobDependencies:
    """Build the dependencies of a job's session on a daemon's node. `traces`: exports steps as traces; None: they are
    not exported. `released`: called when slot accounting has read the job's workers for the last time, so that they may
    be stopped."""
    keys, home = JobKeys(uid), Path(config.home)
    launcher, reach = WorkerLauncher(config, clock, connector, groups, blobs), engine_reach(connector)
    return JobDependencies(
        store=store,
        ledger=TransactionExecutor(store, keys),
        clock=clock,
        metrics=metrics,
        connector=connector,
        connect_engine=reach,
        launcher=launcher,
        ranks=RankConnections(clock, changes.notify, connector),
        telemetry=JobTelemetry(store, keys, identity, metrics, clock, reach, traces, released),
        warnings=WarningLog(store, keys, identity.node, clock),
        errors=PluginErrorLog(store, keys, identity.node),
        folders=folders,
        blobs=blobs,
        memory_dir=launcher.memory_dir(uid),
        cache_dir=home / "cache",
        disk_gib=config.limits.disk_gib,
        new_recorder=lambda look: RunRecorder(identity, home, store, keys, look, changes, clock),
        run_root=Path(config.run_root),
        folder_loss=partial(folder_loss, node=identity.node),
        group_of_job=partial(groups.group_of, uid) if groups is not None else str,
    )


class JobRunner:
    """Watches one job's records, and runs its session until the job has ended or the controller's lease is lost."""

    def __init__(
        self, uid: str, identity: Identity, cluster: ClusterMirror, changes: ChangeSignal, dependencies: JobDependencies
    ) -> None:
        self.uid, self.node, self.me = uid, identity.node, identity.incarnation
        self.changes = changes
        self.telemetry = dependencies.telemetry
        self.closed = False
        """Whether this runner has stopped, so that it sees no more changes."""
        self._goes_on = False
        """Whether the job was extended after its end. This runner, which saw the end, then ignores further records."""
        self._records = JobRecords(uid)
        self._identity = identity
        self._cluster = cluster
        self._dependencies = dependencies
        self._recorder = dependencies.new_recorder(lambda: self._records.mirror)
        self._session: JobSession | None = None
        """The session; None before the job's record is known, and after the job has ended."""

    @property
    def mirror(self) -> JobMirror:
        """The job's records as last received."""
        return self._records.mirror

    @property
    def is_working(self) -> bool:
        """Whether there is a session, and so a view."""
        return self._session is not None

    @property
    def session(self) -> JobSession:
        """The session. Requires that there is one."""
        assert self._session is not None
        return self._session

    @property
    def needs_workers(self) -> bool:
        """Whether the job's workers must keep running, because slot accounting has not read their last seconds."""
        return self.telemetry.slot_accounting.is_reading

    @property
    def waits(self) -> Timers:
        """Since when each condition and wait of the job has lasted."""
        return self.session.waits

    @property
    def has_handed_over(self) -> bool:
        """Whether this controller may end without loss of finished work of this job."""
        return self._session is None or (not self.is_ending and has_handed_over(self._session.look()))

    @property
    def is_ending(self) -> bool:
        """Whether the job has ended and slot accounting still reads its last step, which takes a limited time."""
        return self.needs_workers and self.mirror.has_ended

    def look(self) -> JobView:
        """The present view of the job."""
        return self.session.look()

    async def loads(self) -> LoadsReply:
        """The load of the engines that this controller manages."""
        return await self.session.loads()

    def leave(self) -> None:
        """Begin to hand over the job, because this controller is about to end: give up prompts in flight and start
        nothing new."""
        self._records.leaving = True
        for ref in list(self._records.buffer.in_flight):
            self._records.buffer.in_flight.give_up(ref, stale=False)
        self.changes.notify()

    async def withdraw(self) -> None:
        """Remove this controller's membership in the job, because this node cannot work on it."""
        await withdraw_member(self._dependencies.store, self._records.keys, self._identity, self._dependencies.clock)

    async def end_left(self, reason: str) -> None:
        """End the job as failed if it has no members."""
        await fail_abandoned_job(self._dependencies.store, self._records.keys, self._dependencies.clock, reason)

    async def end_lost(self) -> None:
        """End the job as failed if the store has lost records of it."""
        await fail_lost_job(self._dependencies.store, self._records.keys, self._dependencies.clock)

    async def run(self) -> None:
        """Run until the job has ended. Raises RecordsLost."""
        logs.set_log_context(lambda: self.telemetry.about)
        watching = asyncio.create_task(self._watch(), name=f"watch {self.uid}")
        try:
            while self.mirror.job is None or self.mirror.status is None:
                await self._unless(watching, self.changes.wait())
            if not self.mirror.has_ended:
                self._recorder.begin()
                await self._unless(watching, self._work())
            if self.mirror.has_ended:
                await self._recorder.finish()
        finally:
            session, self._session = self._session, None
            self.closed = True
            self.telemetry.close()
            self.changes.notify()
            watching.cancel()
            if session is not None:
                await session.actions.stop()
            await self._recorder.stop()
            await self._dependencies.ranks.close()

    async def _unless(self, watching: asyncio.Task[None], work: object) -> None:
        """Await `work`; if the watch of the records fails first, raise its error."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        try:
            await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await task
        finally:
            task.cancel()

    async def _work(self) -> None:
        """Run sessions until the job has ended: if the job's settings change, another session replaces the present one."""
        control_group = await asyncio.to_thread(self._dependencies.group_of_job)
        while not self.mirror.has_ended:
            job = self.mirror.job_record
            self._session = self.make_session(stored_spec(job.spec), job, control_group)
            await self._session.run()

    def make_session(self, spec: JobSpec, job: JobRecord, control_group: str) -> JobSession:
        """Build the session. `job`: the record, with the run's folder on this node; `control_group`: cgroup of the
        job's processes."""
        return JobSession(
            self._records,
            self._identity,
            self._cluster,
            self.changes,
            self._dependencies,
            self._recorder,
            spec,
            job,
            control_group,
        )

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_records(), name=f"records {self.uid}")
            group.create_task(self._watch_claim(), name=f"claim {self.uid}")

    async def _watch_claim(self) -> None:
        """Return when the job has ended. Raises RecordsLost if its claim on slots, which is not among the watched
        records, disappears before that."""
        store, clock = self._dependencies.store, self._dependencies.clock
        while True:
            await self.changes.until(lambda: self.uid not in self._cluster.active)
            with contextlib.suppress(StoreUnavailable):
                if (lost := await find_lost_records(store, self._records.keys)) is not None:
                    raise RecordsLost(lost_sentence(lost.keys))
                return
            await clock.sleep(LOOK_AGAIN_S)

    async def _watch_records(self) -> None:
        async for batch in self._dependencies.store.watch(self._records.keys.prefix):
            self._note(batch)
            self.changes.notify()

    def _note(self, batch: WatchBatch) -> None:
        before, wall = self.mirror, self._dependencies.clock.wall()
        for one in split_by_revision(batch):
            so_far = self.mirror
            now = localize_mirror(so_far.fold(one), self._dependencies.run_root)
            if so_far.has_ended and not now.has_ended:
                self._goes_on = True
            if self._goes_on:  # another runner continues the extended job
                return
            if so_far.job is not None and now.job is not None and _is_another(so_far.job.record, now.job.record):
                raise NodeNotReady("the job ended and was continued before this node saw that it had ended")
            if lost := now.lost_keys():  # before any part uses the records
                raise RecordsLost(lost_sentence(lost))
            self._records.mirror = now
            self.telemetry.events.note(so_far, one, self.mirror, wall)
        for key in self.mirror.unreadable.keys() - before.unreadable.keys():
            sentence = f"{self.mirror.unreadable[key].why}; the record is ignored"
            self._dependencies.warnings.note(f"record-{self.node}", sentence)
        self._recorder.note(self.mirror, self._records.buffer.group)
        if self._session is not None:
            self._session.prune(before)
        self.telemetry.note(before, batch, self.mirror)
        if self._session is not None:
            self._session.work.note(before, self.mirror)


def _is_another(before: JobRecord, now: JobRecord) -> bool:
    """Whether more than execution settings differs between a job's records."""
    return before != now and job_digest(before) != job_digest(now)
