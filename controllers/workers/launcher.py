"""Starts workers on this node, each with its supervisor process, and keeps track of workers that have not registered
yet and of failed starts.

`controllers.rules.workers` decides which workers run; a worker is stopped by its own supervisor. This module never
accesses a run's folder, because the daemon must not hang if the mount does.

Control groups (cgroups): each job has one, with the limits of the daemon's configuration. `auto` creates them next to
the daemon's own group, and only if systemd has delegated that group (`DelegateSubgroup=daemon`): the daemon must not
divide a group that others use, and a service whose own group was divided cannot be restarted while one of its workers
lives. Without control groups, jobs run without limits, and the daemon logs that once, with the fix. A group is created
with the first worker of its job, and removed when the job has ended and no process of it is left.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from controllers.rules.view import JobView, world_start
from controllers.rules.workers import Launch, Launches, StartEngine, StartRank, engine_key, is_usable, launch_key
from controllers.workers.blobs import NodeBlobs
from controllers.workers.launch_documents import (
    EngineMissing,
    LaunchDocument,
    access_settings,
    device_env,
    emulated_engine,
    emulated_host,
    engine_document,
    interface_env,
    rank_command,
)
from gcore.api.tls import PLAIN, Connector
from gcore.config.capabilities import PICTURE_ENGINES
from gcore.config.node import NodeConfig
from gcore.config.spec import uses_blobs
from gcore.engines.emulated.launch import start_host
from gcore.models.replicas import memory_folder, open_folder
from gcore.system.clock import Clock
from gcore.system.process import CannotStart, is_running, last_log_lines
from gcore.system.slots import count_threads, is_cuda, worker_cores
from gcore.types import Pool
from gcore.worker.control_groups import JobGroups
from gcore.worker.main import start_worker, supervisor_log
from gcore.worker.records import LaunchSpec, WorkerRecord, job_folder

log = logging.getLogger(__name__)

MAX_LAUNCHES = 5
"""Number of consecutive starts of a worker without success after which the job fails."""

LASTING_S = 60.0
"""Seconds after its start from which a serving worker counts as started successfully."""

LOGGED = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ \S+ ")
"""Matches the beginning of a log line: time, level, logger."""


class WorkerLauncher:
    """Starts workers of one job on this node, and tracks them until they have registered. Workers are identified by
    their launch key (`controllers.rules.workers.launch_key`)."""

    def __init__(
        self,
        config: NodeConfig,
        clock: Clock,
        connector: Connector = PLAIN,
        groups: JobGroups | None = None,
        blobs: NodeBlobs | None = None,
    ) -> None:
        """`groups`: the control groups of jobs; None: jobs run without limits. `blobs`: the blob store of this node."""
        self._blobs = blobs
        self._connector = connector
        self._groups = groups
        self._config = config
        self._clock = clock
        self._started: dict[str, Launch] = {}
        self._newest: dict[str, Launch] = {}
        self._last: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._why: dict[str, str] = {}

    def launches(self, workers: Mapping[str, WorkerRecord]) -> Launches:
        """Return the starts so far, as input of `schedule_workers`. Workers that have registered or died are no longer
        pending, and those that serve for `LASTING_S` have their attempts reset. `workers`: the registered ones."""
        now = self._clock.monotonic()
        for key, launch in self._newest.items():
            worker = workers.get(launch.instance)
            if worker is not None and worker.state == "serving" and now - launch.at > LASTING_S:
                self._tries.pop(key, None)
            if worker is not None and worker.state == "failed" and worker.reason:
                self._why[key] = worker.reason
            if worker is not None or not is_running(launch.process):
                self._started.pop(key, None)
        return Launches(dict(self._started), dict(self._tries), dict(self._last))

    def failed_start(self, workers: Mapping[str, WorkerRecord]) -> str:
        """A sentence about a worker that was started `MAX_LAUNCHES` times without success, as the reason to fail the
        job; empty if there is none."""
        for key, tries in self._tries.items():
            newest = self._newest.get(key)
            worker = workers.get(newest.instance) if newest else None
            if tries >= MAX_LAUNCHES and key not in self._started and (worker is None or not is_usable(worker)):
                return f"{key} on {self._config.node} was started {tries} times and never lasted{self._cause(key)}"
        return ""

    def _cause(self, key: str) -> str:
        """The cause of a worker's last failure and the path of its log, as the end of a sentence. Reads nothing in the
        run's folder, because its mount may hang."""
        why, newest = self._why.get(key, ""), self._newest.get(key)
        file = None if newest is None else newest.log if why else newest.starter_log
        if file is not None and not why:
            why = LOGGED.sub("", last_log_lines(file, 0))  # the worker never registered, so the store has no reason
        return (f": {why}" if why else "") + (f" (its log: {file})" if file is not None else "")

    def start(self, action: StartEngine | StartRank, view: JobView) -> str:
        """Start a worker, which registers itself in the store. If that fails (for example on a full disk), return the
        reason; it is retried later."""
        why = ""
        key = launch_key(action)
        self._last[key] = self._clock.monotonic()
        try:
            self._newest[key] = self._started[key] = self._spawn(action, view)
        except (CannotStart, EngineMissing, OSError) as error:
            self._newest.pop(key, None)
            self._why[key] = str(error)
            why = f"{key} cannot be started: {error}"
        self._tries[key] = self._tries.get(key, 0) + 1
        return why

    def start_emulated(self, actions: Sequence[StartEngine], view: JobView) -> None:
        """Start engines on emulated slots, all in one process, because they compute nothing and there may be very
        many."""
        name = f"emulated-{self._config.node}-{uuid.uuid4().hex[:8]}"
        engines = ((engine_key(action.place), emulated_engine(action.place, name)) for action in actions)
        placed = {
            key: one.model_copy(update={"api_key": self._connector.engine_key(one.instance) or ""})
            for key, one in engines
        }
        now = self._clock.monotonic()
        uid, blobs = view.mirror.keys.uid, ("", "")
        if self._blobs is not None and uses_blobs(view.spec):
            blobs = self._blobs.address, self._blobs.key_of(uid)
        launch = emulated_host(view.spec, self._config, uid, name, tuple(placed.values()), blobs)
        why, process = "", None
        said = Path(self._config.home) / "logs" / f"{name}.log"
        try:
            process = start_host(launch, Path(self._config.home))
            log.info("started %d emulated engines: %s", len(placed), name, extra={"job": view.mirror.keys.uid})
        except CannotStart as error:
            why = str(error)
            log.warning("%s cannot be started: %s", name, error)
        for key, one in placed.items():
            self._last[key] = now
            self._tries[key] = self._tries.get(key, 0) + 1
            if process is None:
                self._newest.pop(key, None)
                self._why[key] = why
            else:
                self._newest[key] = self._started[key] = Launch(one.instance, process, now, said, said)

    def _spawn(self, action: StartEngine | StartRank, view: JobView) -> Launch:
        """Start the supervisor process of a worker. Raises CannotStart, EngineMissing, OSError."""
        uid = view.mirror.keys.uid
        run_dir = Path(view.job.run_dir)
        slots: tuple[str, ...] = action.place.slots if isinstance(action, StartEngine) else (action.place.slot,)
        role: Pool
        world: str | None
        rank: int | None
        if isinstance(action, StartEngine):
            judge = action.place.judge
            role, world, rank = "reward" if judge else "rollout", None, None
            child = engine_document(view.spec, action.place, self._config, view.job.adapter_digests)
            child = replace(child, document={**child.document, **self._engine_blobs(view, child.document["kind"])})
        else:
            judge, role, world, rank = "", "train", action.world, action.place.rank
            child = self._rank_child(action, view)
        instance = f"{role}-{self._config.node}-{uuid.uuid4().hex[:8]}"
        logs = run_dir / "logs"  # created by the supervisor, because the run's folder may hang
        launch = LaunchSpec(
            instance=instance,
            node=self._config.node,
            role=role,
            job_uid=uid,
            slot=slots[0],
            store=self._config.etcd,
            log_file=str(logs / f"{instance}.log"),
            command=child.command,
            env=dict(child.env),
            threads=child.document["threads"],
            child=dict(child.document) | access_settings(self._config, self._connector, role, instance),
            world=world,
            rank=rank,
            judge=judge,
            further=slots[1:],
            cpus=worker_cores(slots),
            cgroup="" if self._groups is None else self._groups.group_of(uid),
            folder=str(job_folder(Path(self._config.home), uid)),
            lease_ttl_s=self._config.lease_ttl_s,
            orphan_grace_s=self._config.orphan_grace_s,
            start_limit_s=child.start_limit_s,
            watchdog_s=view.spec.train.watchdog_s if role == "train" else view.spec.rollout.watchdog_s,
        )
        process = start_worker(launch, Path(self._config.home))
        log.info("started %s on %s: %s", launch_key(action), " ".join(slots), instance, extra={"job": uid})
        said = supervisor_log(instance, Path(self._config.home))
        return Launch(instance, process, self._clock.monotonic(), said, Path(launch.log_file))

    def _engine_blobs(self, view: JobView, kind: str) -> dict[str, str]:
        """Where an engine of this kind finds or puts blobs, as settings of its launch document."""
        uid = view.mirror.keys.uid
        if self._blobs is None or not uses_blobs(view.spec):
            return {}
        if kind in PICTURE_ENGINES:
            return {"blob_store": self._blobs.address, "blob_key": self._blobs.key_of(uid), "job_uid": uid}
        return {"blobs": str(self._blobs.job_folder(uid))} if kind == "engine" else {}

    def memory_dir(self, job_uid: str) -> Path:
        """The folder of in-memory copies of a job's train states on this node."""
        return memory_folder(Path(self._config.memory_dir), self._config.home, self._config.node, job_uid)

    def _rank_child(self, action: StartRank, view: JobView) -> LaunchDocument:
        """The launch document of a train rank."""
        start = world_start(view)
        assert start is not None
        slot = action.place.slot
        places = sorted(view.plan.ranks, key=lambda place: place.rank)
        memory = self.memory_dir(view.mirror.keys.uid)
        makes_copies = view.spec.train.copies_gb != 0 and open_folder(memory, self._config.home)
        document = {
            "kind": "rank",
            "job_uid": view.mirror.keys.uid,
            "world": action.world,
            "lineage": view.head.lineage,
            "rank": action.place.rank,
            "world_size": len(places),
            "spec": view.spec.model_dump(mode="json"),
            "run_dir": view.job.run_dir,
            "start": start.model_dump(mode="json"),
            "host": self._config.workers_listen_on,
            "threads": count_threads((slot,)),
            "nodes": [place.node for place in places],
            "memory_dir": str(memory) if makes_copies else "",
        }
        if self._blobs is not None and uses_blobs(view.spec):
            blobs = self._blobs.of_rank(view.mirror.keys.uid, action.world, action.place.rank)
            document["blobs"] = blobs.model_dump()
        env = device_env(slot) | interface_env(self._config) | {"DS_ACCELERATOR": "cuda" if is_cuda(slot) else "cpu"}
        return LaunchDocument(rank_command(slot), document, env, view.spec.train.start_limit_s)
