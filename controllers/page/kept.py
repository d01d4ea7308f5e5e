"""What was read of a run's folder, kept until there is something new in it: however many look at a job's page, its files are read once a
step. Keeps the newest few runs. Blocks on the disk; any thread. A disk that hangs keeps one thread: others wait for it `TURN_S`, for the
daemon has few threads, and other work for them than pages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

MOST_RUNS = 16
TURN_S = 1.0
T = TypeVar("T")


class Kept(Generic[T]):
    """Of one kind. `stamp` differs when `read` would bring something new. Raises what they raise, and TimeoutError, which is an OSError."""

    def __init__(self, stamp: Callable[[Path], object], read: Callable[[Path], T]) -> None:
        self._stamp = stamp
        self._read = read
        self._known: OrderedDict[Path, tuple[object, T]] = OrderedDict()
        self._turn = threading.Lock()

    def of(self, run_dir: Path) -> T:
        """Of a run's folder."""
        if not self._turn.acquire(timeout=TURN_S):
            raise TimeoutError(f"{run_dir} is not read: the disk has not answered to who asked before")
        try:
            now = self._stamp(run_dir)
            known = self._known.get(run_dir)
            if known is None or known[0] != now:
                known = self._known[run_dir] = now, self._read(run_dir)
            self._known.move_to_end(run_dir)
            while len(self._known) > MOST_RUNS:
                self._known.popitem(last=False)
            return known[1]
        finally:
            self._turn.release()
