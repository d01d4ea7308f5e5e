"""A tracker's process: reads `metrics.jsonl` and feeds one tracker, until the job has ended or its controller lets go.

    controller → process (stdin)    first a JSON document (uid, name, spec, options), then a line whenever there is more
    process → controller (stdout)   JSON, one object a line: {"ready": true}, {"offset": 1234}, {"error": "one sentence"}

Whatever the tracker's package prints goes to the log. When stdin ends, what is in the file is given still, and the process
ends, at the latest after a bounded time: a package that waits for a network must not outlive everything. A lock in the
tracker's folder keeps two processes from feeding it at once.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gcore import logs
from gcore.config.base import Option
from gcore.errors import GcoreError
from gcore.plugins import sentence_of
from gcore.tracking.api import TrackedRun, Tracker
from gcore.tracking.feeding import Cursor, Feeder, load_cursor
from gcore.tracking.file import FILE
from gcore.tracking.registry import find_tracker

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
class Document:
    """What the controller says first."""

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
    def decode(cls, line: bytes) -> Document:
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
    logs.set_up()
    line = _Line(os.dup(1))
    os.dup2(2, 1)  # packages print; the controller must only hear what is meant for it
    try:
        code = track(arguments.run_dir, arguments.tracker, sys.stdin.buffer, line)
    except GcoreError as error:
        line.say(error=" ".join(str(error).split())[:LONGEST_ERROR])
        code = FAILED
    except Exception as error:  # the edge to foreign code
        log.exception("the tracker failed")
        line.say(error=sentence_of(error))
        code = FAILED
    sys.stderr.flush()
    os._exit(code)  # threads that a package left behind must not keep it


def track(run_dir: Path, name: str, stdin: BinaryIO, line: _Line) -> int:
    """Feed until there is no more to come. Raises whatever the tracker raises."""
    document = Document.decode(stdin.readline())
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

        feeder = Feeder(run_dir / FILE, folder / "cursor.json", tracker, progress)
        try:
            return _feed(feeder, tracker, ear)
        except Exception as error:
            line.say(error=sentence_of(error))
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
