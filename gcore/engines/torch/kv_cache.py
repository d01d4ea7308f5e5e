"""KV cache: one table of rows and columns for the running batch, and the rules that size it and place rows.

The table has one row per running sequence and one column per token position. All rows share one write column: a decode
step writes every row's new token there, so that writing is one slice copy. A row's live window is `[start, column)`,
and the token at `c` has position `c - start`. A prompt of `p` tokens joins at `[column - p, column)`: no padding.

The write column moves right with each step. When it reaches the last column, all live columns move to the left edge. If
that would happen often, the table is widened instead: at least half of it must be free after a move, so that moves have
a constant cost per token. With limited memory it is widened only up to the limit, and keeps at least `SLACK` free
columns. When rows leave, rows from the bottom of the table move up into the holes, so that the running rows are always
the first ones.

`plan_resize` and `table_rows` decide all positions; `KVCache` only moves numbers. Attention is computed in `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache

from gcore.engines.torch.scheduler import Compaction

SMALLEST = 64
"""Number of columns of the smallest table."""

SLACK = 32
"""Minimum number of columns of a table beyond the longest row. The table is moved at most once in this many steps; a
move costs about as much as the attention of two steps."""


@dataclass(frozen=True, slots=True)
class TableResize:
    """What must be done to the table before the next write: move every row's live window by `shift` columns, into a
    table of `columns` columns.
    """

    shift: int
    columns: int


def plan_resize(*, first: int | None, column: int, longest: int, columns: int, most: int | None = None) -> TableResize:
    """Decide how to make room for joining prompts of up to `longest` tokens (0: nothing joins) and for the next write.

    `first`: the leftmost live column; None: no row runs. `column`: the write column. `columns`: present number of
    columns. `most`: maximum number of columns, which must hold the live columns and the next write. Afterwards the
    write column is `column + shift`, which is at least `longest` and less than the new number of columns.
    """
    lives = 0 if first is None else column - first
    fits = most is None or columns <= most
    if longest <= column < columns and first is not None and fits:
        return TableResize(0, columns)
    end = max(lives, longest)
    wide = columns if end <= columns // 2 else 2 * end + SMALLEST
    if most is not None and wide > most:
        wide = max(most, end + 1)
    return TableResize(end - column, wide)


def table_footprint(rows: int, longest: int) -> int:
    """Return the minimum number of cells (tokens) of a table for `rows` rows.

    `longest`: their maximum length in tokens, including the next write.
    """
    return rows * (longest + SLACK)


def table_rows(wanted: int, *, rows: int, most: int, longest: int = 0, budget: int | None = None) -> int:
    """Return the number of rows that the table should have to hold `wanted` rows.

    `rows`: its present number, which is doubled when it is too small, up to `most`. `budget`: maximum number of cells;
    if rows of `longest` tokens would exceed it, the table gets exactly the wanted rows.
    """
    grown = rows if wanted <= rows else min(most, max(wanted, 2 * rows, 8))
    if budget is not None and table_footprint(grown, longest) > budget:
        grown = wanted
    return grown


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches per token: `kv_heads` keys of `key_dim` numbers, and as many values of `value_dim`."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a KV cache: what each layer caches, and the cache's dtype and device."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers, and its cell in the bias."""
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        return (numbers + max((layer.kv_heads for layer in self.layers), default=0)) * self.dtype.itemsize


class KVCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The table of the running rows. Passed to the model as `past_key_values` in a decode step.

    The model's new keys and values are written to the write column; it gets the live part of the table back. `bias`
    masks the columns outside of each row's window.
    """

    is_compileable = False

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.rows = 0
        self.columns = SMALLEST
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.bias = torch.zeros(0)
        self._first = 0
        self._column = 0
        self._active = 0
        self.release()

    def release(self) -> None:
        """Free the table's memory. No row may be running."""
        self.keys = [self._table(0, SMALLEST, layer, layer.key_dim) for layer in self.shape.layers]
        self.values = [self._table(0, SMALLEST, layer, layer.value_dim) for layer in self.shape.layers]
        self.bias = self._table(0, 1, self.shape.layers[0], SMALLEST)
        self.rows, self.columns = 0, SMALLEST

    def _table(self, rows: int, columns: int, layer: LayerShape, dim: int) -> torch.Tensor:
        return new_table((rows, layer.kv_heads, columns, dim), self.shape)

    def move(
        self, room: TableResize, *, rows: int, active: int, first: int, column: int, starts: Sequence[int]
    ) -> None:
        """Move the live columns [first, column) of the first `active` rows as `room` says; resize the table to `rows`.

        `starts`: each row's first column before the move.
        """
        if room.shift == 0 and rows == self.rows and room.columns == self.columns:
            return
        old, new = slice(first, column), slice(first + room.shift, column + room.shift)
        anew = rows != self.rows or room.columns != self.columns
        for tables in (self.keys, self.values):
            for number, (table, layer) in enumerate(zip(tables, self.shape.layers, strict=True)):
                # Within one table the two windows may overlap.
                live = table[:active, :, old]
                if anew:
                    tables[number] = self._table(rows, room.columns, layer, table.shape[-1])
                if anew and active:
                    tables[number][:active, :, new] = live
                elif active:
                    table[:active, :, new] = live.clone()
                del table, live
        if anew:
            self.bias = self._table(rows, 1, self.shape.layers[0], room.columns)
            self.rows, self.columns = rows, room.columns
        for row, start in enumerate(starts):
            self._begin(slice(row, row + 1), start + room.shift)

    def _begin(self, rows: slice, start: int) -> None:
        self.bias[rows, :, :, :start] = float("-inf")
        self.bias[rows, :, :, start:] = 0

    def join(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        members: Sequence[int],
        length: int,
        *,
        row: int,
        column: int,
    ) -> None:
        """Add prompts of `length` tokens as the rows from `row` on, ending before the write column `column`.

        `keys`, `values`: by layer, [prompt, kv_head, token, head_dim]. `members`: indexes of the prompts to add.
        """
        rows = slice(row, row + len(members))
        window = slice(column - length, column)
        index = torch.tensor(members, device=self.shape.device)
        for tables, made in ((self.keys, keys), (self.values, values)):
            for table, layer in zip(tables, made, strict=True):
                table[rows, :, window] = layer[:, :, :length].index_select(0, index)
        self._begin(rows, column - length)

    def copy(self, source: int, start: int, length: int, *, rows: slice, column: int) -> None:
        """Fill `rows` with the first `length` tokens of the running row `source`, whose window begins at `start`.

        The copies end before the write column `column`.
        """
        old, new = slice(start, start + length), slice(column - length, column)
        for table in (*self.keys, *self.values):
            table[rows, :, new] = table[source, :, old].clone().unsqueeze(0)
        self._begin(rows, column - length)

    def refill(self, refill: Compaction, *, first: int, column: int) -> None:
        """Copy rows into the places of rows that have left. `first`, `column`: the live columns."""
        if not refill.holes:
            return
        holes = torch.tensor(refill.holes, device=self.shape.device)
        sources = torch.tensor(refill.sources, device=self.shape.device)
        for table in (*self.keys, *self.values):
            live = table[:, :, first:column]
            live[holes] = live[sources]
        self.bias[holes] = self.bias[sources]

    def clean(self) -> None:
        """Replace values that are not finite by 0: even masked, they would make a row's output not finite."""
        for table in (*self.keys, *self.values):
            table.nan_to_num_(0.0, 0.0, 0.0)

    def aim(self, *, active: int, first: int, column: int) -> torch.Tensor:
        """Prepare a decode step of the first `active` rows, which writes `column`.

        Returns the attention bias [active * kv_head, 1, width] for the live columns from `first` on.
        """
        self._active, self._first, self._column = active, first, column
        window = self.bias[:active, :, :, first : column + 1]
        return window.view(active * self.shape.layers[0].kv_heads, 1, column + 1 - first)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values [row, kv_head, 1, head_dim], and return all live columns of the layer.

        The model calls it in each layer.
        """
        rows, column = self._active, self._column
        keys, values = self.keys[layer_idx][:rows], self.values[layer_idx][:rows]
        keys[:, :, column] = key_states[:, :, 0]
        values[:, :, column] = value_states[:, :, 0]
        return keys[:, :, self._first : column + 1], values[:, :, self._first : column + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the model receives every position and must not count tokens itself."""
        return 0


def new_table(size: tuple[int, ...], shape: CacheShape) -> torch.Tensor:
    """Create a tensor of zeros with the dtype and device of `shape`. On a CPU, memory is allocated only as it is used."""
    if shape.device.type != "cpu" or math.prod(size) == 0:
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # torch.zeros writes every page; numpy's zeroed pages come from the system and cost nothing until they are used.
    raw = torch.from_numpy(np.zeros(math.prod(size) * shape.dtype.itemsize, np.uint8))
    return raw.view(shape.dtype).view(size)
