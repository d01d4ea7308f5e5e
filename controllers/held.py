"""What a rank holds, from its two sources: its stream, and its answers to feeds. They overtake each other, and both only grow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

from gcore.api.v1 import train_pb2 as pb
from gcore.train.messages import read_held


class Held(Mapping[str, frozenset[int]]):
    """What a rank holds: as its stream last said, and as its answers to feeds of the same token did, which may be newer.

    Read when somebody asks. A rank's word is as long as what it holds, and while a batch comes from many peers most of its
    words are overtaken by the next before this controller looks.
    """

    def __init__(self, told: Iterable[pb.HeldGroup], answered: Mapping[str, frozenset[int]]) -> None:
        self._told = told
        self._answered = answered

    @functools.cached_property
    def _read(self) -> Mapping[str, frozenset[int]]:
        return joined(read_held(self._told), self._answered)

    def __getitem__(self, digest: str) -> frozenset[int]:
        return self._read[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def joined(one: Mapping[str, frozenset[int]], other: Mapping[str, frozenset[int]]) -> Mapping[str, frozenset[int]]:
    """All that either knows of."""
    if one == other:
        return one
    joined = {**one, **other}
    for digest, samples in one.items():
        if not samples <= joined[digest]:
            joined[digest] |= samples
    return joined
