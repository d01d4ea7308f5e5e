"""Log entries that left the store: one file a writer in the run's folder, one JSON object a line.

Appended and fsynced before the store forgets them. Two writers may both have written an entry; it is the same one. A line
that cannot be read was being written when its writer died or the disk was full: then the store still has the entry, and if
it has not, the audit misses it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from gcore.ledger.records import LogEntry, UnreadableRecord

log = logging.getLogger(__name__)

FOLDER = "log"


def append(run_dir: Path, writer: str, entries: Iterable[LogEntry]) -> None:
    """Write entries down for good. Raises OSError."""
    file = run_dir / FOLDER / f"{writer}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(entry.encode() + b"\n" for entry in entries)
    with file.open("ab") as out:
        if out.tell() and not _ends_with_a_line(file):
            out.write(b"\n")  # an earlier write was cut off, on a full disk for example
        out.write(text)
        out.flush()
        os.fsync(out.fileno())


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


def _ends_with_a_line(file: Path) -> bool:
    with file.open("rb") as there:
        there.seek(-1, os.SEEK_END)
        return there.read(1) == b"\n"
