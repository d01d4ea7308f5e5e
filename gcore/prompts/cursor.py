"""Which prompt refs of a shard are terminal: a low-water mark and a bitmap of what is terminal beyond it.

A *position* counts a shard's refs through all epochs: `p = data_epoch * shard_length + seq`, so one cursor spans epochs,
and shards may stand in different ones. Pure; the size does not depend on how much was consumed, only on how far the
stream is ragged (at most the window).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gcore.types import PromptRef


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
