"""Records of a job in its run folder: archived log entries and evaluations, and a copy of an ended job's records.

Before the store (etcd) deletes log entries and evaluations, a controller appends them to its own file in the run
folder, one JSON object per line, with fsync. Two controllers may archive the same entry. A line is unreadable if its
writer died or the disk was full; the store then still has the entry, or the audit reports it as missing. A long run has
more entries than fit into memory, so the audit reads them one by one (`ArchivedLog`).

When a job ends, a controller copies its records byte for byte (`StoreCopy`). The copy, the archived log and the train
receipts are all that an audit needs, so a run can be audited after its cluster is gone. Several controllers may write a
copy, each to its own file. The copy with the highest lineage (number of the training branch) counts: if the store was
restored from before the job's end, the job ends again, in a later lineage at lower store revisions.

`highest_in_folder` finds the highest log number and lineage in the folder. They exceed those of head (the newest log
entry) if the store was restored from an older backup. Old and new records with the same number could then be confused,
so a new lineage starts above them (`gcore.ledger.chain.rollback_entry`). Only the end of each file is read: entries are
archived in ascending order, except for the few that belonged to unregistered checkpoints.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gcore.ledger.chain import HighWater
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Head, LogEntry
from gcore.ledger.records.job import METRICS_FILE, Evaluation, JobRecord
from gcore.schema import Record, UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import KeyListing, KeyValue, WatchBatch, WatchEvent
from gcore.system.files import append_lines, last_lines, read_whole_lines, replace_file

COPY_FOLDER = "ended"


class StoreCopy(Record):
    """Copy of an ended job's records, in the file `ended/{writer}.json` of the run folder.

    `revision`: store revision at which the keys were read. `records`: value of each key, by the key without the job's
    prefix.
    """

    called: ClassVar[str] = "copy of a job's records"
    uid: str
    revision: int
    records: dict[str, str]

    @property
    def job(self) -> JobRecord:
        """The copied job record. Raises UnreadableRecord if it is missing or damaged."""
        return JobRecord.decode(self.records.get("job", "").encode(), JobKeys(self.uid).job)

    @property
    def head(self) -> HighWater:
        """Lineage and log number of the copied head; zeros if the copy has no readable head."""
        try:
            head = Head.decode(self.records.get("head", "").encode())
        except UnreadableRecord:
            return HighWater()
        return HighWater(lineage=head.lineage, entry=head.seq)

    @property
    def batch(self) -> WatchBatch:
        """The copied records as a batch of put events, from which a `JobMirror` can be built."""
        prefix = JobKeys(self.uid).prefix
        kvs = (
            KeyValue(prefix + key, value.encode(), self.revision, self.revision) for key, value in self.records.items()
        )
        return WatchBatch(tuple(WatchEvent("put", kv) for kv in kvs), self.revision, reset=True)


def write_copy(run_dir: Path, writer: str, uid: str, listing: KeyListing) -> None:
    """Write a copy of an ended job's records to `ended/{writer}.json`.

    `listing`: all keys of the job. Does nothing if it has no job record: the job was deleted meanwhile. Raises OSError.
    """
    prefix = JobKeys(uid).prefix
    if not any(kv.key == JobKeys(uid).job for kv in listing.kvs):
        return
    records = {kv.key.removeprefix(prefix): kv.value.decode(errors="replace") for kv in listing.kvs}
    folder = run_dir / COPY_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{writer}.json", StoreCopy(uid=uid, revision=listing.revision, records=records).encode())


def has_copy(run_dir: Path, head: Head | None) -> bool:
    """Return whether the run folder has a copy of the job's records of `head`'s lineage or a later one.

    An unreadable copy counts. A copy of an earlier lineage does not: the job has run on since. Raises OSError.
    """
    try:
        copy = read_copy(run_dir)
    except UnreadableRecord:
        return True
    return copy is not None and (head is None or copy.head.lineage >= head.lineage)


def newest_copied(run_dir: Path) -> HighWater:
    """Lineage and log number of head in the newest copy; zeros without a readable copy. Raises OSError."""
    try:
        copy = read_copy(run_dir)
    except UnreadableRecord:
        return HighWater()
    return HighWater() if copy is None else copy.head


def read_copy(run_dir: Path) -> StoreCopy | None:
    """Read the copy with the highest lineage, then the highest revision; None if there is no copy.

    Raises UnreadableRecord if copies exist and none can be read, and OSError.
    """
    newest: StoreCopy | None = None
    problem: UnreadableRecord | None = None
    for file in sorted((run_dir / COPY_FOLDER).glob("*.json")):
        try:
            copy = StoreCopy.decode(file.read_bytes(), str(file))
        except UnreadableRecord as error:
            problem = error
            continue
        if newest is None or (copy.head.lineage, copy.revision) > (newest.head.lineage, newest.revision):
            newest = copy
    if newest is None and problem is not None:
        raise problem
    return newest


def mirror_of(uid: str, batch: WatchBatch) -> JobMirror:
    """Build the mirror of job `uid` from a batch that contains all its records. Raises UnreadableRecord."""
    return JobMirror(JobKeys(uid)).fold(batch)


@dataclass(frozen=True, slots=True)
class LinePosition:
    """Position of a line in a file: bytes [start, start + length), without the newline. Line `number` counts from 1."""

    file: Path
    number: int
    start: int
    length: int

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}:{self.number}"

    def read(self) -> bytes:
        """Read the line from the file. Raises OSError."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.length)


