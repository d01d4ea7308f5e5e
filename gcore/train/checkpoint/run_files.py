"""Files that train ranks write into the run folder: background checkpoint writes, retries, and receipts.

A receipt records what a rank trained in one step; the audit compares it with the log. A checkpoint is written from a
snapshot that no step changes, in its own thread, one at a time. It is `saved` when it is complete and on disk under its
name. Until then it is a hidden folder, which the next world (set of training processes) removes if the process is
killed. A disk error does not stop training: the write ends with its reason, and the next due checkpoint is the next
try. The last checkpoint of a job is retried until it is written or the process ends.
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
    """The run folder as one rank sees it, with a check that the path still leads to the same folder. Thread-safe.

    If a mount is lost or the folder is moved away, a writer that creates missing folders would continue in an empty
    folder, with checkpoints that no other node sees and receipts that the audit misses. Therefore each write first
    calls `check`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None
        self.check()

    def check(self) -> None:
        """Raise OSError if the path leads to another folder than at the first check, or to none any more.

        Before it was found for the first time, the folder may be missing.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            if self._known is None:
                return
            raise
        if self._known is None:
            self._known = (found.st_dev, found.st_ino)
        elif self._known != (found.st_dev, found.st_ino):
            raise OSError(errno.ESTALE, "the run folder was replaced by another folder", str(self.path))


log = logging.getLogger("gcore.train")

WRITE_AGAIN_S = 5.0
"""Seconds between a failed try to write weights or a receipt and the next."""

TELL_S = 0.5
"""Seconds between progress reports while a retry is awaited."""

Highest = Callable[[Sequence[float]], list[float]]
"""Maximum of each number over the ranks; a collective."""


class WriteRefused(GcoreError):
    """The run folder did not accept files that training needs, in spite of retries."""


class RetryingWriter:
    """Writes files that a step needs (staged weights, receipts), with retries on all ranks until the run folder accepts
    them.

    A full disk must not end a world, because the next world would find the same disk. All ranks try together, because
    gathering weights is a collective, and all learn why a try failed. `show` gets the error that is being retried, and
    an empty text when it is over. If the folder accepts nothing for `limit_s`, the watchdog's limit, the world ends
    with an error that names the folder. Errors other than disk errors are raised at once.
    """

    def __init__(self, show: Callable[[str], None], limit_s: float, again_s: float = WRITE_AGAIN_S) -> None:
        self._show = show
        self._limit_s = limit_s
        self._again_s = again_s

    def until_taken(
        self, what: str, where: Path, attempt: Callable[[], None], highest: Highest, tell: Callable[[], None]
    ) -> None:
        """Run `attempt` on all ranks until it fails on none. A collective. Raises WriteRefused on every rank.

        `attempt` may raise OSError or DiskFull only after its own collectives. `what` and `where` name the file and its
        folder in messages. `tell` is called while a retry is awaited, so that the watchdog sees progress.
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
                    f"{why}, after retries for {waited:.0f} s",
                    where=str(where),
                    fix="Free space on this disk, or repair it; train.watchdog_s sets the time limit",
                )
            self._show(f"{why}: {where}; retrying for {self._limit_s:.0f} s")
            self._pause(tell)
            waited += self._again_s

    def _pause(self, tell: Callable[[], None]) -> None:
        left = self._again_s
        while left > 0:
            threading.Event().wait(min(left, TELL_S))  # sleeps; the event is never set
            left -= TELL_S
            tell()


def _tried(attempt: Callable[[], None], where: Path) -> int:
    """Run `attempt`; returns the error number (errno) of its disk error, or 0."""
    try:
        attempt()
    except (OSError, DiskFull) as error:
        log.warning("%s: %s", where, error)
        cause = error.__cause__ if isinstance(error, DiskFull) else error
        return (cause.errno if isinstance(cause, OSError) else None) or errno.EIO
    return 0


