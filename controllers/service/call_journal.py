"""Who did what: one line of JSON for each call that changes something, and for each that was refused, in a file of this daemon.

`{"time", "caller", "role", "peer", "verb", "job", "outcome", "reason"}`; `peer` is where the call came from, `outcome` a status of gRPC or HTTP.
Never what a call showed, nor what it carried. The file is turned over at a size, and a few old ones stay: it never grows beyond
that. Calls of which nobody knows whose they are stand in a file beside it (`refused-...`), so that whoever knocks often drives no
line of the others out. Lines are written by a thread, behind the calls; where the disk takes none, the newest thousands wait, then the oldest of these are
dropped, and the log says so. Only the daemon's owner can read it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from gcore.clock import Clock

log = logging.getLogger(__name__)

MOST_WAITING = 4096
MOST_OF_A_FIELD = 200
END_S = 2.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What is told of a call."""

    caller: str
    role: str
    peer: str
    verb: str
    job: str
    outcome: str
    reason: str = ""


class CallJournal:
    """`file` None: nothing is kept. `most_bytes` of a file, `kept` old ones."""

    def __init__(self, file: Path | None, clock: Clock, *, most_bytes: int = 16 << 20, kept: int = 4) -> None:
        self._file = file
        self._clock = clock
        self._most_bytes = most_bytes
        self._kept = kept
        self._lines: queue.Queue[tuple[Path, bytes] | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if file is not None:
            self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
            self._thread.start()

    def note(self, entry: Entry) -> None:
        """A call has ended. Never waits; any thread."""
        if self._file is None:
            return
        tree = {"time": round(self._clock.wall(), 3)} | {
            name: getattr(entry, name)[:MOST_OF_A_FIELD] for name in Entry.__slots__ if getattr(entry, name)
        }
        line = json.dumps(tree).encode() + b"\n"
        file = self._file
        if not entry.role:
            file = file.with_name(f"refused-{file.name}")
            if self._lines.qsize() > MOST_WAITING // 2:
                return
        while True:
            try:
                self._lines.put_nowait((file, line))
                return
            except queue.Full:
                self._drop_oldest()

    def close(self) -> None:
        """What is left is written, if the disk takes it soon."""
        if self._thread is not None:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                self._drop_oldest()
                self._lines.put(None)
            self._thread.join(END_S)

    def _drop_oldest(self) -> None:
        try:
            self._lines.get_nowait()
        except queue.Empty:
            return
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:
            log.error("%s takes nothing: %d lines of who did what are lost so far", self._file, self._dropped)

    def _write_all(self) -> None:
        while (next_one := self._lines.get()) is not None:
            path, line = next_one
            try:
                self._turn_over(path, len(line))
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                    file.write(line)
            except OSError as error:
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:
                    log.error(
                        "who did what cannot be written to %s (%s): %d lines are lost so far",
                        self._file,
                        error,
                        self._dropped,
                    )

    def _turn_over(self, file: Path, more: int) -> None:
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            file.parent.mkdir(parents=True, exist_ok=True)
            return
        if size + more <= self._most_bytes:
            return
        names = [file, *(file.with_name(f"{file.name}.{number}") for number in range(1, self._kept + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        if self._kept == 0:
            file.unlink()
