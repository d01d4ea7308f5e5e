"""Files of a run as the train ranks write them: checkpoints in the background, retries, snapshots and tensor files.

A checkpoint is a copy that no step changes, written in a thread of its own, one at a time. It is `saved` when it is whole and
on the disk under its name; until then there is a hidden folder, which a killed process leaves and the next world removes.
A disk that takes nothing costs no step: the write ends with its reason, and the next checkpoint that is due is the next
try. The last one of a job has no next: it is retried until it is written or given up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from gcore.errors import GcoreError
from gcore.ledger.balance import SampleSlot
from gcore.models.layout import checkpoint_folder, manifest_digest, receipts_file
from gcore.schema import SCHEMA_VERSION
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.system.files import DiskFull, replace_folder, sync_path
from gcore.train.rank.feed import StepInput
from gcore.types import Version


class RunFolder:
    """The run's folder as one rank knows it, so that it does not go on in another one at the same path. Any thread.

    Where a mount is gone, or somebody moved the folder away, a writer that creates what is missing goes on in an
    empty folder: checkpoints that nobody else sees, receipts that the audit misses. So before each write it is checked
    whether the folder is the one that was found first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None
        self.check()

    def check(self) -> None:
        """Raises OSError if it is not the folder any more that was there the first time; before that there may be none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            if self._known is None:
                return
            raise
        if self._known is None:
            self._known = (found.st_dev, found.st_ino)
        elif self._known != (found.st_dev, found.st_ino):
            raise OSError(errno.ESTALE, "another folder stands where the run's was", str(self.path))


log = logging.getLogger("gcore.train")

WRITE_AGAIN_S = 5.0
"""After a try that failed, until the next."""

TELL_S = 0.5
"""Between two signs of life meanwhile."""

Highest = Callable[[Sequence[float]], list[float]]
"""Each number's largest over the ranks; a collective."""


class WriteRefused(GcoreError):
    """The run's folder did not take what training cannot go on without."""


class RetryingWriter:
    """Writes what a step cannot go on without (staged weights, receipts) again until the run's folder takes it. Of one rank.

    A full disk must not cost a world, whose next one would meet the same disk. All ranks try together, since
    gathering weights is a collective, and all know why a try failed. `show` is told what is tried again, and nothing when it
    is over. A folder that takes nothing for `limit_s`, as long as the watchdog gives a rank, ends the world in a sentence
    that names it. Anything but a failing disk is raised at once.
    """

    def __init__(self, show: Callable[[str], None], limit_s: float, again_s: float = WRITE_AGAIN_S) -> None:
        self._show = show
        self._limit_s = limit_s
        self._again_s = again_s

    def until_taken(
        self, what: str, where: Path, attempt: Callable[[], None], highest: Highest, tell: Callable[[], None]
    ) -> None:
        """Have `attempt` made by all ranks until none of them fails. A collective. Raises WriteRefused, on every rank.

        `attempt` raises OSError or DiskFull when it has taken part in all that is collective about it.
        """
        waited = 0.0
        while True:
            (number,) = highest([float(_tried(attempt, where))])
            if not number:
                if waited:
                    self._show("")
                return
            why = f"{what} cannot be written ({os.strerror(int(number))})"
            if waited >= self._limit_s:
                raise WriteRefused(
                    f"{why}, and could not be for {waited:.0f} s",
                    where=str(where),
                    fix="Free some space on this disk, or mend it; train.watchdog_s says how long is waited",
                )
            self._show(f"{why}: {where}; it is tried again for {self._limit_s:.0f} s")
            self._pause(tell)
            waited += self._again_s

    def _pause(self, tell: Callable[[], None]) -> None:
        left = self._again_s
        while left > 0:
            threading.Event().wait(min(left, TELL_S))  # the thread's own sleep: nobody sets it
            left -= TELL_S
            tell()


def _tried(attempt: Callable[[], None], where: Path) -> int:
    """The number of the error that the disk gave, or 0."""
    try:
        attempt()
    except (OSError, DiskFull) as error:
        log.warning("%s: %s", where, error)
        cause = error.__cause__ if isinstance(error, DiskFull) else error
        return (cause.errno if isinstance(cause, OSError) else None) or errno.EIO
    return 0


