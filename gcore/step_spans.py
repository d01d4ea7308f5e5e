"""A step of the books as spans: what every node did when, so that one step is one trace however many nodes took part. Pure.

The trace's id follows from job, lineage and step, so nodes agree on it without a word. Each node adds one span for the step with the seconds of its slots
by state, and under it one for each phase of the job as that node saw it. Each node goes by its own clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gcore.ledger.books_file import BookLine

NS = 1e9
UNKNOWN = "not known"
Value = str | float | int


@dataclass(frozen=True)
class SpanTold:
    """Times in nanoseconds since the epoch. `within`: the spans under it."""

    name: str
    begin: int
    end: int
    attributes: Mapping[str, Value]
    within: tuple[SpanTold, ...] = field(default=())


def trace_id(uid: str, line: BookLine) -> int:
    """Of the step, the same on every node; never 0."""
    version = line.book.version
    said = f"{uid} {version.lineage} {version.step}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:16], "big") or 1


def span_of(job: str, uid: str, line: BookLine) -> SpanTold:
    """A step on a node, with its phases."""
    book = line.book
    about: dict[str, Value] = {
        "gcore.job": job,
        "gcore.job.uid": uid,
        "gcore.node": line.node,
        "gcore.step": book.version.step,
        "gcore.lineage": book.version.lineage,
    }
    told = about | {"gcore.slots": book.slots, "gcore.slot_seconds.unbooked": book.unbooked}
    told |= {f"gcore.slot_seconds.{state.replace(' ', '.')}": seconds for state, seconds in book.booked.items()}
    begin, end = _ns(book.began), _ns(line.until)
    return SpanTold(f"step {book.version.step}", begin, end, told, tuple(_phases(line, about)))


def _phases(line: BookLine, about: Mapping[str, Value]) -> Iterator[SpanTold]:
    began = line.book.began
    for phase in line.phases:
        if phase.end > phase.begin:
            yield SpanTold(phase.most or UNKNOWN, _ns(began + phase.begin), _ns(began + phase.end), about)


def _ns(seconds: float) -> int:
    return round(seconds * NS)
