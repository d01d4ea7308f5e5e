"""Experiment trackers: the plug-in interface, and the process that feeds one tracker from `metrics.jsonl`.

A tracker is a plug-in in the entry-point group `gcore.trackers`: a `TrackerKind`, or a function that opens a tracker. A
custom tracker needs only this module of gcore. It runs in its own process, which may end at any time and is restarted,
possibly on another node, until the job has ended or its controller releases it:

    controller -> process (stdin)    first a JSON document (uid, name, spec, options), then a line whenever there is more
    process -> controller (stdout)   JSON, one object per line: {"ready": true}, {"offset": 1234}, {"error": "one sentence"}

Each line of the metrics file is delivered to the tracker at least once: the cursor (`trackers/NAME/cursor.json` in the
run folder) is written after the tracker has flushed. A process that ends in between delivers the last lines again, and
none is lost. Lines with a known sequence number are skipped. Output of the tracker's package goes to the log. When
stdin ends, the process delivers the rest of the file and ends after at most `LAST_S` seconds, even if the package still
waits for a network. A lock in the tracker's folder prevents that two processes feed one tracker. The process does not
validate the spec and does not read the store, so it imports neither `gcore.config.spec` nor most of `gcore.ledger`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from gcore.config.base import Option
from gcore.errors import GcoreError, SpecError, did_you_mean
from gcore.ledger.records.job import METRICS_FILE
from gcore.observability.metrics_file import Line, read_lines
from gcore.plugins import PluginKind, error_sentence, find_plugin
from gcore.schema import Record, UnreadableRecord
from gcore.system import daemon as logs
from gcore.system.files import replace_file

if TYPE_CHECKING:
    from gcore.config.spec import TrackerSpec

Options = Mapping[str, Option]


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics at one point of a run.

    After a rollback, `step` continues from the checkpoint's step in the next `lineage`. `seq`: number of the newest log
    entry, which only increases. `time`: seconds since the epoch.
    """

    seq: int
    lineage: int
    step: int
    time: float
    metrics: Mapping[str, float]
    """Finite numbers, with names such as "train/loss" and "eval/accuracy"."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker needs to know of a run. `uid`: the job's permanent ID. `folder`: exists and belongs to the
    tracker.
    """

    uid: str
    name: str
    run_dir: Path
    folder: Path
    spec: Mapping[str, Any]
    """The job spec with all defaults filled in, to be logged as hyperparameters."""
    next_step: int | None = None
    """The first step to log; None if nothing of this run was logged before."""


class Tracker(Protocol):
    """Interface of a tracker: receives metrics. It may block. If it raises, its process ends and is restarted."""

    def log(self, point: Point) -> None:
        """Log the metrics of a step or an evaluation."""
        ...

    def rolled_back(self, point: Point, reason: str) -> None:
        """Record a rollback: the steps after `point.step` repeat in lineage `point.lineage`."""
        ...

    def flush(self) -> None:
        """Make everything that was logged so far durable. It is not logged again after a restart."""
        ...

    def finish(self, state: str | None) -> None:
        """Close the tracker. `state`: final phase of the job; None: the job continues, but this process ends."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """A kind of tracker: how to open it, and what to check before.

    `module`: the Python package that it needs. `install`: argument of `pip install` for it. `options`: names of its
    options.
    """

    opens: Callable[[TrackedRun, Options], Tracker]
    module: str = ""
    install: str = ""
    options: frozenset[str] | None = None
    """None: any options are accepted."""

    def __call__(self, run: TrackedRun, options: Options) -> Tracker:
        """Open the tracker. Raises what its package raises."""
        return self.opens(run, options)


def flattened(spec: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Flatten a nested mapping to hyperparameters with dotted names; lists and unset values become text."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


TRACKERS = PluginKind("tracker", "gcore.trackers", "tracking")


def find_tracker(name: str) -> TrackerKind:
    """Return the tracker with this entry-point name. Raises SpecError with the nearest name if it is unknown."""
    found = find_plugin(TRACKERS, name)
    return found if isinstance(found, TrackerKind) else TrackerKind(found)


def check_trackers(trackers: Iterable[TrackerSpec]) -> None:
    """Raise SpecError for a tracker that is unknown, not installed here, or has an unknown option."""
    for tracker in trackers:
        kind = find_tracker(tracker.name)
        if kind.module and find_spec(kind.module) is None:
            raise SpecError(
                f"tracker {tracker.name!r} needs the Python package {kind.module}, which is not installed",
                where="tracking",
                fix=f"Install it where controllers run: pip install '{kind.install}'",
            )
        for option in sorted(tracker.options):
            if kind.options is not None and option not in kind.options:
                known = sorted(kind.options)
                hint = did_you_mean(option, known)
                raise SpecError(
                    f"tracker {tracker.name!r} has no option {option!r}{hint}",
                    where="tracking",
                    fix=f"Use one of {', '.join(known)}",
                )


BATCH = 256
"""Number of lines after which the tracker is flushed and the cursor written, if there are more lines."""


class Cursor(Record):
    """A tracker's progress in the metrics file.

    `offset`: byte up to which lines were delivered. `seq`, `step`: those of the newest delivered log entry. `done`:
    whether the job's end was delivered.
    """

    offset: int = 0
    seq: int = -1
    step: int = 0
    done: bool = False


def load_cursor(path: Path) -> Cursor:
    """Read a cursor. Without a readable one, return the start of the file, so that everything is logged again."""
    try:
        return Cursor.decode(path.read_bytes(), str(path))
    except (FileNotFoundError, UnreadableRecord):
        return Cursor()


class Feeder:
    """Delivers lines of the metrics file to one tracker. Calls `progress` after each write of the cursor."""

    def __init__(self, metrics: Path, cursor_file: Path, tracker: Tracker, progress: Callable[[Cursor], None]) -> None:
        self._metrics = metrics
        self._cursor_file = cursor_file
        self._tracker = tracker
        self._progress = progress
        self.cursor = load_cursor(cursor_file)

    def feed(self) -> None:
        """Deliver all new lines of the file to the tracker. Raises OSError and whatever the tracker raises."""
        try:
            file = self._metrics.open("rb")
        except FileNotFoundError:
            return
        with file:
            if (
                file.seek(0, os.SEEK_END) < self.cursor.offset
            ):  # the file was rewritten; sequence numbers identify known lines
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
        replace_file(self._cursor_file, self.cursor.encode())
        self._progress(self.cursor)

    def _give(self, line: Line) -> Cursor:
        """Deliver a line and return the cursor after it, without the offset."""
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


log = logging.getLogger(__name__)

LAST_S = 45.0
"""Maximum seconds for the remaining lines after the controller has released the process."""

LOOK_ANYWAY_S = 5.0
LONGEST_ERROR = 2000
FAILED, STUCK, BUSY = 1, 3, 75


def tracker_folder(run_dir: Path, name: str) -> Path:
    """Return the folder of one tracker in the run folder."""
    return run_dir / "trackers" / name


@dataclass(frozen=True, slots=True)
class TrackerDocument:
    """Launch document of a tracker process: the first line that the controller sends."""

    uid: str
    name: str
    spec: dict[str, Any]
    options: dict[str, Option]

    def encode(self) -> bytes:
        """Return the document as one line."""
        return (
            json.dumps({"uid": self.uid, "name": self.name, "spec": self.spec, "options": self.options}).encode()
            + b"\n"
        )

    @classmethod
    def decode(cls, line: bytes) -> TrackerDocument:
        """Parse the line that `encode` made. Raises ValueError, KeyError."""
        tree = json.loads(line)
        return cls(tree["uid"], tree["name"], tree["spec"], tree["options"])


class _Line:
    """The pipe to the controller. If it is broken, the process continues: the controller may be gone while lines
    remain.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, **words: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(words).encode() + b"\n")


