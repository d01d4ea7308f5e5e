"""The order of prompts: which dataset entry a prompt ref means, and cursors over the prompts that have an outcome.

*Shards.* Entry i of the stream belongs to shard i % S, at place i // S, so shard lengths differ by at most one. Every
epoch visits a shard's places in a different order, a pure function of (seed, data_epoch, shard): a Feistel network over
the smallest power of four that covers the shard. Values outside the shard go through it again until they are inside
(cycle walking; at most four rounds on average). No list is shuffled or stored, any place of any epoch is computed
directly, and every controller computes the same.

*Cursors.* A *position* counts a shard's refs through all epochs: `p = data_epoch * shard_length + seq`. So one cursor
spans epochs, and shards may be in different epochs. A ref is *terminal* when it is trained, filtered or failed. A
cursor is a low-water mark and a bitmap of terminal refs beyond it. Its size is bounded by the window.

*Mixtures.* With several sources, a source of n entries and weight w has round(w·n) places in every epoch, at least one,
so that all epochs are equally long. Its places continue through its entries from epoch to epoch and start over at the
end. Over any consecutive epochs, the use counts of two entries differ by at most one. If the weight is not an integer,
entries follow a fixed keyed permutation; otherwise a weight of one half would use the first half of a sorted file. With
one source of weight 1, place i is entry i.
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


class ShardCursor(NamedTuple):
    """Which positions of a shard have an outcome (are terminal).

    All below `low_water` are terminal. Bit i of `beyond`: whether position `low_water + i` is terminal.
    """

    low_water: int = 0
    beyond: int = 0

    def is_terminal(self, position: int) -> bool:
        """Return whether `position` has an outcome."""
        return position < self.low_water or bool(self.beyond >> (position - self.low_water) & 1)

    def mark(self, position: int) -> ShardCursor:
        """Return the cursor with `position` marked as terminal.

        Raises ValueError if it already was, because a ref has exactly one outcome.
        """
        if self.is_terminal(position):
            raise ValueError(f"the prompt at position {position} already has its outcome")
        beyond = self.beyond | 1 << (position - self.low_water)
        ones = (~beyond & (beyond + 1)).bit_length() - 1  # trailing ones: the low-water mark moves over them
        return ShardCursor(self.low_water + ones, beyond >> ones)

    @property
    def terminal_count(self) -> int:
        """Number of positions that have an outcome."""
        return self.low_water + self.beyond.bit_count()


class StreamShape(NamedTuple):
    """The lengths of all shards: number of refs per epoch, by shard."""

    lengths: tuple[int, ...]

    def position(self, ref: PromptRef) -> int:
        """Return the ref's position in its shard, counted through all epochs."""
        return ref.data_epoch * self.lengths[ref.shard] + ref.seq

    def ref(self, shard: int, position: int) -> PromptRef:
        """Return the ref at a position of a shard; the inverse of `position`."""
        epoch, seq = divmod(position, self.lengths[shard])
        return PromptRef(epoch, shard, seq)


def shard_lengths(prompts: int, shards: int) -> StreamShape:
    """Divide `prompts` entries into `shards` shards whose lengths differ by at most one."""
    base, more = divmod(prompts, shards)
    return StreamShape(tuple(base + (shard < more) for shard in range(shards)))


class Cursors(NamedTuple):
    """The cursors of all shards: which prompts have an outcome."""

    shards: tuple[ShardCursor, ...]

    @classmethod
    def start(cls, shards: int) -> Cursors:
        """Return the cursors at the start of a job: no ref has an outcome."""
        return cls((ShardCursor(),) * shards)

    def is_terminal(self, shape: StreamShape, ref: PromptRef) -> bool:
        """Return whether `ref` has an outcome."""
        return self.shards[ref.shard].is_terminal(shape.position(ref))

    def union(self, shape: StreamShape, refs: Iterable[PromptRef]) -> Cursors:
        """Return the cursors with `refs` marked as terminal. Raises ValueError if a ref already was, or occurs twice."""
        shards = list(self.shards)
        for ref in refs:
            shards[ref.shard] = shards[ref.shard].mark(shape.position(ref))
        return Cursors(tuple(shards))

    @property
    def terminal_count(self) -> int:
        """Number of refs that have an outcome, in all shards."""
        return sum(cursor.terminal_count for cursor in self.shards)

    def encode(self) -> list[str]:
        """Encode the cursors for the store: per shard a string "low_water" or "low_water+beyond", `beyond` in hex."""
        return [f"{c.low_water}+{c.beyond:x}" if c.beyond else str(c.low_water) for c in self.shards]

    @classmethod
    def decode(cls, text: list[str]) -> Cursors:
        """Decode the strings that `encode` returns. Raises ValueError."""
        shards = []
        for part in text:
            if not isinstance(part, str):
                raise ValueError(f"{part!r} is not an encoded shard cursor, which is text")
            low, _, beyond = part.partition("+")
            shards.append(ShardCursor(int(low), int(beyond, 16) if beyond else 0))
        return cls(tuple(shards))


