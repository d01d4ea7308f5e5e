"""Where in the cache things stand: pure bookkeeping of rows and columns.

The cache is a table: one row a running sequence, one column a token position. All rows share one write column: a decode
step writes every row's new token there, so that writing is one slice copy. A row's live window is `[start, column)`, and
the position of the token at `c` is `c - start`. A prompt of `p` tokens joins at `[column - p, column)`: no padding.

The write column moves right with each step; when it reaches the last column, everything live moves to the left edge. A
table that is too narrow for that to be rare is made wider instead: at least half of it must be free after a move, so that
the cost of moving is a constant per token. Where the memory is bounded it is only made as wide as the bound allows, and
has `SLACK` columns to spare at least.

When rows leave, those that stay at the bottom of the table move up into the holes, so that the running rows are always
the first ones.

Does not know torch, nor what stands in the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST = 64
"""Columns of the smallest table."""
SLACK = 32
"""Columns beyond the longest row that a table has at least: it is moved at most once in so many steps, and a move costs
about as much as the attention of two."""


@dataclass(frozen=True, slots=True)
class Room:
    """What must be done before the next write: move every live window by `shift` columns, in a table of `columns`."""

    shift: int
    columns: int


def make_room(*, first: int | None, column: int, longest: int, columns: int, most: int | None = None) -> Room:
    """Room for a joining prompt of `longest` tokens (0: nothing joins) and for the next write.

    `first`: the leftmost live column, None when no row runs. `most`: columns that there may be at most; they must hold
    what lives, and the next write. Afterwards the write column is `column + shift`, at least `longest`, and less than
    `columns`.
    """
    lives = 0 if first is None else column - first
    fits = most is None or columns <= most
    if longest <= column < columns and first is not None and fits:
        return Room(0, columns)
    end = max(lives, longest)
    wide = columns if end <= columns // 2 else 2 * end + SMALLEST
    if most is not None and wide > most:
        wide = max(most, end + 1)
    return Room(end - column, wide)


def footprint(rows: int, longest: int) -> int:
    """Cells that a table for so many rows must have at least. `longest`: of their lengths, the next write included."""
    return rows * (longest + SLACK)


def rows_for(wanted: int, *, rows: int, most: int, longest: int = 0, budget: int | None = None) -> int:
    """How many rows the table should have to hold `wanted`: doubled when it is too small, never more than `most`.

    With a `budget` of cells the table has no more rows than leave each of them `longest` columns, and so many as are
    wanted in any case.
    """
    grown = rows if wanted <= rows else min(most, max(wanted, 2 * rows, 8))
    if budget is not None and footprint(grown, longest) > budget:
        grown = wanted
    return grown


@dataclass(frozen=True, slots=True)
class Refill:
    """Row `sources[i]` is copied to `holes[i]`; then the first `active` rows are those that stay."""

    holes: tuple[int, ...]
    sources: tuple[int, ...]
    active: int


def refill(leaving: Sequence[int], active: int) -> Refill:
    """Which rows move into the places of those that leave, with as few copies as possible."""
    gone = set(leaving)
    stay = active - len(gone)
    holes = tuple(sorted(row for row in gone if row < stay))
    sources = tuple(row for row in range(stay, active) if row not in gone)
    return Refill(holes, sources, stay)


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts (as indices) that go through one forward pass, padded on the right to `width` tokens."""

    members: tuple[int, ...]
    width: int


def prefill_batches(lengths: Sequence[int], *, most_tokens: int) -> tuple[Batch, ...]:
    """Cut prompts into forward passes: neighbours in length together, at most `most_tokens` padded tokens in each.

    A prompt that alone is longer than `most_tokens` has a pass for itself. No pass is more than a quarter padding.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[Batch] = []
    members: list[int] = []
    tokens = 0
    for index in order:
        length = lengths[index]
        padded = length * (len(members) + 1)
        if members and (padded > most_tokens or 4 * (tokens + length) < 3 * padded):
            batches.append(Batch(tuple(members), lengths[members[-1]]))
            members, tokens = [], 0
        members.append(index)
        tokens += length
    if members:
        batches.append(Batch(tuple(members), lengths[members[-1]]))
    return tuple(batches)
