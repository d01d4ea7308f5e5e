"""Control groups (version 2): this process's group, limit files, and creating and entering a group.

A group is a folder that the kernel fills with files. Limits apply to all processes in it and their descendants. A process may move itself if it
may write both its old and its new group. So a supervisor moves itself, and all its children start in the group. Version 1 is not supported,
because each limit has its own tree there. `gcore.worker.control_groups` decides about jobs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from gcore.errors import GcoreError

MOUNT = Path("/sys/fs/cgroup")
PROCESSES, CONTROLLERS, SUBTREE = "cgroup.procs", "cgroup.controllers", "cgroup.subtree_control"

PERIOD_US = 100_000
"""Period of `cpu.max`, in microseconds: the kernel renews the CPU quota after each."""

GIB = 1 << 30


class CannotLimit(GcoreError):
    """The kernel or its permissions do not allow this process to set up or enter a control group with limits."""


def limit_files(*, memory_gib: float | None, cpus: float | None, pids: int | None) -> dict[str, str]:
    """Return the content of a control group's limit files, by file name (memory.max, cpu.max, pids.max); none for a limit that is None.

    `cpus`: cores, may be a fraction.
    """
    found: dict[str, str] = {}
    if memory_gib is not None:
        found["memory.max"] = str(int(memory_gib * GIB) // 4096 * 4096)
    if cpus is not None:
        found["cpu.max"] = f"{max(1000, round(cpus * PERIOD_US))} {PERIOD_US}"
    if pids is not None:
        found["pids.max"] = str(pids)
    return found


def group_of_process(text: str) -> str | None:
    """Return the path of the control group that the text of /proc/PID/cgroup names; None without version 2."""
    return next((line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::/")), None)


def open_base(base: Path, needed: Mapping[str, str]) -> None:
    """Create the group `base` if needed, and let its subgroups set the limits `needed` (limit files, as from `limit_files`).

    Raises CannotLimit.
    """
    controllers = sorted({name.partition(".")[0] for name in needed})
    try:
        if not base.is_dir():
            base.mkdir()
        given = (base / CONTROLLERS).read_text(encoding="ascii").split()
        if lacking := [one for one in controllers if one not in given]:
            raise CannotLimit(
                f"the control group cannot limit {', '.join(lacking)}",
                where=str(base),
                fix="Delegate these controllers (systemd: Delegate=yes), or remove the limits from the configuration",
            )
        on = (base / SUBTREE).read_text(encoding="ascii").split()
        if missing := [one for one in controllers if one not in on]:
            (base / SUBTREE).write_text(" ".join(f"+{one}" for one in missing), encoding="ascii")
    except OSError as error:
        raise _cannot(base, error) from error


def make_group(group: Path, wanted: Mapping[str, str]) -> None:
    """Create the control group `group` if needed, and write its limits. `wanted`: content by limit file. Raises CannotLimit."""
    try:
        group.mkdir(exist_ok=True)
        for name, value in wanted.items():
            (group / name).write_text(value, encoding="ascii")
    except OSError as error:
        raise _cannot(group, error) from error


def remove_group(group: Path) -> bool:
    """Remove the group and return whether it is gone; a group with running processes stays. Does not raise."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def enter_group(group: str) -> None:
    """Move this process into the control group with the folder `group`. Raises CannotLimit."""
    try:
        Path(group, PROCESSES).write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        raise _cannot(Path(group), error) from error


def _cannot(where: Path, error: OSError) -> CannotLimit:
    if error.errno == errno.EBUSY:
        return CannotLimit(
            "the control group contains processes, so it cannot have subgroups with limits",
            where=str(where),
            fix="Start the daemon as in deploy/systemd (DelegateSubgroup=), or name another group in limits.cgroup",
        )
    if isinstance(error, FileNotFoundError):
        fix = "Mount cgroup version 2 there (version 1 does not support these limits), or name another group in limits.cgroup"
    else:
        fix = "Delegate the group to the daemon's user, as in deploy/systemd"
    return CannotLimit(f"cannot use a control group ({error.strerror or error})", where=str(where), fix=fix)
