"""How much the cache may take, and what is said when memory runs out.

Without `cache_tokens` in the launch the cache may take a part of the memory that is free once the model is loaded:
`HOST_SHARE` of a host's, which other engines, ranks and daemons share, `DEVICE_SHARE` of a GPU's. The host's free memory is
what the kernel calls available, or what the process's control group has left where that is less. Nothing is set aside: the
cache takes memory as it fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gcore.errors import EngineError
from gcore.rollout.engine.cache import CacheShape

HOST_SHARE = 0.25
DEVICE_SHARE = 0.8
SMALLEST = 4096
"""Tokens that a default cache has in any case."""
UNMEASURED_BYTES_PER_TOKEN = 256 * 1024
"""Of a token in a cache whose layers nobody has measured (the plain lane's): about that of a model of 7B parameters."""
FIX = (
    "Lower rollout.cache_tokens (what the cache holds), rollout.batch_slots (sequences at once) or "
    "rollout.prefill_chunk_tokens (prompt tokens at once)"
)
SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def default_cache_tokens(shape: CacheShape, free_bytes: int) -> int:
    """Tokens that the cache may hold when nobody says."""
    share = HOST_SHARE if shape.device.type == "cpu" else DEVICE_SHARE
    return max(SMALLEST, int(share * free_bytes) // (shape.bytes_per_token or UNMEASURED_BYTES_PER_TOKEN))


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes(Path("/"))


def free_host_bytes(root: Path) -> int:
    """Of the host, or of the control group where that has less. `root`: where /proc and /sys are."""
    found = [_meminfo(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        # Cached files count as used, and go when memory is wanted.
        found.append(limit - used + _inactive_files(group / "memory.stat"))
    return max(0, min(found))


def _meminfo(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 2**32  # not Linux: four gibibytes


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _inactive_files(file: Path) -> int:
    try:
        for line in file.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@contextmanager
def memory_error_explained(when: str, fix: str = FIX) -> Iterator[None]:
    """An allocation that fails inside becomes an EngineError that names what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise EngineError(f"the engine ran out of memory {when} ({reason})", fix=fix) from error
