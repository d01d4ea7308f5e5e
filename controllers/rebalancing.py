"""Which requests are taken back from an engine where they wait or crowd, since another that serves the same weights has room. Pure.

A request is given to an engine when it comes (`controllers.routing`), and stays there. An engine that wakes, starts or is lent later
would get only what comes after it: so the newest requests, which are the last in their engine's queue, go there. What they have made
comes with them, and is read once more there. That is worth it for what waits, or where an engine is so much busier than the other that
each token of all its requests comes sooner by it. None gives to one that is as busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CROWDED, TIMES = 0.25, 2
"""An engine that runs at least such a share of what it can gives of what it runs, while it keeps so many times what the other has."""
FILLED = 2
"""An engine that has room is given so many times what it runs at once, if others have that much more: who looks, looks now and then."""


@dataclass(frozen=True, slots=True)
class Queue:
    """An engine. `busy`: responses that it owes; `requests`: those that may be taken back, by name and responses, the oldest first."""

    instance: str
    busy: int
    requests: tuple[tuple[str, int], ...]


def taken_back(queues: Sequence[Queue], rows: int) -> list[tuple[str, str]]:
    """Of engines that serve the same: from which one which request, in this order. `rows`: responses that one runs at once."""
    busy = {queue.instance: queue.busy for queue in queues}
    left = {queue.instance: list(queue.requests) for queue in queues}
    found: list[tuple[str, str]] = []
    hungry = [name for name in busy if busy[name] < rows]
    while hungry:
        least = min(hungry, key=lambda name: (busy[name], name))
        giver = _giver(busy, left, least, rows)
        if busy[least] >= FILLED * rows or giver is None:
            break
        name, count = left[giver].pop()
        busy[giver] -= count
        busy[least] += count
        found.append((giver, name))
    return found


def _giver(busy: dict[str, int], left: dict[str, list[tuple[str, int]]], taker: str, rows: int) -> str | None:
    """The busiest whose newest request is worth taking."""
    for name in sorted(left, key=lambda name: (-busy[name], name)):
        if not left[name]:
            continue
        count = left[name][-1][1]
        keeps, gets = busy[name] - count, busy[taker] + count
        waits = keeps >= max(rows, gets)
        crowds = busy[name] >= CROWDED * rows and keeps >= TIMES * gets
        if waits or crowds:
            return name
    return None
