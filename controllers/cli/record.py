"""`events.jsonl` in a run's folder: every event of the job as it was followed, each once, one JSON object a line.

Each line is written by one append, so a reader sees whole lines; a line that a crash cut off is cut away when the file is
opened again, and what is there already is not written a second time. So runs that follow one another write one history.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import TracebackType

from gcore.errors import GcoreError
from gcore.events import JobEvent

FILE_NAME = "events.jsonl"
MOST_WAITING = 10_000
"""Events that could not be written and wait for room; when there are more, the oldest are left out."""


class EventFile:
    """The file, open for appending. Use it as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        """Make the folder if it is absent, and repair the file's end. Raises GcoreError."""
        self.path = run_dir / FILE_NAME
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._explained(error) from error
        self.last = self._repair()
        """The greatest sequence number in the file; 0 if it is empty."""
        self._waiting: deque[JobEvent] = deque(maxlen=MOST_WAITING)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def offer(self, event: JobEvent) -> str:
        """Write the event down, after those that could not be before. Why that cannot be done, or nothing."""
        self._waiting.append(event)
        try:
            while self._waiting:
                self.append(self._waiting[0])
                self._waiting.popleft()
        except GcoreError as error:
            return str(error)
        return ""

    def append(self, event: JobEvent) -> None:
        """Write the event down, unless it is there. Raises GcoreError."""
        if event.sequence <= self.last:
            return
        data = (event.to_line() + "\n").encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise self._explained(error) from error
        if written < len(data):  # the disk is full: leave no half line behind
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise GcoreError("cannot write the events (no space left)", where=str(self.path), fix="Make room")
        self.last = event.sequence

    def _repair(self) -> int:
        last, good = 0, 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                last = max(last, JobEvent.from_line(line.decode()).sequence)
            except ValueError:
                break
            good += len(line)
        os.ftruncate(self._fd, good)
        return last

    def _explained(self, error: OSError) -> GcoreError:
        return GcoreError(
            f"cannot write the events ({error.strerror or error})",
            where=str(self.path),
            fix="Make the run's folder writable from here",
        )
