"""Which entry of the stream a prompt ref is: the order of each shard, as a keyed permutation.

Entry i of the stream (of the dataset, if it has one source of weight 1: `gcore.data.order`) belongs to shard i % S, at place i // S (so shard lengths differ by at most one, as
`gcore.data.order.shard_lengths` cuts them). In every epoch a shard goes through its places in another order, which is a
pure function of (seed, data_epoch, shard): a Feistel network over the smallest power of four that holds the shard, and
whatever falls outside is sent through it again until it falls inside (cycle walking; at most four rounds on average).
No list is shuffled or stored, any place of any epoch is found at once, and every controller finds the same.

It does not read the dataset and does not know what is terminal; `gcore.data.order` does.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from gcore.types import PromptRef

# -------------------- cursor
# Which prompt refs of a shard are terminal: a low-water mark and a bitmap of what is terminal beyond it.
#
# A *position* counts a shard's refs through all epochs: `p = data_epoch * shard_length + seq`, so one cursor spans epochs,
# and shards may stand in different ones. Pure; the size does not depend on how much was consumed, only on how far the
# stream is ragged (at most the window).


class ShardCursor(NamedTuple):
    """`low_water`: every position below it is terminal. Bit i of `beyond`: position `low_water + i` is terminal."""

    low_water: int = 0
    beyond: int = 0

    def is_terminal(self, position: int) -> bool:
        """Whether `position` has an outcome."""
        return position < self.low_water or bool(self.beyond >> (position - self.low_water) & 1)

    def mark(self, position: int) -> ShardCursor:
        """The cursor with `position` terminal too. Raises ValueError if it already was: no ref ends twice."""
        if self.is_terminal(position):
            raise ValueError(f"position {position} is already terminal")
        beyond = self.beyond | 1 << (position - self.low_water)
        ones = (~beyond & (beyond + 1)).bit_length() - 1  # trailing ones: the mark moves over them
        return ShardCursor(self.low_water + ones, beyond >> ones)

    @property
    def terminal_count(self) -> int:
        """How many positions are terminal."""
        return self.low_water + self.beyond.bit_count()


class StreamShape(NamedTuple):
    """How the dataset is cut: the length of each shard (refs per epoch), shard by shard."""

    lengths: tuple[int, ...]

    def position(self, ref: PromptRef) -> int:
        """The ref's place in its shard, counted through all epochs."""
        return ref.data_epoch * self.lengths[ref.shard] + ref.seq

    def ref(self, shard: int, position: int) -> PromptRef:
        """Inverse of `position`."""
        epoch, seq = divmod(position, self.lengths[shard])
        return PromptRef(epoch, shard, seq)


def shard_lengths(prompts: int, shards: int) -> StreamShape:
    """Cut `prompts` entries into `shards` slices whose lengths differ by at most one."""
    base, more = divmod(prompts, shards)
    return StreamShape(tuple(base + (shard < more) for shard in range(shards)))


class Cursors(NamedTuple):
    """The cursors of all shards, by shard."""

    shards: tuple[ShardCursor, ...]

    @classmethod
    def start(cls, shards: int) -> Cursors:
        """Nothing terminal yet."""
        return cls((ShardCursor(),) * shards)

    def is_terminal(self, shape: StreamShape, ref: PromptRef) -> bool:
        """Whether `ref` has an outcome."""
        return self.shards[ref.shard].is_terminal(shape.position(ref))

    def union(self, shape: StreamShape, refs: Iterable[PromptRef]) -> Cursors:
        """The cursors after `refs` became terminal. Raises ValueError if one already was, or comes twice."""
        shards = list(self.shards)
        for ref in refs:
            shards[ref.shard] = shards[ref.shard].mark(shape.position(ref))
        return Cursors(tuple(shards))

    @property
    def terminal_count(self) -> int:
        """How many refs are terminal in all."""
        return sum(cursor.terminal_count for cursor in self.shards)

    def encode(self) -> list[str]:
        """One short string a shard, for the store: "low_water" or "low_water+hex"."""
        return [f"{c.low_water}+{c.beyond:x}" if c.beyond else str(c.low_water) for c in self.shards]

    @classmethod
    def decode(cls, text: list[str]) -> Cursors:
        """Inverse of `encode`; raises ValueError on anything else."""
        shards = []
        for part in text:
            if not isinstance(part, str):
                raise ValueError(f"{part!r} is no cursor")
            low, _, beyond = part.partition("+")
            shards.append(ShardCursor(int(low), int(beyond, 16) if beyond else 0))
        return cls(tuple(shards))


# Four rounds of a good round function are indistinguishable from random for large domains; small ones want more, and
# eight cost about ten microseconds.
ROUNDS = 8


