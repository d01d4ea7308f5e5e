"""From the lines of `metrics.jsonl` to a tracker, at least once each, from where the last process got to.

The cursor (`trackers/NAME/cursor.json` in the run's folder) is written after the tracker has let go of what it was given. So
a process that ends in between gives the last lines again; never is one left out. Lines whose number was seen are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gcore.atomic import whole_file
from gcore.schema import Record, UnreadableRecord
from gcore.tracking.api import Point, Tracker
from gcore.tracking.file import read_lines
from gcore.tracking.lines import Line

BATCH = 256
"""Lines between two flushes while there is more to give."""


class Cursor(Record):
    """How far a tracker is: bytes of the file, the newest number of the chain, its step; whether the job's end was told."""

    offset: int = 0
    seq: int = -1
    step: int = 0
    done: bool = False


def load_cursor(path: Path) -> Cursor:
    """From a file; the beginning if there is none, or none that can be read: then everything is logged again."""
    try:
        return Cursor.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, UnreadableRecord):
        return Cursor()


class Feeder:
    """Feeds one tracker. `progress` is told each time that the cursor was written."""

    def __init__(self, metrics: Path, cursor_file: Path, tracker: Tracker, progress: Callable[[Cursor], None]) -> None:
        self._metrics = metrics
        self._cursor_file = cursor_file
        self._tracker = tracker
        self._progress = progress
        self.cursor = load_cursor(cursor_file)

    def feed(self) -> None:
        """Give the tracker all there is. Raises OSError and whatever the tracker raises."""
        try:
            file = self._metrics.open("rb")
        except FileNotFoundError:
            return
        with file:
            if (
                file.seek(0, os.SEEK_END) < self.cursor.offset
            ):  # written anew; the numbers of its lines tell what is known
                self.cursor = self.cursor.model_copy(update={"offset": 0})
            given = 0
            for line, end in read_lines(file, self.cursor.offset):
                self.cursor = self._give(line or {}).model_copy(update={"offset": end})
                given += 1
                if given % BATCH == 0:
                    self._save()
            if given % BATCH:
                self._save()

    def _save(self) -> None:
        if not self.cursor.done:
            self._tracker.flush()
        whole_file(self._cursor_file, self.cursor.encode())
        self._progress(self.cursor)

    def _give(self, line: Line) -> Cursor:
        """The cursor after the line, its offset aside."""
        cursor, kind, seq = self.cursor, line.get("kind"), line.get("seq")
        if cursor.done:
            return cursor
        if kind == "end":
            self._tracker.finish(str(line.get("state")))
            return cursor.model_copy(update={"done": True})
        if kind == "eval":
            self._tracker.log(_point(line, cursor.seq, "eval/"))
            return cursor
        if not isinstance(seq, int) or seq <= cursor.seq:
            return cursor
        if kind == "step":
            self._tracker.log(_point(line, seq, "train/"))
        elif kind == "rollback":
            self._tracker.rolled_back(_point(line, seq, ""), str(line.get("reason", "")))
        return cursor.model_copy(update={"seq": seq, "step": int(line.get("step", 0))})


def _point(line: Line, seq: int, prefix: str) -> Point:
    metrics = {f"{prefix}{name}": float(value) for name, value in line.get("metrics", {}).items()}
    if line.get("kind") == "step":
        metrics |= {f"{prefix}{name}": float(line[name]) for name in ("groups", "filtered", "failed") if name in line}
    return Point(seq, int(line["lineage"]), int(line["step"]), float(line.get("time", 0.0)), metrics)
