"""The control groups of the jobs on one node: where they are, and the limits that apply to each job's processes.

The functions on the kernel's files are in `gcore.system.cgroups`. A daemon without a job imports this module, but not what starts workers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from gcore.config.node import AUTO, JobLimits
from gcore.system.cgroups import MOUNT, CannotLimit, group_of_process, limit_files, make_group, open_base, remove_group

log = logging.getLogger(__name__)

DELEGATED = "daemon"
"""Name of the subgroup in which systemd runs the daemon."""

PREFIX = "job-"
"""Prefix of the name of a job's control group; the job ID follows."""


def groups_base(limits: JobLimits, mount: Path, own: str | None) -> Path:
    """The folder in which the control groups of jobs are created, for a daemon in the group `own`. Raises CannotLimit
    if there is none."""
    if limits.cgroup != AUTO:
        return Path(limits.cgroup)
    if own is None:
        raise CannotLimit("this machine has no control groups of version 2", where=str(mount))
    parent, _, name = own.rpartition("/")
    if name != DELEGATED or not parent:
        raise CannotLimit(
            f"the daemon's control group {own} is not delegated to it",
            where="limits.cgroup",
            fix="Start the daemon as deploy/systemd does (Delegate=yes, DelegateSubgroup=daemon), or set limits.cgroup to a group for jobs",
        )
    return mount / parent.lstrip("/")


class JobGroups:
    """The control groups of the jobs on one node."""

    def __init__(self, limits: JobLimits, mount: Path = MOUNT, proc: Path = Path("/proc/self/cgroup")) -> None:
        self._wanted = limit_files(memory_gib=limits.memory_gib, cpus=limits.cpus, pids=limits.pids)
        self._base: Path | None = None
        self.why_not = ""
        """Why jobs run without the configured limits; empty if limits apply."""
        if limits.of_groups:
            try:
                own = proc.read_text(encoding="utf-8") if proc.exists() else ""
                base = groups_base(limits, mount, group_of_process(own))
                open_base(base, self._wanted)
                self._base = base
            except (CannotLimit, OSError) as error:
                self._cannot(error)

    def group_of(self, job_uid: str) -> str:
        """Create the control group of a job and return its folder; empty if jobs run without limits."""
        if self._base is None:
            return ""
        group = self._base / f"{PREFIX}{job_uid}"
        try:
            make_group(group, self._wanted)
        except CannotLimit as error:
            self._cannot(error)
            return ""
        return str(group)

    def sweep(self, active: Collection[str]) -> None:
        """Remove the control groups of jobs that are not `active` and have no processes left."""
        if self._base is None:
            return
        for group in self._base.glob(f"{PREFIX}*"):
            if group.name.removeprefix(PREFIX) not in active:
                remove_group(group)

    def _cannot(self, error: Exception) -> None:
        if not self.why_not:
            log.warning("jobs run without the configured limits on memory, cores and processes: %s", error)
        self.why_not = str(error)
