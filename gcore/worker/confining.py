"""Where a worker runs: on its cores alone, in its job's control group, in its job's folder on the node.

The supervisor confines itself, before it starts the child; so the child, and all that it starts, is confined from its beginning. Cores
that are not to be had are a failure: the worker would compute on another's. A control group that is not to be had is not: limits are
a courtesy to the neighbours, and the job must not end for one that was removed meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from gcore.cgroups import CannotLimit, enter
from gcore.worker.process import CannotStart
from gcore.worker.records import LaunchSpec

log = logging.getLogger("gcore.worker")

SCRATCH = "tmp"
LONGEST_SCRATCH = 60
"""Characters. Programs make sockets in their folder for temporary files, and a socket's path has 107 at most."""


def confine(spec: LaunchSpec) -> None:
    """Confine this process as `spec` says. Raises CannotStart."""
    if spec.cgroup:
        try:
            enter(spec.cgroup)
        except CannotLimit as error:
            log.warning("runs without its job's limits: %s", error)
    if spec.cpus:
        try:
            os.sched_setaffinity(0, spec.cpus)
        except OSError as error:
            raise CannotStart(
                f"cannot run on the cores of {spec.slot} ({error.strerror})",
                fix="See which cores this machine has and which the daemon's CPU set allows",
            ) from error
        if lacking := sorted(set(spec.cpus) - os.sched_getaffinity(0)):  # the kernel leaves out what is not allowed
            raise CannotStart(
                f"may not run on the core{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))} of {spec.slot}",
                fix="See which cores this machine has and which the daemon's CPU set allows",
            )
    if spec.folder:
        try:
            Path(spec.folder, SCRATCH).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotStart(f"cannot make its job's folder {spec.folder} ({error.strerror or error})") from error


def scratch_environment(folder: str, base: Mapping[str, str]) -> dict[str, str]:
    """Has temporary files go to the job's folder, unless the starter's environment `base` names another, or its path leaves no room
    for a socket's name."""
    scratch = str(Path(folder, SCRATCH))
    return {"TMPDIR": scratch} if folder and "TMPDIR" not in base and len(scratch) <= LONGEST_SCRATCH else {}
