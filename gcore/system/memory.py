"""Memory of the machine and of this process: how much there is, and giving it back. No torch; nothing is started.

A node's memory and cores belong to its workers, so a daemon is kept small: what its libraries take at the start, and what is freed
when a job has ended, is given back (Linux with glibc; elsewhere nothing is).
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
    """Bytes in all, and bytes that can be had now."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Of the control group, version 2 or 1: cores, memory, None where it sets no limit; and memory in use.

    `used` leaves out cached files that nothing reads now: the kernel drops them when memory is wanted.
    """

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
"""How torch's errors say it, in small letters, besides the type of their own that they have on GPUs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device. Knows torch's errors without importing torch."""
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_WORDS)


def release_free_memory() -> None:
    """Return memory that the C library has freed to the system, where the library can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def view_memory(address: int, size: int) -> memoryview:
    """`size` bytes of this process from `address` on, to be read and written. Whoever owns them must live as long."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def drop_pages(address: int, size: int) -> int:
    """Let the system have the whole pages among `size` bytes from `address` on; the bytes that it took (none but on Linux).

    They stay this process's, at the same place, and what stood there is lost: whoever reads before it is written again reads zeros,
    or of a file that is mapped there what the file says.
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
    """Before anything else is imported: no pools of threads, and no command line of a library's own.

    httpx brings one, and with it click, rich and pygments: 4 MB and 0.1 s that a daemon has no use for.
    """
    os.environ.update(thread_environment(1))
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def trim_memory() -> None:
    """Return freed memory to the system. Takes some milliseconds."""
    gc.collect()
    release_free_memory()
