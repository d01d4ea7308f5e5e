"""The file `metrics.jsonl` in a run folder: a job's metrics, derived from its log entries, one JSON object per line.

    {"kind": "start", "seq": 0, ...}                  the chain's first entry: job, uid
    {"kind": "step", "seq": 7, "lineage": 0, "step": 6, "metrics": {"reward": 0.5, ...}, "groups": 8, ...}
    {"kind": "account", "seq": 8, ...}                prompts that ended without a step
    {"kind": "rollback", "seq": 9, "lineage": 1, "step": 4, "from_step": 6, "reason": "..."}
    {"kind": "eval", "id": "0.10", "lineage": 0, "step": 10, "metrics": {"accuracy": 0.9, ...}}
    {"kind": "end", "state": "SUCCEEDED", "reason": "..."}

A line of a log entry has the entry's number `seq`, an evaluation has its version as `id`, and there is one end. So a
writer finds in the file alone which lines are missing, and a reader can skip lines that it knows. A rollback removes no
lines: its line gives the step after which steps repeat in another lineage. If the store was restored from a backup that
is older than the job's end, more lines and another end follow the first end. Every line has `time`, when it was
written, in seconds since the epoch, for display. Numbers that are not finite are left out.

One controller at a time appends. A writer locks the file, reads the lines that were added since its last read, and
appends only missing lines. So a controller that takes over, or continues with an outdated view, adds nothing twice. An
incomplete last line is cut off before the next write. On a file system without locks, only the controllers' order of
turns and the comparison with the content protect the file. Calls block on the disk, but not on the lock, so make them
off the event loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from gcore.ledger.records.chain import LogEntry
from gcore.ledger.records.job import METRICS_FILE, Evaluation, JobRecord, JobStatus
from gcore.system.files import read_whole_lines

VERSION = 1

NO_FIGURES = {"schema_version", "version", "samples", "by", "responses_by"}
"""Fields of an evaluation that are not metrics."""

Line = dict[str, Any]
_OF_A_STEP = {"start", "step", "account", "rollback", "eval"}


@dataclass(frozen=True, slots=True)
class MetricsFileState:
    """Which lines a file contains. `seq`, `step`: those of the newest log entry with a line; -1 and 0 before the first.

    `evaluations`: versions of the evaluations. `ended`: whether the end was written.
    """

    seq: int = -1
    step: int = 0
    evaluations: frozenset[str] = frozenset()
    ended: bool = False

    def after(self, line: Line) -> MetricsFileState:
        """Return the state after one more line of the file. Lines of an unknown kind change nothing."""
        kind, seq = line.get("kind"), line.get("seq")
        if kind == "end":
            return replace(self, ended=True)
        if kind == "eval":
            return replace(self, evaluations=self.evaluations | {str(line.get("id"))})
        if isinstance(seq, int) and seq > self.seq:
            # Lines after an end continue from where it was cut off: the store was restored from a backup.
            return replace(self, seq=seq, step=int(line.get("step", self.step)), ended=False)
        return self


@dataclass(frozen=True, slots=True)
class MetricsSource:
    """The job's records from which lines are derived, as last read from the store."""

    job: JobRecord
    status: JobStatus | None
    log: Mapping[int, LogEntry]
    evaluations: Mapping[str, Evaluation]


def has_missing_lines(written: MetricsFileState, source: MetricsSource) -> bool:
    """Return whether a file whose content is `written` lacks lines that `source` has."""
    return (
        max(source.log, default=-1) > written.seq
        or not written.evaluations.issuperset(source.evaluations)
        or (not written.ended and _ended(source))
    )


def has_gap(written: MetricsFileState, source: MetricsSource) -> bool:
    """Return whether log entries that the file lacks are no longer in the store, but only archived in the run folder."""
    later = [seq for seq in source.log if seq > written.seq]
    return len(later) < max(source.log, default=-1) - written.seq


def missing_lines(written: MetricsFileState, source: MetricsSource, wall: float) -> list[Line]:
    """Return the lines that the file lacks, in the order of the log; an evaluation follows its step, the end is last.

    `wall`: present time in seconds since the epoch.
    """
    lines: list[Line] = []
    step = written.step
    waiting = {id_: one for id_, one in source.evaluations.items() if id_ not in written.evaluations}

    def evaluations_of(entry: LogEntry | None) -> Iterable[Line]:
        for id_ in sorted(waiting):
            version = waiting[id_].version
            if entry is None or (version.lineage, version.step) == (entry.lineage, entry.step):
                yield _evaluation(id_, waiting[id_])

    for seq in sorted(s for s in source.log if s > written.seq):
        entry = source.log[seq]
        lines.append(_entry(entry, step, source.job))
        step = entry.step
        if entry.kind in ("base", "train"):
            for line in list(evaluations_of(entry)):
                lines.append(line)
                del waiting[line["id"]]
    lines += evaluations_of(None)
    if (not written.ended or max(source.log, default=-1) > written.seq) and _ended(source):
        assert source.status is not None
        lines.append({"kind": "end", "state": source.status.phase.value, "reason": source.status.reason})
    return [{**line, "time": round(wall, 3)} for line in lines]


