"""Log entries, and evaluations, that left the store: one file a writer in the run's folder, one JSON object a line.

Appended and fsynced before the store forgets them. Two writers may both have written an entry; it is the same one. A line
that cannot be read was being written when its writer died or the disk was full: then the store still has the entry, and if
it has not, the audit misses it.

A long run has more entries than there is memory for: the audit reads them one by one (`ArchivedLog`).
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gcore.ledger.job import Evaluation
from gcore.ledger.line_index import Place, lines_of
from gcore.ledger.records import LogEntry
from gcore.schema import Record, UnreadableRecord

log = logging.getLogger(__name__)

FOLDER = "log"
EVALUATIONS = "evaluations"
MOST_AT_HAND = 2048
"""Entries that `ArchivedLog` remembers."""
_NUMBERED = re.compile(rb'^\{"schema_version":\d+,"seq":(\d+),')


def append(run_dir: Path, writer: str, entries: Iterable[LogEntry]) -> None:
    """Write entries down for good. Raises OSError."""
    _append(run_dir / FOLDER / f"{writer}.jsonl", entries)


def append_evaluations(run_dir: Path, writer: str, evaluations: Iterable[Evaluation]) -> None:
    """The same of evaluations. Raises OSError."""
    _append(run_dir / EVALUATIONS / f"{writer}.jsonl", evaluations)


def _append(file: Path, records: Iterable[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(record.encode() + b"\n" for record in records)
    with file.open("ab") as out:
        if out.tell() and not _ends_with_a_line(file):
            out.write(b"\n")  # an earlier write was cut off, on a full disk for example
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


def read_evaluations(run_dir: Path) -> dict[str, Evaluation]:
    """Every evaluation that left the store, by its version. Raises OSError."""
    found = {}
    for place, line in lines_of(run_dir / EVALUATIONS):
        try:
            evaluation = Evaluation.decode(line, str(place))
        except UnreadableRecord as error:
            log.warning("%s", error)
            continue
        found[str(evaluation.version)] = evaluation
    return found


def read(run_dir: Path) -> dict[int, LogEntry]:
    """Every archived entry, by number. Raises ValueError if there are two of one number that differ, OSError."""
    found: dict[int, LogEntry] = {}
    for file in sorted((run_dir / FOLDER).glob("*.jsonl")):
        *whole, _ = file.read_bytes().split(b"\n")
        for number, line in enumerate(whole, 1):
            try:
                entry = LogEntry.decode(line, f"{file}:{number}")
            except UnreadableRecord as error:
                log.warning("%s", error)
                continue
            if found.setdefault(entry.seq, entry) != entry:
                raise ValueError(f"log entry {entry.seq} was archived in two forms")
    return found


class ArchivedLog(Mapping[int, LogEntry]):
    """Every entry of a run, by number: those the store has (`stored`), and those in the run's folder.

    `problems`: what is wrong with the archived lines, a sentence each: lines that cannot be read while the store has not their
    entry either are not told here, for that entry is missing.
    """

    def __init__(self, run_dir: Path, stored: Mapping[int, LogEntry]) -> None:
        """Goes through all lines. Raises OSError."""
        self._stored = stored
        self._places: dict[int, Place] = {}
        self._known: OrderedDict[int, LogEntry] = OrderedDict()
        self.problems: list[str] = []
        for place, line in lines_of(run_dir / FOLDER):
            numbered = _NUMBERED.match(line)
            seq = int(numbered[1]) if numbered is not None else _number(line, place)
            if seq is None:
                continue
            if seq in self._places:
                self._compare(seq, line, place)
            elif seq in stored:
                self._compare_stored(seq, line, place)
            else:
                self._places[seq] = place

    def __getitem__(self, seq: int) -> LogEntry:
        """Raises KeyError for one that is nowhere, or whose line cannot be read; OSError."""
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

    def _compare(self, seq: int, line: bytes, place: Place) -> None:
        """Of two lines of one entry, what can be read counts; both must say the same."""
        first = self._places[seq].read()
        if first == line:
            return
        one, other = _decoded(first), _decoded(line)
        if one is None:
            self._places[seq] = place
        elif other is not None and one != other:
            self.problems.append(f"log entry {seq} was archived in two forms: {self._places[seq]} and {place}")

    def _compare_stored(self, seq: int, line: bytes, place: Place) -> None:
        entry = _decoded(line)
        if entry is not None and entry != self._stored[seq]:
            self.problems.append(f"log entry {seq} says something else in the store than in {place}")


def _decoded(line: bytes) -> LogEntry | None:
    try:
        return LogEntry.decode(line)
    except UnreadableRecord:
        return None


def _number(line: bytes, place: Place) -> int | None:
    """Of a line that begins otherwise than gcore writes them."""
    entry = _decoded(line)
    if entry is None:
        log.warning("%s cannot be read", place)
        return None
    return entry.seq


def _ends_with_a_line(file: Path) -> bool:
    with file.open("rb") as there:
        there.seek(-1, os.SEEK_END)
        return there.read(1) == b"\n"
