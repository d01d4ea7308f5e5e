"""Which groups of a sealed step are kept for people. Pure, so that holders and train ranks choose the same.

Every holder keeps at most so many of its own, spread evenly over its part of the seal: the first ones would be those of the
first shards, or of the shortest answers.
"""

from __future__ import annotations

from gcore.ledger.records import Seal, SealedGroup


def chosen(seal: Seal, limit: int) -> tuple[SealedGroup, ...]:
    """At most `limit` groups of each holder, in the seal's order."""
    places: dict[str, list[int]] = {}
    for place, group in enumerate(seal.groups):
        places.setdefault(group.holder, []).append(place)
    taken = sorted(place for its in places.values() for place in _spread(its, limit))
    return tuple(seal.groups[place] for place in taken)


def _spread(places: list[int], limit: int) -> list[int]:
    if len(places) <= limit:
        return places
    # n·len/limit grows by at least one, so none is taken twice.
    return [places[n * len(places) // limit] for n in range(limit)]
