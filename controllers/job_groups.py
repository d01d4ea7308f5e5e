"""A control group for each job on this node, with the limits of the daemon's configuration, where the machine allows it.

`auto` makes them beside the daemon's own group, and only where that is one that systemd delegated to it (`DelegateSubgroup=daemon`):
a group that others use is not the daemon's to divide, and a service whose own group was divided cannot be started again while a
worker of it lives. Where there are none, jobs run without limits; that is logged once, with what to do. A group is made with the
first worker of its job, and goes when nothing of an ended job runs any more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from gcore.cgroups import MOUNT, CannotLimit, group_of_process, make_group, open_base, remove_group, settings
from gcore.config.limits import AUTO, JobLimits

log = logging.getLogger(__name__)

DELEGATED = "daemon"
"""What the group of its own that systemd has the daemon in is called."""
PREFIX = "job-"
FOLDER = "jobs"


def job_folder(home: Path, job_uid: str) -> Path:
    """What a job's processes write on this machine beside the run's folder; deleted some time after its end."""
    return home / FOLDER / job_uid


def base_of(limits: JobLimits, mount: Path, own: str | None) -> Path:
    """Where the groups of jobs are made, of a daemon in the group `own`. Raises CannotLimit."""
    if limits.cgroup != AUTO:
        return Path(limits.cgroup)
    if own is None:
        raise CannotLimit("this machine has no control groups of version 2", where=str(mount))
    parent, _, name = own.rpartition("/")
    if name != DELEGATED or not parent:
        raise CannotLimit(
            f"the daemon's control group is {own}, which is not one that was delegated to it",
            where="limits.cgroup",
            fix="Start it as deploy/systemd does (Delegate=yes, DelegateSubgroup=daemon), or name a group for jobs here",
        )
    return mount / parent.lstrip("/")


class JobGroups:
    """Of one daemon."""

    def __init__(self, limits: JobLimits, mount: Path = MOUNT, proc: Path = Path("/proc/self/cgroup")) -> None:
        self._wanted = settings(memory_gib=limits.memory_gib, cpus=limits.cpus, pids=limits.pids)
        self._base: Path | None = None
        self.why_not = ""
        """Why jobs run without limits that the configuration has; nothing if they do not."""
        if limits.of_groups:
            try:
                own = proc.read_text(encoding="utf-8") if proc.exists() else ""
                base = base_of(limits, mount, group_of_process(own))
                open_base(base, self._wanted)
                self._base = base
            except (CannotLimit, OSError) as error:
                self._cannot(error)

    def group_of(self, job_uid: str) -> str:
        """The folder of a job's group, which is there from now on; nothing where there are no limits."""
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
        """Remove the groups of jobs that have ended, as far as nothing of them runs."""
        if self._base is None:
            return
        for group in self._base.glob(f"{PREFIX}*"):
            if group.name.removeprefix(PREFIX) not in active:
                remove_group(group)

    def _cannot(self, error: Exception) -> None:
        if not self.why_not:
            log.warning("jobs run without the limits of this configuration on memory, cores and processes: %s", error)
        self.why_not = str(error)
