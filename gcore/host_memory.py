"""How much memory this machine has for processes like this one, as the kernel tells. No torch, nothing is started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in all, and bytes that can be had now."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Of the control group, version 2 or 1: cores, memory, None where it sets no limit; and memory in use."""

    cores: float | None
    memory: int | None
    used: int


def host_memory(meminfo: Path = MEMINFO, group: Path = CONTROL_GROUP) -> HostMemory:
    """What the machine has, or the control group lets a process have. Raises OSError where the kernel does not tell it so."""
    fields = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024 if rest.split() else 0
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limits = group_limits(group)
    if limits.memory is None:
        return HostMemory(total, available)
    return HostMemory(min(total, limits.memory), min(available, max(0, limits.memory - limits.used)))


def group_limits(root: Path = CONTROL_GROUP) -> GroupLimits:
    """What the control group allows."""

    def read(*names: str) -> str:
        for name in names:
            with contextlib.suppress(OSError):
                return (root / name).read_text().strip()
        return ""

    def number(text: str) -> int | None:
        # Version 1 writes a number near 2**63 for no limit.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None

    share = read("cpu.max").split() or [read("cpu/cpu.cfs_quota_us"), read("cpu/cpu.cfs_period_us")]
    quota, period = number(share[0]), number(share[-1])
    cores = quota / period if quota and period and len(share) == 2 else None
    limit = number(read("memory.max", "memory/memory.limit_in_bytes"))
    return GroupLimits(cores, limit, number(read("memory.current", "memory/memory.usage_in_bytes")) or 0)