class _Ear:
    """Reads stdin in a thread. `woken`: set when the controller reports more lines. `over`: set when stdin has ended."""

    def __init__(self, stdin: BinaryIO) -> None:
        self._stdin = stdin
        self.woken = threading.Event()
        self.over = threading.Event()

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="controller", daemon=True).start()

    def _listen(self) -> None:
        while self._stdin.readline():
            self.woken.set()
        self.over.set()
        self.woken.set()
        _at_the_latest(LAST_S, STUCK)


def main() -> None:
    """Run the tracker process (`python -m gcore.tracking`). Never returns."""
    parser = argparse.ArgumentParser(prog="python -m gcore.tracking")
    parser.add_argument("--home", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--tracker", required=True)
    arguments = parser.parse_args()
    logs.set_up_logging()
    line = _Line(os.dup(1))
    os.dup2(2, 1)  # send packages' output to the log, because stdout is for the controller
    try:
        code = feed_tracker(arguments.run_dir, arguments.tracker, sys.stdin.buffer, line)
    except GcoreError as error:
        line.say(error=" ".join(str(error).split())[:LONGEST_ERROR])
        code = FAILED
    except Exception as error:  # foreign code
        log.exception("the tracker failed")
        line.say(error=error_sentence(error))
        code = FAILED
    sys.stderr.flush()
    os._exit(code)  # do not wait for threads of a package


def feed_tracker(run_dir: Path, name: str, stdin: BinaryIO, line: _Line) -> int:
    """Open the tracker `name` and feed it until the job has ended or stdin has ended. Returns the exit code.

    Raises whatever the tracker raises.
    """
    document = TrackerDocument.decode(stdin.readline())
    ear = _Ear(stdin)
    ear.listen()
    folder = tracker_folder(run_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return BUSY
        except OSError:
            pass  # a file system without locks
        cursor = load_cursor(folder / "cursor.json")
        line.say(offset=cursor.offset)
        if cursor.done:
            return 0
        following = cursor.step + 1 if cursor.seq >= 0 else None
        run = TrackedRun(document.uid, document.name, run_dir, folder, document.spec, following)
        tracker = find_tracker(name)(run, document.options)
        line.say(ready=True)

        def progress(cursor: Cursor) -> None:
            line.say(offset=cursor.offset)

        feeder = Feeder(run_dir / METRICS_FILE, folder / "cursor.json", tracker, progress)
        try:
            return _feed(feeder, tracker, ear)
        except Exception as error:
            line.say(error=error_sentence(error))
            _at_the_latest(LAST_S, FAILED)
            with contextlib.suppress(Exception):  # data that the package accepted earlier may still be on its way
                tracker.finish(None)
            raise


def _feed(feeder: Feeder, tracker: Tracker, ear: _Ear) -> int:
    while True:
        over = ear.over.is_set()
        ear.woken.clear()
        feeder.feed()
        if feeder.cursor.done:
            return 0
        if over:
            tracker.finish(None)
            return 0
        ear.woken.wait(LOOK_ANYWAY_S)


def _at_the_latest(seconds: float, code: int) -> None:
    """End the process with exit code `code` after `seconds`, unless it has ended before."""
    last = threading.Timer(seconds, os._exit, (code,))
    last.daemon = True
    last.start()
