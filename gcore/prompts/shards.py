"""Which entry of the stream a prompt ref is: the order of each shard, as a keyed permutation.

Entry i of the stream (of the dataset, if it has one source of weight 1: `gcore.prompts.mixture`) belongs to shard i % S, at place i // S (so shard lengths differ by at most one, as
`gcore.prompts.cursor.shard_lengths` cuts them). In every epoch a shard goes through its places in another order, which is a
pure function of (seed, data_epoch, shard): a Feistel network over the smallest power of four that holds the shard, and
whatever falls outside is sent through it again until it falls inside (cycle walking; at most four rounds on average).
No list is shuffled or stored, any place of any epoch is found at once, and every controller finds the same.

It does not read the dataset and does not know what is terminal; `gcore.prompts.cursor` does.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from gcore.prompts.cursor import StreamShape
from gcore.types import PromptRef

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