@dataclass(frozen=True, slots=True)
class ReceiptWriter:
    """What a rank trained on: one JSON line a token, on the disk before the rank reports that the token is applied.

    The audit compares receipts with the log. A line that has no end was being written when its rank died; nothing was
    reported then. Receipts of a world that was rolled back stay; they name their world.
    """

    run_dir: Path
    world: str
    rank: int
    folder: RunFolder | None = None
    """Looked at before each write, if it is known."""

    @property
    def file(self) -> Path:
        """The file of this rank."""
        return receipts_file(self.run_dir, self.world, self.rank)

    def write(self, work: StepInput, loss: float | None) -> None:
        """Append the receipt of a step that was trained on, and wait until it is on the disk. Raises OSError; then nothing of
        it is there, and it may be written again."""
        if self.folder is not None:
            self.folder.check()
        path = self.file
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(self._fields(work, loss), separators=(",", ":"), allow_nan=False) + "\n"
        with path.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            try:
                _write_all(file, line.encode())
                os.fsync(file.fileno())
                if is_new:  # its name, too
                    sync_path(path.parent)
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise

    def _fields(self, work: StepInput, loss: float | None) -> dict[str, object]:
        by_group: dict[int, list[int]] = {}
        slot: SampleSlot
        for slot in work.layout.of_rank(work.rank):
            by_group.setdefault(slot.group, []).append(slot.sample)
        groups = [(work.seal.groups[number], samples) for number, samples in sorted(by_group.items())]
        return {
            "schema_version": SCHEMA_VERSION,
            "token": str(work.seal.token),
            "world": self.world,
            "rank": self.rank,
            "groups": [[str(group.ref), group.digest, samples] for group, samples in groups],
            "loss": loss,
        }


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:  # a disk that fills up takes a part, and says so at the next
        left = left[file.write(left) :]


CHECKPOINT_AGAIN_S = 10.0
"""After a try that failed, until one that insists begins the next."""

CHECKPOINT = "checkpoint"
"""The phase of a rank that copies a checkpoint, waits until the one before is written, or writes with nothing else to do."""

WriteCallback = Callable[[int], None]
"""Told how many more bytes are on their way to the disk."""

Fill = Callable[[Path, WriteCallback], None]
"""Writes all of a checkpoint into the folder it is given. Raises OSError."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is whole and on the disk: its folder, relative to the run's, and the digest of its manifest."""

    version: Version
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class WriteProgress:
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


class BackgroundWriter:
    """One rank's. `saved`, `writing` and `trouble` may be read from any thread; `show` is called from the writing one at each change."""

    def __init__(self, run_dir: Path, owner: str, show: Callable[[], None] | None = None) -> None:
        self.folder = RunFolder(run_dir)
        self._run_dir = run_dir
        self._owner = owner
        self._show = show or _nobody
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None
        self._given_up = threading.Event()
        self.again_s = CHECKPOINT_AGAIN_S
        self.saved: WrittenCheckpoint | None = None
        self.writing: WriteProgress | None = None
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
        self.writing = WriteProgress(version, total)
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

    def _once(self, version: Version, fill: Fill) -> WrittenCheckpoint:
        target = checkpoint_folder(self._run_dir, version)
        self.folder.check()
        with replace_folder(target, owner=self._owner, durable=True) as folder:
            fill(folder, self._tick)
            digest = manifest_digest(folder)
        fault_point(FaultPoint.CHECKPOINT, "after")
        return WrittenCheckpoint(version, str(target.relative_to(self._run_dir)), digest)

    def _tick(self, count: int) -> None:
        if self._given_up.is_set():
            raise _GivenUp
        if not self._now.written:
            fault_point(FaultPoint.CHECKPOINT, "before")  # something of it is on the disk, and no name
        self._note(replace(self._now, written=self._now.written + count))

    @property
    def _now(self) -> WriteProgress:
        assert self.writing is not None
        return self.writing

    def _note(self, writing: WriteProgress) -> None:
        self.writing = writing
        self._show()


def _reason(error: OSError | GcoreError) -> str:
    """A failing disk in one line, without the hidden folder's name."""
    if isinstance(error, GcoreError):
        return error.what
    return f"{error.strerror or type(error).__name__}"


def _nobody() -> None:
    """Nobody is told."""
