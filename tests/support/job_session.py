"""Production's session of a job over a store in memory, without running tasks."""

from __future__ import annotations

from pathlib import Path

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.identity import Identity
from controllers.job.runner import JobRunner, make_dependencies
from controllers.job.session import JobSession
from controllers.storage.run_folder import LocalRunFolders
from gcore.config import JobSpec, NodeConfig
from gcore.ledger.records.job import JobRecord
from gcore.observability.metrics import Metrics
from gcore.store.reference import StoreRef
from gcore.store.types import Store
from gcore.system.clock import Clock


def make_runner(folder: Path, store: Store, clock: Clock, metrics: Metrics | None = None) -> JobRunner:
    """A runner of the job `u` on node `n`."""
    config = NodeConfig(
        node="n", home=str(folder), run_root=str(folder), etcd=StoreRef(endpoints=("h:1",)), slots=("cpu:0",)
    )
    identity, changes = Identity("n", "n.1", "h:1", 1), ChangeSignal()
    needs = make_dependencies("u", identity, store, changes, metrics or Metrics(), clock, config, LocalRunFolders())
    return JobRunner("u", identity, ClusterMirror(store, changes), changes, needs)


def make_session(folder: Path, store: Store, clock: Clock, spec: JobSpec, metrics: Metrics | None = None) -> JobSession:
    """A session of that job, which has `spec`."""
    runner = make_runner(folder, store, clock, metrics)
    tree = spec.model_dump(mode="json")
    job = JobRecord(uid="u", name=spec.name, spec=tree, run_dir=str(folder), created=1.0, prompts=40)
    return runner.make_session(spec, job, "")
