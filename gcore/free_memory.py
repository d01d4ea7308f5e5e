"""Giving memory back to the machine: what was freed, and what is still held but whose contents are elsewhere. No torch."""

from __future__ import annotations

import ctypes
import mmap
import sys


def give_back_free_memory() -> None:
    """What the C library holds of freed memory goes back to the system (where that is Linux's)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def memory_at(address: int, size: int) -> memoryview:
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