@dataclass(frozen=True, slots=True)
class ReceiptWriter:
    """Writes a rank's receipts: one JSON line per trained token (lineage, step, attempt), with the samples that it
    trained.

    The line is on disk before the rank reports the step as applied. The audit compares receipts with the log. A line
    without newline was being written when its rank died, before anything was reported. Receipts of a discarded world
    stay; they name their world.
    """

    run_dir: Path
    world: str
    rank: int
    folder: RunFolder | None = None
    """If set, its `check` is called before each write."""

    @property
    def file(self) -> Path:
        """The path of this rank's receipts: one file per world and rank."""
        return receipts_file(self.run_dir, self.world, self.rank)

    def write(self, work: StepInput, loss: float | None) -> None:
        """Append the receipt of a trained step and fsync it. `loss`: of the step, or None.

        Raises OSError; then nothing of it is in the file, and it may be written again.
        """
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
                if is_new:  # a new file also needs its directory entry on disk
                    sync_path(path.parent)
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(before)
                raise

    def _fields(self, work: StepInput, loss: float | None) -> dict[str, object]:
        by_group: dict[int, list[int]] = {}
        slot: SampleSlot
        for slot in work.layout.receipt_of(work.rank):
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
    while left:  # a full disk accepts a part first, and fails at the next write
        left = left[file.write(left) :]


CHECKPOINT_AGAIN_S = 10.0
"""Seconds between a failed try to write the job's last checkpoint and the next."""

CHECKPOINT = "checkpoint"
"""Phase of a rank that takes a snapshot, waits for the previous checkpoint write, or writes while no step runs."""

WriteCallback = Callable[[int], None]
"""Called with the number of bytes written to disk since the last call."""

Fill = Callable[[Path, WriteCallback], None]
"""Writes a complete checkpoint into the given folder. Raises OSError."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A complete checkpoint on disk: its folder, relative to the run folder, and the digest of its manifest."""

    version: Version
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """Progress of the newest checkpoint write.

    `written` of about `total` bytes are on disk. `error`: why the last try failed, or empty. `over`: no further try
    follows; without an error the checkpoint is saved, or the write was given up.
    """

    version: Version
    total: int
    written: int = 0
    error: str = ""
    over: bool = False


class _GivenUp(Exception):
    """Ends a write in the writing thread, because the process is about to end."""


class BackgroundWriter:
    """Writes one rank's checkpoints in a thread of its own, one at a time.

    `saved` (the newest complete checkpoint), `writing` and `trouble` may be read from any thread. `show` is called from
    the writing thread at each change of them. `owner`: the world, which names its hidden folders.
    """

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
        """The error of a step's own files (weights or receipt) that the run folder does not accept and that are being
        retried.
        """

    def hindered(self, trouble: str) -> None:
        """Set `trouble`: the error of the weights or receipt that are being retried; empty: none."""
        self.trouble = trouble
        self._show()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written or will be retried."""
        return self._write is not None and not self._write.done()

    def begin(self, version: Version, total: int, fill: Fill, *, insist: bool) -> None:
        """Start to write the checkpoint of `version` in the background: `fill` writes its files, about `total` bytes.

        `insist`: retry after disk errors until it is written. Raises ValueError when busy.
        """
        if self.busy:
            raise ValueError(f"checkpoint {version} cannot be written while another one is being written")
        self.writing = WriteProgress(version, total)
        self._write = self._thread.submit(self._run, version, fill, insist)
        self._write.add_done_callback(lambda _: self._show())

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the current checkpoint write; returns whether none is running.

        Raises the write's error if it was not a disk error.
        """
        if self._write is None or self._given_up.is_set():
            return True
        if not wait({self._write}, timeout=seconds).done:
            return False
        self._write.result()
        return True

    def defect(self) -> BaseException | None:
        """The error of the last checkpoint write if it was not a disk error, which means a bug; else None."""
        return self._write.exception() if self._write is not None and self._write.done() else None

    def give_up(self, seconds: float) -> None:
        """Cancel the checkpoint write because the process ends. Waits up to `seconds` until the write has removed its
        files.
        """
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
            except (OSError, GcoreError) as error:
                # GcoreError: a file that was just written and cannot be read is also a disk error.
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
            fault_point(FaultPoint.CHECKPOINT, "before")  # part of it is on disk, without its name
        self._note(replace(self._now, written=self._now.written + count))

    @property
    def _now(self) -> WriteProgress:
        assert self.writing is not None
        return self.writing

    def _note(self, writing: WriteProgress) -> None:
        self.writing = writing
        self._show()


def _reason(error: OSError | GcoreError) -> str:
    """A disk error in one line, without its path, which would be a hidden folder."""
    if isinstance(error, GcoreError):
        return error.what
    return f"{error.strerror or type(error).__name__}"


def _nobody() -> None:
    """Do nothing: the default for `show`."""
