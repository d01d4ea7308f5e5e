"""Who gets a row, who gives it back, and how much of the waiting prompts is read now: pure decisions over sizes.

Memory is counted in cells: places for one token's keys and values. A lane says with its footprint how many cells rows of
certain lengths take; the budget (`cache_tokens`) is never exceeded by what is admitted here.

- Requests are admitted in the order of their arrival. One that does not fit yet holds back those behind it, so none is
  overtaken for ever by smaller ones.
- A request is admitted with `RESERVE` tokens of its growth, or all that it may still make, so that it does not have to
  leave again at once.
- When the running rows outgrow the budget, the youngest give theirs back. They wait in front of all others, with their
  tokens, so the queue stays in the order of arrival. The oldest never gives its row back, and whatever was accepted fits
  alone: so each request comes to its end.
- While rows decode, a cycle reads at most `prefill_chunk_tokens` of waiting prompts, so that a long prompt delays nobody's
  next token by more than that; when nothing decodes there is nobody to delay, and it reads up to `IDLE_TOKENS`.

Knows no torch, no cache and no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RESERVE = 64
"""Tokens of growth that an admission sets aside."""
IDLE_TOKENS = 8192
"""Prompt tokens in one cycle when no row decodes, and padded tokens in one forward pass of several prompts."""
SMALLEST_PIECE = 32
"""A prompt is not begun for fewer tokens than this."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of a set of rows: how many, the longest, and all their tokens together."""

    rows: int = 0
    longest: int = 0
    tokens: int = 0

    def plus(self, length: int) -> Size:
        """With one more row of `length` tokens."""
        return Size(self.rows + 1, max(self.longest, length), self.tokens + length)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Size:
        """Rows of these lengths."""
        return cls(len(lengths), max(lengths, default=0), sum(lengths))


Footprint = Callable[[Size], int]
"""Cells that rows of this size take."""


@dataclass(frozen=True, slots=True)
class Want:
    """A waiting sample: tokens it has (prompt and what it made before), and the most it may still make."""

    length: int
    growth: int

    @property
    def reserved(self) -> int:
        """The length it is admitted with."""
        return self.length + min(self.growth, RESERVE)


def longest_alone(most: int, *, budget: int, footprint: Footprint) -> int:
    """The longest request, of at most `most` tokens, that can be served when nothing else runs; 0: none."""
    return bisect_right(range(1, most + 1), budget, key=lambda length: footprint(Size().plus(length)))


def admissible(waiting: Sequence[Want], held: Size, *, free: int, budget: int, footprint: Footprint) -> int:
    """How many of the first that wait may have a row, beside what is `held`; `free`: rows that are not taken.

    The first is admitted in any case when nothing is held.
    """
    count, size = 0, held
    for want in waiting[: max(0, free)]:
        size = size.plus(want.reserved)
        if footprint(size) > budget and (held.rows or count):
            break
        count += 1
    return count


def outgrown(lengths: Sequence[int], ages: Sequence[int], *, budget: int, footprint: Footprint) -> list[int]:
    """Which rows (as indices) give theirs back, youngest first, so that the others fit; the oldest stays in any case.

    `ages`: numbers in the order of arrival.
    """
    if footprint(Size.of(lengths)) <= budget:
        return []
    stay = sorted(range(len(lengths)), key=lambda i: ages[i])
    gone = []
    while len(stay) > 1 and footprint(Size.of([lengths[i] for i in stay])) > budget:
        gone.append(stay.pop())
    return gone


def portions(remaining: Sequence[int], *, budget: int, grid: int | None = None, done: Sequence[int] = ()) -> list[int]:
    """How many tokens of each of these prompts are read in this cycle, in order; 0 from where the budget ends.

    `remaining`: their unread tokens. With a `grid` a prompt is only cut at multiples of it, counted from its beginning
    (`done`: what is read of each already): the pieces are then the same however busy the engine is. The first piece is
    read even where it exceeds the budget.
    """
    left = budget
    taken: list[int] = []
    for index, rest in enumerate(remaining):
        begun = bool(taken)
        if grid is None:
            portion = rest if rest <= left else left if not begun or left >= SMALLEST_PIECE else 0
        else:
            begin = done[index] if done else 0
            portion = _whole_pieces(begin, begin + rest, left, grid, at_least_one=not begun)
        taken.append(portion)
        left -= portion
        if portion < rest:
            break
    return taken + [0] * (len(remaining) - len(taken))


def _whole_pieces(begin: int, end: int, left: int, grid: int, *, at_least_one: bool) -> int:
    if end - begin <= left:
        return end - begin
    last = (begin + max(0, left)) // grid * grid
    if last <= begin and at_least_one:
        last = min(end, (begin // grid + 1) * grid)
    return max(0, last - begin)
