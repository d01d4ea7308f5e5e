"""Records of workers: the registration in the store, and the launch document that starts a supervisor.

A worker is an engine or a train rank with its supervisor. The registration is stored under a lease that the supervisor
renews, so it ends with the supervisor and not with the controller that started it. This module does no I/O.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gcore.schema import Record
from gcore.store.reference import StoreRef
from gcore.system.process import ProcessId
from gcore.types import Pool

WorkerState = Literal["starting", "serving", "failed", "stopping"]

JOBS_FOLDER = "jobs"
"""Folder of the cluster's home with the working folders of jobs."""


def job_folder(home: Path, job_uid: str) -> Path:
    """Return the folder for files that a job's processes write on this machine outside the run folder.

    It is deleted some time after the job's end.
    """
    return home / JOBS_FOLDER / job_uid


class WorkerRecord(Record):
    """A worker's registration: the value of the key `workers/{instance}`, under the worker's lease.

    `instance`: the worker's name. `role`: the pool that it serves (rollout, reward or train). `world`, `rank`: only for
    a train rank.
    """

    instance: str
    node: str
    role: Pool
    job_uid: str
    slot: str
    pid: int
    """Pid of the supervisor on `node`."""
    pid_started: int
    """Clock ticks from the node's boot to the supervisor's start. Identifies the supervisor together with the pid."""
    child_pid: int | None = None
    """Pid of the engine or train rank; None until it has been started."""
    state: WorkerState = "starting"
    address: str = ""
    """host:port at which the child accepts requests; empty until the child has reported it."""
    reason: str = ""
    """Why the worker failed or stops, as one sentence; empty while neither is the case."""
    world: str | None = None
    rank: int | None = None
    judge: str = ""
    """Name of the judge (reward model) that an engine of the reward pool serves; empty for other workers."""
    further: tuple[str, ...] = ()
    """The other slots that an engine spans besides `slot`, in order; empty for a worker with one slot."""

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots of the worker, `slot` first."""
        return (self.slot, *self.further)

    @property
    def process(self) -> ProcessId:
        """Identity (pid and start time) of the supervisor, for other processes on its node."""
        return ProcessId(self.pid, self.pid_started)


class LaunchSpec(Record):
    """The launch document of a worker: the file that `gcore-worker --launch` reads. All times in seconds."""

    instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    node: str
    role: Pool
    job_uid: str
    slot: str
    store: StoreRef
    log_file: str
    """File to which the child's output is appended."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The child's command, e.g. (sys.executable, "-P", "-m", "gcore.engines.torch")."""
    child: dict[str, Any] = Field(default_factory=dict)
    """The child's own launch document, sent as the first line on the control line."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables that are added to the supervisor's environment for the child."""
    threads: PositiveInt = 1
    """Size of each of the child's thread pools (`gcore.system.process`), unless `env` sets another."""
    world: str | None = None
    rank: NonNegativeInt | None = None
    judge: str = ""
    further: tuple[str, ...] = ()
    """The other slots that an engine spans besides `slot`, in order."""
    cpus: tuple[int, ...] = ()
    """The cores on which the worker runs; empty: any core that is allowed."""
    cgroup: str = ""
    """The control group (cgroup folder) in which the worker runs; empty: that of the process that starts it."""
    folder: str = ""
    """Working folder of the child, also for files that it writes outside the run folder; created if missing.

    Empty: the working folder of the process that starts the worker.
    """
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    """How long the node may have no controller before the worker drains and ends."""
    store_grace_s: PositiveFloat = 1800.0
    """How long the store may be unreachable before the worker ends, because clients can no longer find it."""
    start_limit_s: PositiveFloat = 600.0
    """Maximum time from the child's start until it reports "serving"."""
    watchdog_s: PositiveFloat = 120.0
    """A child that makes no progress in a working phase for this time counts as hung."""
    stop_grace_s: NonNegativeFloat = 10.0
    """Time that the child has from the stop command until SIGKILL."""
    linger_s: NonNegativeFloat = 3.0
    """How long a failure stays readable in the store before the supervisor ends and its registration with it."""

    @property
    def about(self) -> dict[str, object]:
        """The fields that each line of the worker's log carries: controller, worker, role, job and rank."""
        named = {"controller": self.node, "worker": self.instance, "role": self.role, "job": self.job_uid}
        return named | ({} if self.rank is None else {"rank": self.rank})

    @model_validator(mode="after")
    def _check_world(self) -> Self:
        if (self.role == "train") != (self.world is not None) or (self.world is None) != (self.rank is None):
            raise ValueError(
                f"role {self.role!r} with world {self.world!r} and rank {self.rank!r}; "
                "a train rank has both, any other worker neither"
            )
        return self
