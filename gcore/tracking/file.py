"""`metrics.jsonl` in a run's folder: appended by one controller at a time, right whoever writes.

Whoever writes locks the file, reads what was added since it last looked, and appends only what is missing by content: so
a controller that takes over, or wakes up late with an old view, adds nothing twice. A last line without its end was being
written when its writer died or the disk was full; it is cut off before the next is written. Where the file system knows no
locks, the order of turns and the content are all there is; readers pass over a line whose number they have seen.

Nothing here waits for a lock: it blocks on the disk only, and is called off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from gcore.ledger.records import LogEntry
from gcore.tracking.lines import Line, Source, Written, decode, encode, fresh, gap

FILE = "metrics.jsonl"
READ_BYTES = 1 << 20


class Busy(Exception):
    """Somebody else is writing at this moment."""


class MetricsFile:
    """One writer's hand on the file. A second thread of the same process finds it busy."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self._offset = 0
        self._thread = threading.Lock()
        self.written = Written()
        """What the file held when it was last looked at."""

    def bring(
        self, source: Source, wall: float, archived: Callable[[], dict[int, LogEntry]], *, whole: bool = True
    ) -> int:
        """Append what `source` has and the file lacks; how many lines that were. Raises Busy, OSError, ValueError.

        `archived`: entries that left the store; only asked where there is a gap. If it does not fill it, nothing is
        written (ValueError): what is missing may not be seen here yet. Without `whole` it is passed over.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(self._thread), self.path.open("a+b") as file, _locked(file):
            self._catch_up(file)
            if gap(self.written, source):
                source = Source(source.job, source.status, archived() | dict(source.log), source.evaluations)
                if whole and gap(self.written, source):
                    raise ValueError(f"entries after {self.written.seq} are neither in the store nor archived")
            lines = fresh(self.written, source, wall)
            if lines:
                file.write(encode(lines))
                file.flush()
                self._offset = file.tell()
                for line in lines:
                    self.written = self.written.after(line)
            return len(lines)

    def _catch_up(self, file: BinaryIO) -> None:
        size = file.seek(0, os.SEEK_END)
        if size < self._offset:  # cut by a stranger; what stands there now is what counts
            self._offset, self.written = 0, Written()
        for line, end in read_lines(file, self._offset):
            self._offset = end
            if line is not None:
                self.written = self.written.after(line)
        if self._offset < size:
            file.truncate(self._offset)
        file.seek(0, os.SEEK_END)


def read_lines(file: BinaryIO, offset: int) -> Iterator[tuple[Line | None, int]]:
    """The whole lines from `offset` on (None for what is no line), each with the offset behind it."""
    file.seek(offset)
    rest = b""
    while block := file.read(READ_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for raw in whole:
            offset += len(raw) + 1
            yield decode(raw), offset


@contextlib.contextmanager
def _alone(lock: threading.Lock) -> Iterator[None]:
    """Raises Busy."""
    if not lock.acquire(blocking=False):
        raise Busy
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Raises Busy. Where there are no locks, there is none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy from None
    except OSError:
        pass  # a file system without locks
    yield  # closing the file lets go
