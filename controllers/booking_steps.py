"""What a step comes to in a node's books: where it ends, and what of its slots' times is cut off there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controllers.booking_sums import EngineWork
from gcore.ledger.books import MOST_SWITCHES, StepBook
from gcore.ledger.books_file import BookLine, Kept, Stretch
from gcore.types import Version
from placement.books import SlotBook, State, added


@dataclass(frozen=True)
class Closed:
    """A step, booked. `phases`: of the job, as it was seen here; `spans`: by slot. Both in seconds since the step began."""

    book: StepBook
    phases: tuple[Stretch, ...]
    spans: Mapping[str, tuple[Stretch, ...]]
    kept: Mapping[str, Kept]

    def line(self, node: str) -> BookLine:
        """As it is written down."""
        return BookLine(node, self.book, self.phases, self.spans, self.kept)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where a step ends that is not closed yet, and what engines did in it. `kept`: what workers said last before it, of those who have
    said something since."""

    at: float
    wall: float
    version: Version
    work: EngineWork
    kept: dict[str, Kept] = field(default_factory=dict)

    def passed(self, instance: str, before: Kept, at: float) -> None:
        """A worker said something at `at`, and the time before that was `before`."""
        if before.at <= self.at < at:
            self.kept[instance] = before


def cut(
    slots: Mapping[str, SlotBook], boundary: Boundary, begun: float, began: float
) -> tuple[StepBook, dict[str, tuple[Stretch, ...]]]:
    """The step that ends there, of slots that are settled until then, and their spans. `begun`, `began`: when it did, on both clocks."""
    booked: dict[State, float] = {}
    unbooked = overbooked = 0.0
    switches: dict[str, tuple[float, ...]] = {}
    spans = {}
    for slot, book in sorted(slots.items()):
        times = book.cut()
        booked = added(booked, times.booked)
        unbooked += times.unbooked
        overbooked += times.overbooked
        for change, took in times.switches.items():
            switches[change] = (*switches.get(change, ()), *took)[-MOST_SWITCHES:]
        spans[slot] = tuple(Stretch(span.begin - begun, span.end - begun, span.seconds) for span in times.spans)
    step = StepBook(
        version=boundary.version,
        began=began,
        seconds=boundary.at - begun,
        slots=len(slots),
        booked={state: round(seconds, 6) for state, seconds in booked.items() if seconds > 0},
        unbooked=unbooked,
        overbooked=overbooked,
        engines=boundary.work.sums,
        loads=boundary.work.loads,
        switches=switches,
    )
    return step, spans
