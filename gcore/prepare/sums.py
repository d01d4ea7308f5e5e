"""The sums of the arithmetic example: which there are, which are held out, and how a careless hand answers them.

A sum is a two-digit number (10 to 99) and a one-digit number (2 to 9), in either order: "47+8=" and "8+47=". A *pair* of
operands is held out in both orders together, so that a held-out sum is new to the model in every sense. One pair in
seven is held out, of those with a carry and of those without alike; which ones is decided by a keyed hash, so that it is
the same on every machine and for ever.

The warm start also sees *wide* sums, of a three-digit and a one-digit number: from two-digit ones alone the model learns
many by heart, and what reinforcement learning then teaches it does not carry over to sums it never saw. A wide sum whose
last two digits make a held-out sum ("147+8=" where "47+8=" is held out) is left out too.

The *careless hand* (`gcore.prepare.lesson`) knows its sums, but mostly drops the carry ("47+8=45").

Pure; the randomness of the careless hand is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gcore.prepare.lesson import Lesson, shuffled

CHARACTERS = "0123456789+="

CARELESS_SHARE = 0.7
"""How often a demonstration drops its carry. Well above one half, or the model's preference would be a matter of luck."""

BAND = (0.38, 0.48)
"""The share of held-out sums that the model is right on, greedily, when it is handed to RL."""

HELD_OUT_SHARE = 7
"""One pair in so many is held out."""


@dataclass(frozen=True, slots=True)
class Sum:
    """`left + right`."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """What the model is shown: five characters, six for a wide sum."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.left + self.right)

    @property
    def has_carry(self) -> bool:
        """Whether the units make ten or more."""
        return self.left % 10 + self.right % 10 >= 10

    @property
    def careless_answer(self) -> str:
        """The answer with the carry dropped; the right one where there is none."""
        return str(self.left + self.right - (10 if self.has_carry else 0))

    @property
    def pair(self) -> tuple[int, int]:
        """The operands, the larger first: equal for both orders."""
        return max(self.left, self.right), min(self.left, self.right)


@dataclass(frozen=True, slots=True)
class SumSplit:
    """The sums to learn from, and those held out; no pair is in both. `wide` is for the warm start alone."""

    train: tuple[Sum, ...]
    held_out: tuple[Sum, ...]
    wide: tuple[Sum, ...]

    @property
    def lesson(self) -> Lesson:
        """What the warm start is given: half of it wide."""
        return Lesson(CHARACTERS, (self.train, self.wide), (32, 32), self.held_out, CARELESS_SHARE, BAND)


def split_sums(seed: int) -> SumSplit:
    """All sums, split by pair. `seed` decides which pairs are held out, and the order of the lists."""
    everything = [Sum(left, right) for left in range(10, 100) for right in range(2, 10)]
    held_out: list[Sum] = []
    train: list[Sum] = []
    for has_carry in (True, False):
        kind = shuffled((s for s in everything if s.has_carry == has_carry), f"pairs {seed}")
        cut = round(len(kind) / HELD_OUT_SHARE)
        held_out += kind[:cut]
        train += kind[cut:]
    hidden = {s.pair for s in held_out}
    wide = [Sum(left, right) for left in range(100, 1000) for right in range(2, 10)]
    return SumSplit(
        train=tuple(shuffled(_both_orders(train), f"order {seed}")),
        held_out=tuple(shuffled(_both_orders(held_out), f"order {seed}")),
        wide=tuple(_both_orders(s for s in wide if (s.left % 100, s.right) not in hidden)),
    )


def _both_orders(sums: Iterable[Sum]) -> list[Sum]:
    return [ordered for s in sums for ordered in (s, Sum(s.right, s.left))]
