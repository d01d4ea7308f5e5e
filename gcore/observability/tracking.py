"""Experiment trackers: the plug-in interface, and the process that feeds one tracker from `metrics.jsonl`.

A tracker is a plug-in under the entry-point group `gcore.trackers`: a `TrackerKind`, or a function that opens one; a tracker of
one's own needs nothing of gcore but this module. It runs in a process of its own, which may end at any moment and is started
again, also on another node, until the job has ended or its controller lets go:

    controller -> process (stdin)    first a JSON document (uid, name, spec, options), then a line whenever there is more
    process -> controller (stdout)   JSON, one object a line: {"ready": true}, {"offset": 1234}, {"error": "one sentence"}

Each line is given at least once: the cursor (`trackers/NAME/cursor.json` in the run's folder) is written after the tracker has
flushed, so a process that ends in between gives the last lines again, and none is left out. Lines whose number was seen are passed
over. What the tracker's package prints goes to the log. When stdin ends, the rest of the file is still given, and the process ends
after a bounded time: a package that waits for a network must not outlive everything. A lock in the tracker's folder keeps two
processes from feeding it at once. It validates no spec and reads no chain, so it loads neither `gcore.config.spec` nor the rest of
`gcore.ledger`.
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
    """Numbers of one moment of a run.

    `step` counts anew from where a rollback went back to, in the next `lineage`; `seq` only ever grows, and is that of the
    newest line of the chain. `time` is in seconds since the epoch.
    """

    seq: int
    lineage: int
    step: int
    time: float
    metrics: Mapping[str, float]
    """Finite numbers, named "train/loss", "eval/accuracy"."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run, as a tracker is told of it. `uid` names it for ever, `folder` (which exists) is the tracker's own."""

    uid: str
    name: str
    run_dir: Path
    folder: Path
    spec: Mapping[str, Any]
    """The resolved job spec: the hyperparameters."""
    next_step: int | None = None
    """What comes first; None: nothing of this run was logged before."""


class Tracker(Protocol):
    """Takes numbers. Whatever it raises ends its process, which is started again. May block; nobody waits for it."""

    def log(self, point: Point) -> None:
        """A step's numbers, or an evaluation's."""
        ...

    def rolled_back(self, point: Point, reason: str) -> None:
        """The steps after `point.step` are made again, from here on in `point.lineage`."""
        ...

    def flush(self) -> None:
        """Let go of what was logged: after this it is not logged again."""
        ...

    def finish(self, state: str | None) -> None:
        """The job has ended (SUCCEEDED, FAILED, CANCELLED); None: it goes on, but this process does not."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerKind:
    """How a tracker is opened, and what can be checked before: the module it needs, what installs it, its options."""

    opens: Callable[[TrackedRun, Options], Tracker]
    module: str = ""
    install: str = ""
    options: frozenset[str] | None = None
    """None: whatever the spec gives."""

    def __call__(self, run: TrackedRun, options: Options) -> Tracker:
        """Open it. Raises what its package raises."""
        return self.opens(run, options)


def flattened(spec: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Hyperparameters with dotted names; lists and what is not set as text."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


TRACKERS = PluginKind("tracker", "gcore.trackers", "tracking")


def find_tracker(name: str) -> TrackerKind:
    """The tracker of that entry-point name. Raises SpecError, with the nearest name if there is none."""
    found = find_plugin(TRACKERS, name)
    return found if isinstance(found, TrackerKind) else TrackerKind(found)


def check_trackers(trackers: Iterable[TrackerSpec]) -> None:
    """Raises SpecError for a tracker that is unknown, not installed here, or given an option that it does not have."""
    for tracker in trackers:
        kind = find_tracker(tracker.name)
        if kind.module and find_spec(kind.module) is None:
            raise SpecError(
                f"tracker {tracker.name!r} needs the Python package {kind.module}, which is not installed",
                where="tracking",
                fix=f"Where controllers run: pip install '{kind.install}'",
            )
        for option in sorted(tracker.options):
            if kind.options is not None and option not in kind.options:
                known = sorted(kind.options)
                hint = did_you_mean(option, known)
                raise SpecError(
                    f"tracker {tracker.name!r} has no option {option!r}{hint}",
                    where="tracking",
                    fix=f"It has: {', '.join(known)}",
                )


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
        replace_file(self._cursor_file, self.cursor.encode())
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


log = logging.getLogger(__name__)

LAST_S = 45.0
"""For what is left, once the controller has let go."""

LOOK_ANYWAY_S = 5.0
LONGEST_ERROR = 2000
FAILED, STUCK, BUSY = 1, 3, 75


def tracker_folder(run_dir: Path, name: str) -> Path:
    """Where a tracker keeps what is its own."""
    return run_dir / "trackers" / name


@dataclass(frozen=True, slots=True)
class TrackerDocument:
    """The launch document of a tracker, which the controller sends first."""

    uid: str
    name: str
    spec: dict[str, Any]
    options: dict[str, Option]

    def encode(self) -> bytes:
        """One line."""
        return (
            json.dumps({"uid": self.uid, "name": self.name, "spec": self.spec, "options": self.options}).encode()
            + b"\n"
        )

    @classmethod
    def decode(cls, line: bytes) -> TrackerDocument:
        """Inverse of `encode`. Raises ValueError, KeyError."""
        tree = json.loads(line)
        return cls(tree["uid"], tree["name"], tree["spec"], tree["options"])


class _Line:
    """The line to the controller, which takes a few KiB at once. When it is broken nobody listens, which is no reason to stop
    early."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def say(self, **words: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(words).encode() + b"\n")


class _Ear:
    """Listens on stdin in a thread."""

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
    """Never returns."""
    parser = argparse.ArgumentParser(prog="python -m gcore.tracking")
    parser.add_argument("--home", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--tracker", required=True)
    arguments = parser.parse_args()
    logs.set_up_logging()
    line = _Line(os.dup(1))
    os.dup2(2, 1)  # packages print; the controller must only hear what is meant for it
    try:
        code = feed_tracker(arguments.run_dir, arguments.tracker, sys.stdin.buffer, line)
    except GcoreError as error:
        line.say(error=" ".join(str(error).split())[:LONGEST_ERROR])
        code = FAILED
    except Exception as error:  # the edge to foreign code
        log.exception("the tracker failed")
        line.say(error=error_sentence(error))
        code = FAILED
    sys.stderr.flush()
    os._exit(code)  # threads that a package left behind must not keep it


def feed_tracker(run_dir: Path, name: str, stdin: BinaryIO, line: _Line) -> int:
    """Feed until there is no more to come. Raises whatever the tracker raises."""
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
            with contextlib.suppress(Exception):  # what the package took before that may still be on its way
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
    """End the process then, whatever it waits for."""
    last = threading.Timer(seconds, os._exit, (code,))
    last.daemon = True
    last.start()