# Four Feistel rounds with a good round function are indistinguishable from random for large domains. Small domains need more;
# eight rounds take about ten microseconds.
ROUNDS = 8


class KeyedPermutation:
    """A bijection of range(length) onto itself, defined by `key` (at most 64 bytes). Immutable."""

    __slots__ = ("_half_bits", "_key", "_mask", "length")

    def __init__(self, key: bytes, length: int) -> None:
        self.length = length
        self._key = key
        bits = max(2, (length - 1).bit_length())
        self._half_bits = (bits + 1) // 2
        self._mask = (1 << self._half_bits) - 1

    def index(self, seq: int) -> int:
        """Return the value to which the permutation maps `seq`. Raises IndexError outside range(length)."""
        place = self._checked(seq)
        while True:
            place = self._forth(place)
            if place < self.length:
                return place

    def seq(self, index: int) -> int:
        """Return the value that the permutation maps to `index`. Raises IndexError outside range(length)."""
        place = self._checked(index)
        while True:
            place = self._back(place)
            if place < self.length:
                return place

    def _checked(self, place: int) -> int:
        if not 0 <= place < self.length:
            raise IndexError(f"the shard has {self.length} prompts, so there is no place {place}")
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
    """The order of a shard in an epoch: maps a position in the order to a place in the shard.

    `seed`, `data_epoch` and `shard` may be any 64-bit integers.
    """

    __slots__ = ()

    def __init__(self, seed: int, data_epoch: int, shard: int, length: int) -> None:
        packed = struct.pack("<Qqq", seed, data_epoch, shard)
        super().__init__(blake2b(packed, digest_size=32, person=b"gcore.shard").digest(), length)


def entry_index(shape: StreamShape, seed: int, ref: PromptRef) -> int:
    """Return the number of the stream's entry that `ref` means, in the default order.

    Raises IndexError for a ref outside the stream.
    """
    order = ShardOrder(seed, ref.data_epoch, ref.shard, shard_length(shape, ref.shard))
    return order.index(ref.seq) * len(shape.lengths) + ref.shard


def ref_of_entry(shape: StreamShape, seed: int, data_epoch: int, entry: int) -> PromptRef:
    """Return the ref of the stream's entry number `entry` in an epoch; the inverse of `entry_index`. Raises IndexError."""
    if entry < 0:
        raise IndexError(f"there is no entry {entry}; entries are counted from 0")
    place, shard = divmod(entry, len(shape.lengths))
    return PromptRef(data_epoch, shard, ShardOrder(seed, data_epoch, shard, shard_length(shape, shard)).seq(place))


def shard_length(shape: StreamShape, shard: int) -> int:
    """Return the number of refs of a shard per epoch. Raises IndexError for an unknown shard."""
    if not 0 <= shard < len(shape.lengths):
        raise IndexError(f"the stream has {len(shape.lengths)} shards, so there is no shard {shard}")
    return shape.lengths[shard]


@dataclass(frozen=True, slots=True)
class SourceShare:
    """A source's share of an epoch: its number of entries, and its weight.

    The name is part of the key of its permutation, so that other sources do not change it.
    """

    name: str
    entries: int
    weight: float = 1.0

    @property
    def refs(self) -> int:
        """Number of the source's places in every epoch."""
        return max(1, round(self.weight * self.entries))


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Identifies a dataset entry: number `entry` of source number `source`."""

    source: int
    entry: int


class Mixture:
    """Mixes the sources of a stream: maps places of an epoch to entries of sources. `shares`: in the order of the spec."""

    def __init__(self, shares: Sequence[SourceShare], seed: int) -> None:
        self.shares = tuple(shares)
        self._ends = tuple(itertools.accumulate(share.refs for share in self.shares))
        self._orders = tuple(_order(share, seed) for share in self.shares)

    @property
    def refs(self) -> int:
        """Number of places in an epoch."""
        return self._ends[-1]

    def at(self, data_epoch: int, place: int) -> SourceEntry:
        """Return the entry at `place` of an epoch. Raises IndexError outside range(refs)."""
        if not 0 <= place < self.refs:
            raise IndexError(f"an epoch has {self.refs} prompts, so there is no place {place}")
        source = bisect.bisect_right(self._ends, place)
        share, order = self.shares[source], self._orders[source]
        within = place - self._ends[source] + share.refs
        if order is None:
            return SourceEntry(source, within % share.entries)
        return SourceEntry(source, order.index((data_epoch * share.refs + within) % share.entries))


def _order(share: SourceShare, seed: int) -> KeyedPermutation | None:
    if share.refs % share.entries == 0:
        return None  # every epoch uses every entry equally often
    packed = struct.pack("<Q", seed) + share.name.encode()
    return KeyedPermutation(blake2b(packed, digest_size=32, person=b"gcore.source").digest(), share.entries)
