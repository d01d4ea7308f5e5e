"""Control groups (version 2): where this process is, what a limit is called, making a group and entering it.

A group is a folder that the kernel fills with files. Limits hold for all processes in it and all that they start. A process can be
moved by whoever may write both its old and its new group, so a supervisor moves itself, and what it starts is in the group from its
beginning. Version 1 is not used: there each limit has a tree of its own. Decides nothing about jobs (`controllers.workers.launcher`).
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
"""Over which a share of cores is counted."""

GIB = 1 << 30


class CannotLimit(GcoreError):
    """The machine keeps no such limits for this process."""


def limit_files(*, memory_gib: float | None, cpus: float | None, pids: int | None) -> dict[str, str]:
    """What is written into which file of a group."""
    found: dict[str, str] = {}
    if memory_gib is not None:
        found["memory.max"] = str(int(memory_gib * GIB) // 4096 * 4096)
    if cpus is not None:
        found["cpu.max"] = f"{max(1000, round(cpus * PERIOD_US))} {PERIOD_US}"
    if pids is not None:
        found["pids.max"] = str(pids)
    return found


def group_of_process(text: str) -> str | None:
    """The group that /proc/PID/cgroup names; None where version 2 is not there."""
    return next((line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::/")), None)


def open_base(base: Path, needed: Mapping[str, str]) -> None:
    """Have the groups that are made in `base` keep what `needed` names. Raises CannotLimit."""
    controllers = sorted({name.partition(".")[0] for name in needed})
    try:
        if not base.is_dir():
            base.mkdir()
        given = (base / CONTROLLERS).read_text(encoding="ascii").split()
        if lacking := [one for one in controllers if one not in given]:
            raise CannotLimit(
                f"the control group may not limit {', '.join(lacking)}",
                where=str(base),
                fix="Have them delegated (systemd: Delegate=yes), or take the limits out of the configuration",
            )
        on = (base / SUBTREE).read_text(encoding="ascii").split()
        if missing := [one for one in controllers if one not in on]:
            (base / SUBTREE).write_text(" ".join(f"+{one}" for one in missing), encoding="ascii")
    except OSError as error:
        raise _cannot(base, error) from error


def make_group(group: Path, wanted: Mapping[str, str]) -> None:
    """The group is there, with these limits. Raises CannotLimit."""
    try:
        group.mkdir(exist_ok=True)
        for name, value in wanted.items():
            (group / name).write_text(value, encoding="ascii")
    except OSError as error:
        raise _cannot(group, error) from error


def remove_group(group: Path) -> bool:
    """Whether it is gone; one in which something runs stays. Raises nothing."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def enter_group(group: str) -> None:
    """Move this process there. Raises CannotLimit."""
    try:
        Path(group, PROCESSES).write_text(str(os.getpid()), encoding="ascii")
    except OSError as error:
        raise _cannot(Path(group), error) from error


def _cannot(where: Path, error: OSError) -> CannotLimit:
    if error.errno == errno.EBUSY:
        return CannotLimit(
            "the control group has processes of its own, so none can be made in it that keep limits",
            where=str(where),
            fix="Start the daemon as deploy/systemd does (DelegateSubgroup=), or name another group in limits.cgroup",
        )
    if isinstance(error, FileNotFoundError):
        fix = "Mount cgroup version 2 there (a machine that has version 1 alone keeps no limits), or name another in limits.cgroup"
    else:
        fix = "Have the group delegated to the daemon's user, as deploy/systemd does"
    return CannotLimit(f"a control group cannot be used ({error.strerror or error})", where=str(where), fix=fix)
