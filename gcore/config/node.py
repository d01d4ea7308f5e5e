"""What one daemon is told at its start: `gcore-controller --config FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from gcore.errors import UsageError


class NodeConfig(BaseModel):
    """A daemon's configuration; JSON on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")] = Field(
        description="The node's name, unique in the cluster"
    )
    home: str = Field(description="Folder of the cluster on this machine")
    run_root: str = Field(description="Folder for the jobs' runs; every node sees it")
    host: str = Field("127.0.0.1", description="Address to listen on, and that others reach this node at")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Job API; 0: any free port")
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(0, description="Prometheus metrics; 0: any free port")
    etcd: Annotated[tuple[str, ...], Field(min_length=1, description="The store's endpoints, host:port")]
    slots: tuple[str, ...] = Field((), description="Accelerators: cpu:N or cuda:N")
    lease_ttl_s: PositiveInt = Field(5, description="So long after its death a daemon's shards are its own")
    orphan_grace_s: PositiveFloat = Field(60.0, description="So long workers live without a daemon on their node")
    local_cluster: bool = Field(False, description="Restart daemons and etcd of this machine's cluster when they die")

    @classmethod
    def load(cls, path: Path) -> NodeConfig:
        """Read a file. Raises UsageError."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise UsageError(
                f"cannot read the configuration ({error.strerror})", where=str(path), fix="Name an existing file"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"{field}: {first['msg']}", where=str(path), fix="Correct the file") from error
