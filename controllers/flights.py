"""What this peer has begun and not finished, by prompt: since when, for which step, and with which weights.

At staleness 0 it empties with every step; otherwise what is in flight outlives the step it was begun for. A flight that is
given up is cancelled, and its prompt issued again. Which are to be given up is `controllers.decide`'s to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gcore.ledger.ancestry import is_ancestor
from gcore.ledger.records import Head
from gcore.types import PromptRef, Version


@dataclass
class Flight:
    """One production. `issued`: head's version when it was begun; `since`: the monotonic clock then."""

    issued: Version
    since: float
    made_with: Version | None = None
    """The weights of its first token; None: it has none yet."""
    task: asyncio.Task[None] | None = None
    stale: bool = False
    """Whether it was given up because it takes too long."""

    def version(self, head: Head) -> Version:
        """The oldest weights that made, or may make, a token of it; or those of the cut-off lineage that it belongs to."""
        if self.made_with is not None:
            return self.made_with
        return head.version if is_ancestor(head, self.issued) else self.issued


class Flights:
    """Flights by prompt. Mutable; one event loop."""

    def __init__(self) -> None:
        self._flights: dict[PromptRef, Flight] = {}
        self._seen: tuple[Head, Mapping[PromptRef, Version]] | None = None
        """`versions` as it was last given out, while nothing has changed."""
        self.defect: BaseException | None = None
        """What one of them raised that is not an outcome: the flow or a plug-in is wrong."""

    def __contains__(self, ref: object) -> bool:
        return ref in self._flights

    def __iter__(self) -> Iterator[PromptRef]:
        return iter(self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, ref: PromptRef, issued: Version, now: float) -> None:
        """`ref` is in flight from now on."""
        self._seen = None
        self._flights[ref] = Flight(issued, now)

    def launch(self, ref: PromptRef, task: asyncio.Task[None]) -> None:
        """`task` produces it."""
        self._flights[ref].task = task

    def task_of(self, ref: PromptRef) -> asyncio.Task[None] | None:
        """What produces it; None if it is not in flight, or not begun."""
        flight = self._flights.get(ref)
        return None if flight is None else flight.task

    def note_version(self, ref: PromptRef, version: Version) -> None:
        """An engine that serves `version` makes tokens for it now."""
        flight = self._flights.get(ref)
        if flight is not None and flight.made_with is None:
            self._seen = None
            flight.made_with = version

    def end(self, ref: PromptRef) -> bool:
        """It is not in flight any more; whether it was given up as stale."""
        self._seen = None
        flight = self._flights.pop(ref, None)
        return flight is not None and flight.stale

    def give_up(self, ref: PromptRef, *, stale: bool) -> None:
        """Cancel it. `stale`: it counts among the times that its prompt was issued in vain."""
        flight = self._flights.get(ref)
        if flight is not None and flight.task is not None:
            flight.stale = flight.stale or stale
            flight.task.cancel()

    async def give_up_all(self) -> None:
        """Cancel everything, and wait until it has ended."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def versions(self, head: Head) -> Mapping[PromptRef, Version]:
        """The oldest weights of each, as `Flight.version` says; the same object while nothing changes."""
        if self._seen is None or self._seen[0] is not head:
            self._seen = head, {ref: flight.version(head) for ref, flight in self._flights.items()}
        return self._seen[1]

    def oldest(self) -> tuple[PromptRef, Flight] | None:
        """The one that has been in flight for the longest time."""
        return min(self._flights.items(), key=lambda item: item[1].since, default=None)
