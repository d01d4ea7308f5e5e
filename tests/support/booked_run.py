"""What the nodes of a whole run have booked, and that it sums."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from gcore.ledger.books_file import BookLine, lines_of
from placement.books import precedence

MOST_LOST = 0.05
"""Share of a run's time that may be unbooked where something was killed: of who died nobody can say what the last second was."""


def books_of(home: Path) -> tuple[Path, list[BookLine]]:
    """The run's folder, and what its nodes have booked, start-up first."""
    (folder,) = (home / "runs").iterdir()
    return folder, list(lines_of(folder))


def check_sums(lines: Sequence[BookLine]) -> None:
    """Each book sums to its time, and to its spans, slot by slot."""
    for line in lines:
        book = line.book
        total = book.seconds * book.slots
        assert sum(book.booked.values()) + book.unbooked == pytest.approx(total, rel=1e-3, abs=1e-3)
        assert min(book.booked.values(), default=0) >= 0
        assert all(precedence(state) >= 0 for state in book.booked)
        for spans in line.spans.values():
            assert sum(span.end - span.begin for span in spans) == pytest.approx(book.seconds, rel=1e-3, abs=5e-3)


def unbooked(lines: Sequence[BookLine]) -> float:
    """Share of the time of all slots of which nobody can say what they did."""
    return sum(line.book.unbooked for line in lines) / sum(line.book.seconds * line.book.slots for line in lines)
