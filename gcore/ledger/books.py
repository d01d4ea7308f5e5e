"""What a node's slots did in the newest steps: `placement/books/{node}`, one small record a node, written once a step under the
lease of its controller.

It is told, never decided by: no transaction compares it, and a step that nobody booked is a step all the same. How times come to be
booked is `placement.books`' business, where they are measured `controllers.booking`'s; the whole history lies in the run's folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from gcore.schema import Part, Record
from gcore.types import Version

NEWEST_STEPS = 4
"""Steps that a node's record has. Whoever plans reads them as they come, and keeps what it needs."""
MOST_SWITCHES = 16
"""Of one kind, in a step: the newest. More would be no news."""
MOST_BOOK_BYTES = 8192
"""Of a step in the record: there are some forty states, and switches of a dozen kinds."""


class EngineSums(Part):
    """What the engines of a pool did, in sums, so that those of several nodes can be added.

    `active_s`: seconds in which an engine had anything to run; `running_s`: the same, counted as often as it had requests;
    `tokens`: made in them; `requests`: that it was given.
    """

    active_s: NonNegativeFloat = 0.0
    running_s: NonNegativeFloat = 0.0
    tokens: NonNegativeInt = 0
    requests: NonNegativeInt = 0

    def plus(self, other: EngineSums) -> EngineSums:
        """Both together."""
        return EngineSums.together((self, other))

    @classmethod
    def together(cls, parts: Sequence[EngineSums]) -> EngineSums:
        """All of them: of a thousand engines one sum is made, and not a thousand."""
        return cls(
            active_s=sum(one.active_s for one in parts),
            running_s=sum(one.running_s for one in parts),
            tokens=sum(one.tokens for one in parts),
            requests=sum(one.requests for one in parts),
        )


class StepBook(Part):
    """One step on one node: from when head moved to the step before until it moved to `version`, as this node heard of it.

    `booked`: seconds by state (`placement.books.State`, as text), over all slots; with `unbooked`, the slot-seconds of which nobody can
    say what they were, they sum to `seconds` times `slots`. `overbooked`: what workers told beyond their own time, which was cut off.
    """

    version: Version
    began: float
    """Seconds since the epoch, for people."""
    seconds: NonNegativeFloat
    slots: NonNegativeInt
    booked: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    unbooked: NonNegativeFloat = 0.0
    overbooked: NonNegativeFloat = 0.0
    engines: dict[str, EngineSums] = Field(default_factory=dict)
    """By pool."""
    loads: dict[str, tuple[EngineSums, ...]] = Field(default_factory=dict)
    """The same of their time, by how many requests ran in one: of 1, of 2 and 3, of 4 to 7 and so on, where there was any."""
    switches: dict[str, tuple[NonNegativeFloat, ...]] = Field(default_factory=dict)
    """By "from>to": how many seconds each change of a slot's role took that ended in this step."""

    @property
    def error(self) -> float:
        """The share of the slots' time that the books do not account for, or account for twice."""
        total = self.seconds * self.slots
        return (self.unbooked + self.overbooked) / total if total else 0.0


class NodeBooks(Record):
    """`placement/books/{node}`: the newest steps, oldest first."""

    called: ClassVar[str] = "books of a node"

    node: str
    steps: tuple[StepBook, ...] = ()

    def at(self, version: Version) -> StepBook | None:
        """The step that made `version`, if it is still there."""
        return next((step for step in reversed(self.steps) if step.version == version), None)

    def plus(self, step: StepBook) -> NodeBooks:
        """With one step more, and without the oldest where there are too many."""
        kept = [one for one in self.steps if one.version != step.version]
        return self.model_copy(update={"steps": (*kept, step)[-NEWEST_STEPS:]})


def by_version(books: Mapping[str, NodeBooks]) -> dict[Version, dict[str, StepBook]]:
    """All that there is, step by step, by node."""
    found: dict[Version, dict[str, StepBook]] = {}
    for node, book in sorted(books.items()):
        for step in book.steps:
            found.setdefault(step.version, {})[node] = step
    return found


def engines_of(books: Iterable[StepBook]) -> dict[str, EngineSums]:
    """By pool, all nodes together."""
    parts: dict[str, list[EngineSums]] = {}
    for book in books:
        for pool, more in book.engines.items():
            parts.setdefault(pool, []).append(more)
    return {pool: EngineSums.together(found) for pool, found in parts.items()}
