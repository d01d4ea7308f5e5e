"""Records of workers: the registration in the store, and the launch document that starts a supervisor.

A registration is stored under the worker's own lease, so it ends with the supervisor and not with the controller that
started it. This module does no I/O.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from gcore.schema import Record
from gcore.store.reference import StoreRef
from gcore.system.process import ProcessId
from gcore.types import Pool

WorkerState = Literal["starting", "serving", "failed", "stopping"]


class WorkerRecord(Record):
    """`workers/{instance}`, under the worker's lease."""

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
    state: WorkerState = "starting"
    address: str = ""
    """host:port at which the child accepts requests; empty until the child has reported it."""
    reason: str = ""
    """Why it failed or stops, as one sentence."""
    world: str | None = None
    rank: int | None = None
    judge: str = ""
    """The judge that an engine of the reward pool serves."""
    further: tuple[str, ...] = ()
    """Further slots that an engine spans after `slot`, in order."""

    @property
    def slots(self) -> tuple[str, ...]:
        """All slots of the worker."""
        return (self.slot, *self.further)

    @property
    def process(self) -> ProcessId:
        """The supervisor, for processes on its node."""
        return ProcessId(self.pid, self.pid_started)


class LaunchSpec(Record):
    """The file that `gcore-worker --launch` reads. All times in seconds."""

    instance: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    node: str
    role: Pool
    job_uid: str
    slot: str
    store: StoreRef
    log_file: str
    """File for the child's output."""
    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The child's command, e.g. (sys.executable, "-P", "-m", "gcore.engines.torch")."""
    child: dict[str, Any] = Field(default_factory=dict)
    """The child's own launch document, sent as the first line on the control line."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the supervisor's environment for the child."""
    threads: PositiveInt = 1
    """Size of each of the child's thread pools (`gcore.system.process`), unless `env` sets another."""
    world: str | None = None
    rank: NonNegativeInt | None = None
    judge: str = ""
    further: tuple[str, ...] = ()
    """As in the registration."""
    cpus: tuple[int, ...] = ()
    """The cores on which it runs; empty: any allowed core."""
    cgroup: str = ""
    """The control group (a folder) in which it runs; empty: that of the starting process."""
    folder: str = ""
    """Working folder of the child, also for files that it writes outside the run folder; it is created. Empty: that of
    the starting process."""
    lease_ttl_s: PositiveInt = 10
    orphan_grace_s: NonNegativeFloat = 60.0
    """Maximum time without a controller on the node before the worker drains and ends."""
    store_grace_s: PositiveFloat = 1800.0
    """Maximum time without the store before the worker ends, because it can no longer be found."""
    start_limit_s: PositiveFloat = 600.0
    """Maximum time from the child's start to its "serving"."""
    watchdog_s: PositiveFloat = 120.0
    """A working phase without progress for this time is a hang."""
    stop_grace_s: NonNegativeFloat = 10.0
    """Time from "stop" to SIGKILL."""
    linger_s: NonNegativeFloat = 3.0
    """Time for which a failure stays readable in the store before the supervisor ends."""

    @property
    def about(self) -> dict[str, object]:
        """Return the fields of each line of the worker's log."""
        named = {"controller": self.node, "worker": self.instance, "role": self.role, "job": self.job_uid}
        return named | ({} if self.rank is None else {"rank": self.rank})

    @model_validator(mode="after")
    def _ranks_have_a_world(self) -> Self:
        if (self.role == "train") != (self.world is not None) or (self.world is None) != (self.rank is None):
            raise ValueError(
                f"role {self.role!r} with world {self.world!r} and rank {self.rank!r}; "
                "a train rank has both, any other worker neither"
            )
        return self