def encode_lines(lines: Sequence[Line]) -> bytes:
    """Encode lines as JSON in ASCII, so that no reader fails at a character that is cut in the middle."""
    return b"".join(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n" for line in lines)


def decode_line(line: bytes) -> Line | None:
    """Decode one line. None if it is invalid, for example after a full disk."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or not isinstance(tree.get("kind"), str):
        return None
    if tree["kind"] in _OF_A_STEP and not all(type(tree.get(name)) is int for name in ("lineage", "step")):
        return None
    figures = tree.get("metrics", {})
    whole = isinstance(figures, dict) and all(
        isinstance(value, int | float) for value in (*figures.values(), tree.get("time", 0))
    )
    return tree if whole else None


def finite_numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the finite numbers of a nested mapping by name; those of inner mappings as "outer/inner"."""
    found: dict[str, float] = {}
    for name, value in sorted(tree.items()):
        if isinstance(value, Mapping):
            found |= finite_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{prefix}{name}"] = float(value)
    return found


def _ended(source: MetricsSource) -> bool:
    return source.status is not None and source.status.phase.ended


def _entry(entry: LogEntry, step_before: int, job: JobRecord) -> Line:
    line: Line = {"kind": entry.kind, "seq": entry.seq, "lineage": entry.lineage, "step": entry.step}
    kinds = {kind: sum(one.kind == kind for one in entry.delta) for kind in ("trained", "filtered", "failed")}
    match entry.kind:
        case "base":
            return line | {"kind": "start", "version": VERSION, "job": job.name, "uid": job.uid}
        case "train":
            counts = {"groups": kinds["trained"], "filtered": kinds["filtered"], "failed": kinds["failed"]}
            return line | {"kind": "step", "metrics": finite_numbers(entry.stats), **counts}
        case "account":
            return line | {"filtered": kinds["filtered"], "failed": kinds["failed"]}
        case "rollback":
            return line | {"from_step": step_before, "reason": entry.reason}


def _evaluation(id_: str, evaluation: Evaluation) -> Line:
    shown = evaluation.model_dump(mode="json", exclude=NO_FIGURES)
    if evaluation.is_graded:
        shown["reward"] = evaluation.mean_reward
    version = evaluation.version
    return {
        "kind": "eval",
        "id": id_,
        "lineage": version.lineage,
        "step": version.step,
        "metrics": finite_numbers(shown),
    }


class FileBusy(Exception):
    """Another process or thread is writing to the file."""


class MetricsFile:
    """Appends to the `metrics.jsonl` of a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / METRICS_FILE
        self._offset = 0
        self._thread = threading.Lock()
        self.written = MetricsFileState()
        """Content of the file when it was last read or written."""

    def bring(
        self, source: MetricsSource, wall: float, archived: Callable[[], dict[int, LogEntry]], *, whole: bool = True
    ) -> int:
        """Append the lines of `source` that the file lacks, and return their number.

        `wall`: present time in seconds since the epoch. `archived`: returns the log entries that left the store; called
        only if some of these are missing in the file. If entries are missing in both, ValueError is raised and nothing
        is written, because they may become visible on this node later; without `whole` they are skipped. Raises
        FileBusy if another process or thread is writing, and OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(self._thread), self.path.open("a+b") as file, _locked(file):
            self._catch_up(file)
            if has_gap(self.written, source):
                source = MetricsSource(source.job, source.status, archived() | dict(source.log), source.evaluations)
                if whole and has_gap(self.written, source):
                    raise ValueError(
                        f"log entries after {self.written.seq} are neither in the store nor in the archive, so {self.path} would have a gap"
                    )
            lines = missing_lines(self.written, source, wall)
            if lines:
                file.write(encode_lines(lines))
                file.flush()
                self._offset = file.tell()
                for line in lines:
                    self.written = self.written.after(line)
            return len(lines)

    def _catch_up(self, file: BinaryIO) -> None:
        size = file.seek(0, os.SEEK_END)
        if size < self._offset:  # another program cut the file; start over with its content
            self._offset, self.written = 0, MetricsFileState()
        for line, end in read_lines(file, self._offset):
            self._offset = end
            if line is not None:
                self.written = self.written.after(line)
        if self._offset < size:
            file.truncate(self._offset)
        file.seek(0, os.SEEK_END)


def read_lines(file: BinaryIO, offset: int) -> Iterator[tuple[Line | None, int]]:
    """Yield the complete lines from `offset` on (None for an invalid line), each with the offset after it."""
    for start, line in read_whole_lines(file, offset):
        yield decode_line(line), start + len(line) + 1


@contextlib.contextmanager
def _alone(lock: threading.Lock) -> Iterator[None]:
    """Hold the lock between threads of this process. Raises FileBusy if it is taken."""
    if not lock.acquire(blocking=False):
        raise FileBusy
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold the lock between processes. Raises FileBusy if it is taken. Does nothing on a file system without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileBusy from None
    except OSError:
        pass  # a file system without locks
    yield  # closing the file releases the lock
