"""Who goes first, and when the others follow.

Any peer may make any transaction; to spare the store losing ones (a loser's body is written to its log all the same), a
preferred peer tries at once and each other a little later. Only politeness rests on this, never safety. Pure.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TURN_SECONDS = 1.0
"""How long each peer leaves the one before it."""
SETTLE_S = 1.0
"""A loss is looked at twice: registrations and claims reach a controller through different watches."""


def order(members: Iterable[str], topic: str) -> tuple[str, ...]:
    """The members in the order of `topic`."""
    return _order(frozenset(members), topic)


@functools.lru_cache(maxsize=1024)  # the same few topics are looked at again and again
def _order(members: frozenset[str], topic: str) -> tuple[str, ...]:
    return tuple(sorted(members, key=lambda name: hashlib.blake2b(f"{topic}|{name}".encode()).digest()))


def turn(members: Iterable[str], me: str, topic: str) -> int:
    """My place in the order of `topic`: 0 goes first. A peer that is not among the members goes last."""
    ordered = order(members, topic)
    return ordered.index(me) if me in ordered else len(ordered) + 1


@dataclass(frozen=True, slots=True)
class Waits:
    """Since when each condition has held without a break."""

    since: Mapping[str, float]

    def note(self, conditions: Iterable[str], now: float) -> Waits:
        """Conditions that hold now keep their beginning, or begin; the others are forgotten."""
        return Waits({c: self.since.get(c, now) for c in conditions})

    def ripe(self, condition: str, turn: int, now: float, *, after: float = 0.0) -> bool:
        """Whether it is my turn: the condition has held for `after` plus my place in the order."""
        return now - self.since.get(condition, now) >= self.wait(turn, after)

    @staticmethod
    def wait(turn: int, after: float) -> float:
        """How long a peer of that place waits, in seconds."""
        return after + turn * TURN_SECONDS