def index_lines(folder: Path) -> Iterator[tuple[LinePosition, bytes]]:
    """Yield position and bytes of every complete line in the folder's `.jsonl` files, in the order of file names.

    Raises OSError.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for number, (start, line) in enumerate(read_whole_lines(file), 1):
                yield LinePosition(path, number, start, len(line)), line


log = logging.getLogger(__name__)
LOG_FOLDER = "log"
EVALUATIONS = "evaluations"

MOST_AT_HAND = 2048
"""Number of entries that `ArchivedLog` caches."""

_NUMBERED = re.compile(rb'^\{"schema_version":\d+,"seq":(\d+),')


def append_entries(run_dir: Path, writer: str, entries: Iterable[LogEntry]) -> None:
    """Append log entries to the writer's file `log/{writer}.jsonl`, with fsync. Raises OSError."""
    _append(run_dir / LOG_FOLDER / f"{writer}.jsonl", entries)


def append_evaluations(run_dir: Path, writer: str, evaluations: Iterable[Evaluation]) -> None:
    """Append evaluations to the writer's file `evaluations/{writer}.jsonl`, with fsync. Raises OSError."""
    _append(run_dir / EVALUATIONS / f"{writer}.jsonl", evaluations)


def _append(file: Path, records: Iterable[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    append_lines(file, b"".join(record.encode() + b"\n" for record in records), durable=True)


def read_entries(run_dir: Path) -> dict[int, LogEntry]:
    """Read all archived log entries into memory, by log number. Unreadable lines are logged and skipped.

    Raises ValueError if two entries with one number differ, and OSError.
    """
    found: dict[int, LogEntry] = {}
    for file in sorted((run_dir / LOG_FOLDER).glob("*.jsonl")):
        *whole, _ = file.read_bytes().split(b"\n")
        for number, line in enumerate(whole, 1):
            try:
                entry = LogEntry.decode(line, f"{file}:{number}")
            except UnreadableRecord as error:
                log.warning("%s", error)
                continue
            if found.setdefault(entry.seq, entry) != entry:
                raise ValueError(f"log entry {entry.seq} was archived in two different versions")
    return found


class ArchivedLog(Mapping[int, LogEntry]):
    """All log entries of a run, by log number. Archived entries are read from the run folder on access.

    `stored`: the entries that the store still has; they take precedence. `problems`: one sentence for each log number
    whose copies differ. An unreadable line is not a problem: if its entry exists nowhere else, the audit reports the
    entry as missing.
    """

    def __init__(self, run_dir: Path, stored: Mapping[int, LogEntry]) -> None:
        """Index all archived lines by log number, and compare duplicates. Raises OSError."""
        self._stored = stored
        self._places: dict[int, LinePosition] = {}
        self._known: OrderedDict[int, LogEntry] = OrderedDict()
        self.problems: list[str] = []
        for place, line in index_lines(run_dir / LOG_FOLDER):
            numbered = _NUMBERED.match(line)
            seq = int(numbered[1]) if numbered is not None else _entry_number(line, place)
            if seq is None:
                continue
            if seq in self._places:
                self._compare(seq, line, place)
            elif seq in stored:
                self._compare_stored(seq, line, place)
            else:
                self._places[seq] = place

    def __getitem__(self, seq: int) -> LogEntry:
        """Return the entry with log number `seq`. Raises KeyError if it is missing or unreadable, and OSError."""
        if seq in self._stored:
            return self._stored[seq]
        if seq in self._known:
            self._known.move_to_end(seq)
            return self._known[seq]
        place = self._places[seq]
        try:
            entry = LogEntry.decode(place.read(), str(place))
        except UnreadableRecord as error:
            raise KeyError(seq) from error
        self._known[seq] = entry
        if len(self._known) > MOST_AT_HAND:
            self._known.popitem(last=False)
        return entry

    def __iter__(self) -> Iterator[int]:
        yield from self._stored
        yield from (seq for seq in self._places if seq not in self._stored)

    def __len__(self) -> int:
        return len(self._stored.keys() | self._places.keys())

    def _compare(self, seq: int, line: bytes, place: LinePosition) -> None:
        """Compare a further line of entry `seq` with the indexed one. Adds a problem if both are readable and differ.

        If only the further line is readable, it replaces the indexed one.
        """
        first = self._places[seq].read()
        if first == line:
            return
        one, other = _decoded(first), _decoded(line)
        if one is None:
            self._places[seq] = place
        elif other is not None and one != other:
            where = f"{self._places[seq]} and {place}"
            self.problems.append(f"log entry {seq} was archived in two different versions: {where}")

    def _compare_stored(self, seq: int, line: bytes, place: LinePosition) -> None:
        entry = _decoded(line)
        if entry is not None and entry != self._stored[seq]:
            self.problems.append(f"log entry {seq} in the store differs from {place}")


def _decoded(line: bytes) -> LogEntry | None:
    try:
        return LogEntry.decode(line)
    except UnreadableRecord:
        return None


def _entry_number(line: bytes, place: LinePosition) -> int | None:
    """Log number of an entry, from decoding the whole line; None, with a logged warning, if it is unreadable.

    Needed for a line whose number is not where gcore writes it (`_NUMBERED`).
    """
    entry = _decoded(line)
    if entry is None:
        log.warning("%s cannot be read", place)
        return None
    return entry.seq


TAIL_BYTES = 4 << 20


def highest_in_folder(run_dir: Path) -> HighWater:
    """Highest lineage and highest log number in the archived log, metrics and copies of a run folder; zeros if empty.

    Raises OSError.
    """
    found = [HighWater(), newest_copied(run_dir)]
    paths = [*(run_dir / LOG_FOLDER).glob("*.jsonl"), run_dir / METRICS_FILE]
    for path in paths:
        found += [_of_line(line) for line in last_lines(path, TAIL_BYTES)]
    return HighWater(entry=max(one.entry for one in found), lineage=max(one.lineage for one in found))


def _of_line(line: bytes) -> HighWater:
    try:
        tree = json.loads(line)
        return HighWater(entry=_whole_number(tree.get("seq")), lineage=_whole_number(tree.get("lineage")))
    except (ValueError, AttributeError, RecursionError):  # incomplete, or not written by gcore
        return HighWater()


def _whole_number(value: object) -> int:
    return value if type(value) is int else 0
