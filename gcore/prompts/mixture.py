"""What an epoch of several sources is made of: which entry of which source stands at each of its places.

A source of n entries and weight w gives every epoch round(w·n) places, one at least, so that all epochs are equally long.
Its places go on through its entries from epoch to epoch and begin again at the end: over any epochs in a row, how often
two entries were shown differs by at most one. Where the weight is no whole number the entries are gone through in an order
of their own, a keyed permutation that never changes, or "one half" would be the first half of a sorted file.

The places are the entries of the stream, which shards cut and order anew in every epoch (`gcore.prompts.shards`). One
source of weight 1 is its own epoch: place i is entry i. Pure; reads no data.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from gcore.prompts.shards import KeyedPermutation


@dataclass(frozen=True, slots=True)
class Share:
    """A source's part in an epoch. The name is a part of its order's key: other sources do not change it."""

    name: str
    entries: int
    weight: float = 1.0

    @property
    def refs(self) -> int:
        """Places of an epoch: how many prompts of the source every epoch shows."""
        return max(1, round(self.weight * self.entries))


@dataclass(frozen=True, slots=True)
class Place:
    """Entry `entry` of the source with number `source`."""

    source: int
    entry: int


class Mixture:
    """All sources of a stream, in the order of the spec."""

    def __init__(self, shares: Sequence[Share], seed: int) -> None:
        self.shares = tuple(shares)
        self._ends = tuple(itertools.accumulate(share.refs for share in self.shares))
        self._orders = tuple(_order(share, seed) for share in self.shares)

    @property
    def refs(self) -> int:
        """Places of an epoch, in all."""
        return self._ends[-1]

    def at(self, data_epoch: int, place: int) -> Place:
        """What stands at `place` of an epoch. Raises IndexError outside range(refs)."""
        if not 0 <= place < self.refs:
            raise IndexError(f"place {place} of an epoch of {self.refs}")
        source = bisect.bisect_right(self._ends, place)
        share, order = self.shares[source], self._orders[source]
        within = place - self._ends[source] + share.refs
        if order is None:
            return Place(source, within % share.entries)
        return Place(source, order.index((data_epoch * share.refs + within) % share.entries))


def _order(share: Share, seed: int) -> KeyedPermutation | None:
    if share.refs % share.entries == 0:
        return None  # every epoch shows every entry equally often
    packed = struct.pack("<Q", seed) + share.name.encode()
    return KeyedPermutation(blake2b(packed, digest_size=32, person=b"gcore.source").digest(), share.entries)
