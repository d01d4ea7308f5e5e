"""What one daemon is told: the file behind `gcore-controller --config FILE`.

The same document on a laptop (written by `gcore up`) and on a cluster (written by whoever deploys). Frozen; unknown keys
are errors. Holds no secret and nothing about jobs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from gcore.errors import UsageError
from gcore.store.lease_times import LeaseTimes

Port = Annotated[int, Field(ge=0, le=65535)]


class NodeConfig(BaseModel):
    """One controller daemon. Times in seconds; a port of 0 takes a free one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    """The node's name, unique in the cluster; it stays the same when the daemon is started again."""
    home: str
    """The folder that names the installation; on the command line of every process of it."""
    listen_host: str = "127.0.0.1"
    listen_port: Port = 0
    """The job API, the peers' API and health."""
    metrics_port: Port = 0
    etcd_endpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    """host:port each."""
    slots: Annotated[tuple[str, ...], Field(min_length=1)]
    """The accelerators of this node that gcore may use, e.g. ("cpu:0",)."""
    host_memory_gib: PositiveFloat | None = None
    """What of its host's memory the node may take, for planning; None: all of it."""
    run_root: str
    """Folder of the jobs' run folders, seen by every node."""
    sglang_python: str | None = None
    """The Python that has SGLang, for jobs with `rollout.engine: sglang`; None: the node runs no such job."""
    lease_ttl_s: PositiveInt = 5
    """A daemon that is silent for so long has left, for its peers."""
    lease_tick_s: PositiveFloat | None = None
    """Between two renewals of its lease; None: a third of that. How the four tie is checked at start (`lease_times`)."""
    lease_call_s: PositiveFloat | None = None
    """Longest wait for the answer to a renewal; None: a fifth of the lease."""
    lease_margin_s: NonNegativeFloat | None = None
    """So long may the daemon be held up besides; None: a tenth of the lease."""
    orphan_grace_s: NonNegativeFloat = 60.0
    """So long do workers outlive a daemon that does not come back."""
    memory_dir: str = "/dev/shm"
    """A folder of a file system in this machine's memory, for copies of train ranks' state (`gcore.weights.copies`)."""
    local_cluster: bool = False
    """Whether the node belongs to `gcore up`: then the daemon brings back its peers and etcd when they die."""

    @property
    def lease_times(self) -> LeaseTimes:
        """How the daemon keeps its lease; not checked."""
        return LeaseTimes.of(
            self.lease_ttl_s, tick_s=self.lease_tick_s, call_s=self.lease_call_s, margin_s=self.lease_margin_s
        )

    @classmethod
    def load(cls, path: Path) -> NodeConfig:
        """Read the file. Raises UsageError, also for times under which a lease would not outlive a slow answer."""
        try:
            config = cls.model_validate_json(path.read_bytes())
            config.lease_times.check(str(path))
            return config
        except OSError as error:
            raise UsageError(
                f"cannot read the daemon's configuration ({error.strerror or error})",
                where=str(path),
                fix="Name an existing file",
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the document"
            raise UsageError(
                f"not a daemon's configuration: {field}: {first['msg']}", where=str(path), fix="Correct the file"
            ) from error
