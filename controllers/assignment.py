"""Which peer works on which shard: sticky and balanced, a pure function of the members and the old assignment.

Loads differ by at most one, and no shard moves that need not. The assignment is a hint of who should work on what; what
keeps a prompt from being trained twice is the seal's check.
"""

from __future__ import annotations

from collections.abc import Sequence

from gcore.ledger.records import Assignment


def assign_shards(members: Sequence[str], shards: int, old: Assignment | None) -> Assignment:
    """Give every shard an owner. Without members: nobody's.

    At first shards are dealt out in turn, so that every stretch of the stream is spread over all peers. Then only what
    is nobody's, and what is above a peer's fair share, moves; of an overfull peer every k-th shard goes, for the same reason.
    """
    ordered = tuple(sorted(members))
    if not ordered:
        return Assignment(members=(), owners=(None,) * shards)
    owner: list[str | None] = [None] * shards
    if old is not None and len(old.owners) == shards:
        alive = set(ordered)
        owner = [name if (name := old.owner(shard)) in alive else None for shard in range(shards)]
    held = {name: [shard for shard in range(shards) if owner[shard] == name] for name in ordered}
    # The larger shares go to who holds most already, so that fewest shards move.
    by_load = sorted(ordered, key=lambda name: (-len(held[name]), name))
    base, more = divmod(shards, len(ordered))
    quota = {name: base + (i < more) for i, name in enumerate(by_load)}
    for name in ordered:
        for shard in _spread(held[name], len(held[name]) - quota[name]):
            owner[shard] = None
    loads = {name: min(len(held[name]), quota[name]) for name in ordered}
    for shard in range(shards):
        if owner[shard] is None:
            # The emptiest takes the next: in a fresh start that deals them out in turn.
            taker = min(
                (name for name in ordered if loads[name] < quota[name]),
                key=lambda name: (loads[name] - quota[name], ordered.index(name)),
            )
            owner[shard] = taker
            loads[taker] += 1
    index = {name: i for i, name in enumerate(ordered)}
    return Assignment(members=ordered, owners=tuple(None if name is None else index[name] for name in owner))


def _spread(shards: list[int], count: int) -> list[int]:
    """`count` of `shards`, evenly spread over them."""
    if count <= 0:
        return []
    return [shards[i * len(shards) // count] for i in range(count)]
