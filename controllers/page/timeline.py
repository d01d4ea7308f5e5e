"""What slots did when, as the page draws it: the newest steps that nodes have booked, with the spans of each slot.

From the ends of the books in the run's folder, so of a bounded part of them. Each node goes by its own clock. Blocks on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gcore.ledger.books_file import FOLDER, BookLine, parse

MOST_BYTES = 512 << 10
"""Of the end of a node's books."""
MOST_STEPS, MOST_LINES = 8, 128
"""Of each node's books; and of all of them together: with many nodes fewer steps are drawn."""
MOST_NODES = 64
MOST_SLOTS = 256
"""Rows of the picture, of all nodes."""


@dataclass
class Row:
    """A slot: [begin, end, state] each, in seconds since the epoch. A state that nobody can tell is empty."""

    node: str
    slot: str
    spans: list[tuple[float, float, str]] = field(default_factory=list)


@dataclass
class Timeline:
    """`steps`: [begin, end, step] by the first node's books; `more`: slots that have no row."""

    rows: list[Row] = field(default_factory=list)
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    more: int = 0

    def tree(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def read(run_dir: Path) -> Timeline:
    """Of a run's folder. Raises OSError."""
    found = Timeline()
    books = sorted((run_dir / FOLDER).glob("*.jsonl"))[:MOST_NODES]
    steps = max(min(MOST_STEPS, MOST_LINES // max(len(books), 1)), 1)
    for path in books:
        _add(found, list(_newest(path, steps)))
    return found


def stamp(run_dir: Path) -> object:
    """Differs when there is anything new to read. Raises OSError."""
    return [(path.name, path.stat().st_size) for path in sorted((run_dir / FOLDER).glob("*.jsonl"))[:MOST_NODES]]


def _newest(path: Path, steps: int) -> Iterator[BookLine]:
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - MOST_BYTES, 0))
        texts = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    yield from (line for text in texts[-steps:] if (line := parse(text)) is not None)


def _add(found: Timeline, lines: list[BookLine]) -> None:
    rows: dict[str, Row] = {}
    for line in lines:
        began = line.book.began
        for slot, spans in sorted(line.spans.items()):
            row = rows.setdefault(slot, Row(line.node, slot))
            row.spans += [(round(began + one.begin, 3), round(began + one.end, 3), one.most) for one in spans]
        if not found.rows:
            found.steps.append((round(began, 3), round(line.until, 3), line.book.version.step))
    room = MOST_SLOTS - len(found.rows)
    found.rows += list(rows.values())[:room]
    found.more += max(len(rows) - room, 0)
