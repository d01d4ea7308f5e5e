"""Keeps a daemon small: what its libraries take at the start, and what is given back when a job has ended.

A node's memory and cores belong to its workers. Linux with glibc; elsewhere nothing is given back, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from gcore.worker.threads import thread_environment


def slim_down() -> None:
    """Before anything else is imported: no pools of threads, and no command line of a library's own.

    httpx brings one, and with it click, rich and pygments: 4 MB and 0.1 s that a daemon has no use for.
    """
    os.environ.update(thread_environment(1))
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


def give_back() -> None:
    """Return freed memory to the system. Takes some milliseconds."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