class KeyedPermutation:
    """A bijection of range(length) onto itself that follows from `key` (at most 64 bytes). Immutable."""

    __slots__ = ("_half_bits", "_key", "_mask", "length")

    def __init__(self, key: bytes, length: int) -> None:
        self.length = length
        self._key = key
        bits = max(2, (length - 1).bit_length())
        self._half_bits = (bits + 1) // 2
        self._mask = (1 << self._half_bits) - 1

    def index(self, seq: int) -> int:
        """What comes `seq`-th. Raises IndexError outside range(length)."""
        place = self._checked(seq)
        while True:
            place = self._forth(place)
            if place < self.length:
                return place

    def seq(self, index: int) -> int:
        """Inverse of `index`. Raises IndexError outside range(length)."""
        place = self._checked(index)
        while True:
            place = self._back(place)
            if place < self.length:
                return place

    def _checked(self, place: int) -> int:
        if not 0 <= place < self.length:
            raise IndexError(f"place {place} of a shard of {self.length}")
        return place

    def _forth(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in range(ROUNDS):
            left, right = right, left ^ self._round(number, right)
        return left << self._half_bits | right

    def _back(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in reversed(range(ROUNDS)):
            left, right = right ^ self._round(number, left), left
        return left << self._half_bits | right

    def _round(self, number: int, half: int) -> int:
        digest = blake2b(struct.pack("<BQ", number, half), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") & self._mask


class ShardOrder(KeyedPermutation):
    """The order of one shard in one epoch: which place of the shard comes `seq`-th. Any 64-bit numbers are a key."""

    __slots__ = ()

    def __init__(self, seed: int, data_epoch: int, shard: int, length: int) -> None:
        packed = struct.pack("<Qqq", seed, data_epoch, shard)
        super().__init__(blake2b(packed, digest_size=32, person=b"gcore.shard").digest(), length)


def entry_index(shape: StreamShape, seed: int, ref: PromptRef) -> int:
    """The entry of the stream that `ref` stands for. Raises IndexError for a ref outside the stream."""
    order = ShardOrder(seed, ref.data_epoch, ref.shard, shard_length(shape, ref.shard))
    return order.index(ref.seq) * len(shape.lengths) + ref.shard


def ref_of_entry(shape: StreamShape, seed: int, data_epoch: int, entry: int) -> PromptRef:
    """The ref that stands for entry `entry` in `data_epoch`: inverse of `entry_index`. Raises IndexError."""
    if entry < 0:
        raise IndexError(f"entry {entry}")
    place, shard = divmod(entry, len(shape.lengths))
    return PromptRef(data_epoch, shard, ShardOrder(seed, data_epoch, shard, shard_length(shape, shard)).seq(place))


def shard_length(shape: StreamShape, shard: int) -> int:
    """Refs of a shard in an epoch. Raises IndexError outside the stream."""
    if not 0 <= shard < len(shape.lengths):
        raise IndexError(f"shard {shard} of {len(shape.lengths)}")
    return shape.lengths[shard]


# -------------------- mixture
# What an epoch of several sources is made of: which entry of which source stands at each of its places.
#
# A source of n entries and weight w gives every epoch round(w·n) places, one at least, so that all epochs are equally long.
# Its places go on through its entries from epoch to epoch and begin again at the end: over any epochs in a row, how often
# two entries were shown differs by at most one. Where the weight is no whole number the entries are gone through in an order
# of their own, a keyed permutation that never changes, or "one half" would be the first half of a sorted file.
#
# The places are the entries of the stream, which shards cut and order anew in every epoch (`gcore.data.order`). One
# source of weight 1 is its own epoch: place i is entry i. Pure; reads no data.


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source's part in an epoch. The name is a part of its order's key: other sources do not change it."""

    name: str
    entries: int
    weight: float = 1.0

    @property
    def refs(self) -> int:
        """Places of an epoch: how many prompts of the source every epoch shows."""
        return max(1, round(self.weight * self.entries))


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Entry `entry` of the source with number `source`."""

    source: int
    entry: int


class Mixture:
    """All sources of a stream, in the order of the spec."""

    def __init__(self, shares: Sequence[SourceShare], seed: int) -> None:
        self.shares = tuple(shares)
        self._ends = tuple(itertools.accumulate(share.refs for share in self.shares))
        self._orders = tuple(_order(share, seed) for share in self.shares)

    @property
    def refs(self) -> int:
        """Places of an epoch, in all."""
        return self._ends[-1]

    def at(self, data_epoch: int, place: int) -> SourceEntry:
        """What stands at `place` of an epoch. Raises IndexError outside range(refs)."""
        if not 0 <= place < self.refs:
            raise IndexError(f"place {place} of an epoch of {self.refs}")
        source = bisect.bisect_right(self._ends, place)
        share, order = self.shares[source], self._orders[source]
        within = place - self._ends[source] + share.refs
        if order is None:
            return SourceEntry(source, within % share.entries)
        return SourceEntry(source, order.index((data_epoch * share.refs + within) % share.entries))


def _order(share: SourceShare, seed: int) -> KeyedPermutation | None:
    if share.refs % share.entries == 0:
        return None  # every epoch shows every entry equally often
    packed = struct.pack("<Q", seed) + share.name.encode()
    return KeyedPermutation(blake2b(packed, digest_size=32, person=b"gcore.source").digest(), share.entries)
