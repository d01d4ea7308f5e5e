"""Memory of the machine and of this process: limits, and returning memory to the system. Imports no torch and starts nothing.

A node's memory and cores are for its workers, so daemons stay small: they return memory that libraries took at start and that ended jobs freed
(Linux with glibc only).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from gcore.system.process import thread_environment

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of a machine in bytes: all of it, and what new processes can use now."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits of a control group (version 2 or 1), and its memory use in bytes. `cores` and `memory`: None without a limit.

    `used` excludes inactive file cache, which the kernel drops when memory is needed.
    """

    cores: float | None
    memory: int | None
    used: int


def host_memory(meminfo: Path = MEMINFO, group: Path = CONTROL_GROUP) -> HostMemory:
    """Return the memory of the machine, or less if the control group limits it. Raises OSError if the kernel does not report it."""
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
    """Return the limits of the control group whose files are in `root`."""

    def read(*names: str) -> str:
        for name in names:
            with contextlib.suppress(OSError):
                return (root / name).read_text().strip()
        return ""

    def number(text: str) -> int | None:
        # Version 1 writes a number near 2**63 if there is no limit.
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None

    share = read("cpu.max").split() or [read("cpu/cpu.cfs_quota_us"), read("cpu/cpu.cfs_period_us")]
    quota, period = number(share[0]), number(share[-1])
    cores = quota / period if quota and period and len(share) == 2 else None
    limit = number(read("memory.max", "memory/memory.limit_in_bytes"))
    used = number(read("memory.current", "memory/memory.usage_in_bytes")) or 0
    stat = (line.partition(" ") for line in read("memory.stat", "memory/memory.stat").splitlines())
    inactive_files = next((number(value) for name, _, value in stat if name == "inactive_file"), None) or 0
    return GroupLimits(cores, limit, max(0, used - inactive_files))


OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "defaultcpuallocator",
)
"""Phrases in torch's out-of-memory errors, in lower case, in addition to the error type for GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device. Recognizes torch's errors without importing torch."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_WORDS)


def release_free_memory() -> None:
    """Return memory that the C library has freed but still keeps to the system (`malloc_trim`); does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def view_memory(address: int, size: int) -> memoryview:
    """Return a writable view of `size` bytes of this process from `address`. The memory's owner must outlive the view."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def drop_pages(address: int, size: int) -> int:
    """Return the whole pages within `size` bytes from `address` to the system; return the number of bytes (0 except on Linux).

    The addresses stay mapped, but the content is lost: a read returns zeros, or the file's content for a mapped file.
    """
    if sys.platform != "linux":
        return 0
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if whole <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)
    return whole if done == 0 else 0


def limit_library_pools() -> None:
    """Limit the thread pools of libraries to one thread, and keep httpx from loading its command-line program. Call it before other imports.

    That program loads click, rich and pygments, which costs a daemon 4 MB and 0.1 s.
    """
    os.environ.update(thread_environment(1))
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def trim_memory() -> None:
    """Collect garbage and return freed memory to the system. Takes some milliseconds."""
    gc.collect()
    release_free_memory()
