"""The file `events.jsonl` in a run's folder: each event once, one JSON object a line, each line by one append.

A line that a crash cut off is removed when the file is opened again. Events that cannot be written wait in memory; they never end a run.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import TracebackType

from gcore.errors import GcoreError
from gcore.observability.events import JobEvent

FILE_NAME = "events.jsonl"

MOST_WAITING = 10_000
"""Maximum number of events that wait to be written. If there are more, the oldest are dropped."""


class EventFile:
    """`events.jsonl` of a run, open for appending. Use it as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        """Create the folder if needed, and remove a truncated last line. Raises GcoreError."""
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
        """Write the event, after earlier ones that could not be written yet. Returns why writing failed; empty if it
        succeeded."""
        self._waiting.append(event)
        try:
            while self._waiting:
                self.append(self._waiting[0])
                self._waiting.popleft()
        except GcoreError as error:
            return str(error)
        return ""

    def append(self, event: JobEvent) -> None:
        """Write the event, unless the file already has it. Raises GcoreError."""
        if event.sequence <= self.last:
            return
        data = (event.to_line() + "\n").encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise self._explained(error) from error
        if written < len(data):  # The disk is full: remove the partial line.
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise GcoreError("cannot write the events (no space left)", where=str(self.path), fix="Free disk space")
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
            fix="Make the run folder writable from this machine",
        )
