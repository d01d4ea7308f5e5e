"""What one job may take of a node: a section of the daemon's configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from gcore.config.base import Section

AUTO, OFF = "auto", "off"
LEAST_MEMORY_GIB = 0.05
"""Below it not even a supervisor starts."""


class JobLimits(Section):
    """Of each job on this node; None: no limit. All of a job's processes on the node count together: engines, ranks, rewards,
    tools. `disk_gib` is of its run folder, wherever that lies."""

    memory_gib: Annotated[float, Field(ge=LEAST_MEMORY_GIB)] | None = None
    """cgroup's memory.max: beyond it the kernel kills the job's process that has most."""
    cpus: Annotated[float, Field(ge=0.01)] | None = None
    """cgroup's cpu.max, in cores."""
    pids: PositiveInt | None = None
    """cgroup's pids.max: processes and threads."""
    disk_gib: PositiveFloat | None = None
    """Of a run's folder: at nine tenths of it no more samples are written, beyond it the job is paused, and an event says so."""
    cgroup: str = AUTO
    """Where the groups of jobs are made: auto (beside the daemon's own, where systemd delegates that), off, or a folder of cgroup v2
    that is the daemon's to fill."""

    @field_validator("cgroup")
    @classmethod
    def _is_a_place(cls, cgroup: str) -> str:
        if cgroup not in (AUTO, OFF) and not cgroup.startswith("/"):
            raise ValueError(f"it should be {AUTO}, {OFF}, or the whole path of a folder of cgroup v2")
        return cgroup

    @property
    def of_groups(self) -> bool:
        """Whether any of them is a control group's to keep."""
        return self.cgroup != OFF and (self.memory_gib, self.cpus, self.pids) != (None, None, None)
