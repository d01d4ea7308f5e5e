"""Checkpoints go to the disk in a thread of their own, beside the steps that follow: one at a time.

What is written is a copy that no step changes (`gcore.train.snapshot`). A checkpoint is `saved` when it is whole and on the
disk, under its name; until then there is a hidden folder, which a killed process leaves and the next world sweeps. A disk
that takes nothing costs no step: the write is over, its reason is shown, and the next checkpoint that is due is the next try.
The last one of a job has no next: it `insists`, and is tried again until it is there or given up.

Anything but a failing disk, or a file that cannot be had, is a defect, and is raised in whoever waits or asks for it. Does not know torch, nor who is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from gcore.atomic import whole_folder
from gcore.errors import GcoreError
from gcore.fault_points import At, point
from gcore.train.run_folder import RunFolder
from gcore.types import Version
from gcore.weights.layout import checkpoint_folder, manifest_digest

AGAIN_S = 10.0
"""After a try that failed, until one that insists begins the next."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that copies a checkpoint, waits until the one before is written, or writes with nothing else to do."""

Tick = Callable[[int], None]
"""Told how many more bytes are on their way to the disk."""
Fill = Callable[[Path, Tick], None]
"""Writes all of a checkpoint into the folder it is given. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is whole and on the disk: its folder, relative to the run's, and the digest of its manifest."""

    version: Version
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Writing:
    """How the newest write stands. Bytes of `total`; `error`: why the last try failed, empty if none did yet.

    `over`: nothing more comes of it; without an error it is saved, or was given up.
    """

    version: Version
    total: int
    written: int = 0
    error: str = ""
    over: bool = False


class _GivenUp(Exception):
    """The process is about to end."""


class CheckpointWriter:
    """One rank's. `saved`, `writing` and `trouble` may be read from any thread; `show` is called from the writing one at each change."""

    def __init__(self, run_dir: Path, owner: str, show: Callable[[], None] | None = None) -> None:
        self.folder = RunFolder(run_dir)
        self._run_dir = run_dir
        self._owner = owner
        self._show = show or _nobody
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        self._given_up = threading.Event()
        self.again_s = AGAIN_S
        self.saved: Saved | None = None
        self.writing: Writing | None = None
        self.trouble = ""
        """What else the run's folder does not take, and is tried again."""

    def hindered(self, trouble: str) -> None:
        """Show what else it does not take; nothing: it does."""
        self.trouble = trouble
        self._show()

    @property
    def busy(self) -> bool:
        """Whether a write is under way, or is to be tried again."""
        return self._write is not None and not self._write.done()

    def begin(self, version: Version, total: int, fill: Fill, *, insist: bool) -> None:
        """Write the checkpoint of `version`, of about `total` bytes, in the background. Only when not busy."""
        if self.busy:
            raise ValueError(f"{version} is to be written while another checkpoint is")
        self.writing = Writing(version, total)
        self._write = self._thread.submit(self._run, version, fill, insist)
        self._write.add_done_callback(lambda _: self._show())

    def wait(self, seconds: float) -> bool:
        """Wait so long for the write under way; whether none is any more. Raises what was a defect in it."""
        if self._write is None or self._given_up.is_set():
            return True
        if not wait({self._write}, timeout=seconds).done:
            return False
        self._write.result()
        return True

    def defect(self) -> BaseException | None:
        """What the last write ended with, if that was no failing disk."""
        return self._write.exception() if self._write is not None and self._write.done() else None

    def give_up(self, seconds: float) -> None:
        """End what is under way, for the process is about to; wait so long until nothing half-written is left."""
        self._given_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._write is not None:
            wait({self._write}, timeout=seconds)

    def _run(self, version: Version, fill: Fill, insist: bool) -> None:
        while True:
            try:
                self.saved = self._once(version, fill)
            except _GivenUp:
                self._note(replace(self._now, over=True))
                return
            except (OSError, GcoreError) as error:  # what was just written and cannot be read is a failing disk, too
                self._note(replace(self._now, error=_reason(error), over=not insist))
                if not insist or self._given_up.wait(self.again_s):
                    return
                self._note(replace(self._now, written=0))
            else:
                self._note(replace(self._now, error="", over=True))
                return

    def _once(self, version: Version, fill: Fill) -> Saved:
        target = checkpoint_folder(self._run_dir, version)
        self.folder.check()
        with whole_folder(target, owner=self._owner, durable=True) as folder:
            fill(folder, self._tick)
            digest = manifest_digest(folder)
        point(At.CHECKPOINT, "after")
        return Saved(version, str(target.relative_to(self._run_dir)), digest)

    def _tick(self, count: int) -> None:
        if self._given_up.is_set():
            raise _GivenUp
        if not self._now.written:
            point(At.CHECKPOINT, "before")  # something of it is on the disk, and no name
        self._note(replace(self._now, written=self._now.written + count))

    @property
    def _now(self) -> Writing:
        assert self.writing is not None
        return self.writing

    def _note(self, writing: Writing) -> None:
        self.writing = writing
        self._show()


def _reason(error: OSError | GcoreError) -> str:
    """A failing disk in one line, without the hidden folder's name."""
    if isinstance(error, GcoreError):
        return error.what
    return f"{error.strerror or type(error).__name__}"


def _nobody() -> None:
    """Nobody is told."""
