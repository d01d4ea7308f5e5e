"""The key-value cache of the running rows, as two tensors, and what a Hugging Face model sees of it.

`columns` decides where everything stands; this module only moves numbers. Keys and values are
`[layer, row, kv_head, column, head_dim]`. `bias` is `[row, kv_head, 1, column]`, 0 inside a row's window and -inf left
of it; it is kept from step to step, because it changes only when rows come, go or move.

The table begins as zeros and a window's neighbourhood may hold what a row left behind: finite numbers that the bias
silences. Does not compute attention (`attention`) and does not choose rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache

from gcore.rollout.engine.columns import SMALLEST, Refill, Room


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One layer's cell, and how many layers."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Prefix:
    """Keys and values of freshly computed prompts, `[prompt, kv_head, token, head_dim]` for each layer."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the next layer's."""
        self.keys.append(keys)
        self.values.append(values)


class RowCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """What the model is given as `past_key_values`.

    While a `Prefix` is open the model's keys and values go there (prefill); otherwise they are a decode step's, go to
    the write column of the first rows, and the model gets the live part of the table back.
    """

    is_compileable = False

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.rows = 0
        self.columns = 0
        self.prefix: Prefix | None = None
        self._first = 0
        self._column = 0
        self._active = 0
        self._allocate(0, SMALLEST)

    def _allocate(self, rows: int, columns: int) -> None:
        s = self.shape
        size = (s.layers, rows, s.kv_heads, columns, s.head_dim)
        self.keys, self.values = _zeros(size, s), _zeros(size, s)
        self.bias = _zeros((rows, s.kv_heads, 1, columns), s)
        self.rows, self.columns = rows, columns

    def release(self) -> None:
        """Give the memory back; no row may be running."""
        self._allocate(0, SMALLEST)

    def move(self, room: Room, *, rows: int, active: int, first: int, column: int, starts: Sequence[int]) -> None:
        """Carry the live part `[first, column)` of the first `active` rows over, as `room` says.

        `starts`: the rows' first columns before the move.
        """
        if room.shift == 0 and rows == self.rows and room.columns == self.columns:
            return
        keys, values = self.keys, self.values
        old = slice(first, column)
        new = slice(first + room.shift, column + room.shift)
        if rows != self.rows or room.columns != self.columns:
            self._allocate(rows, room.columns)
            if active:
                self.keys[:, :active, :, new] = keys[:, :active, :, old]
                self.values[:, :active, :, new] = values[:, :active, :, old]
        elif active:
            # The two windows may overlap.
            self.keys[:, :active, :, new] = keys[:, :active, :, old].clone()
            self.values[:, :active, :, new] = values[:, :active, :, old].clone()
        for row, start in enumerate(starts):
            self._begin(slice(row, row + 1), start + room.shift)

    def _begin(self, rows: slice, start: int) -> None:
        self.bias[rows, :, :, :start] = float("-inf")
        self.bias[rows, :, :, start:] = 0

    def join(self, prefix: Prefix, members: Sequence[int], length: int, *, row: int, column: int) -> None:
        """Prompts `members` of `prefix`, all `length` tokens long, become the rows from `row` on."""
        rows = slice(row, row + len(members))
        window = slice(column - length, column)
        index = torch.tensor(members, device=self.shape.device)
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
            self.keys[layer, rows, :, window] = keys[:, :, :length].index_select(0, index)
            self.values[layer, rows, :, window] = values[:, :, :length].index_select(0, index)
        self._begin(rows, column - length)

    def copy(self, source: int, start: int, length: int, *, rows: slice, column: int) -> None:
        """`rows` join with the first `length` tokens of the running row `source`, whose window begins at `start`."""
        old, new = slice(start, start + length), slice(column - length, column)
        for table in (self.keys, self.values):
            table[:, rows, :, new] = table[:, source, :, old].clone().unsqueeze(1)
        self._begin(rows, column - length)

    def refill(self, refill: Refill, *, first: int, column: int) -> None:
        """Move rows into the holes."""
        if not refill.holes:
            return
        holes = torch.tensor(refill.holes, device=self.shape.device)
        sources = torch.tensor(refill.sources, device=self.shape.device)
        for layer in range(self.shape.layers):
            for table in (self.keys[layer], self.values[layer]):
                live = table[:, :, first:column]
                live[holes] = live[sources]
        self.bias[holes] = self.bias[sources]

    def aim(self, *, active: int, first: int, column: int) -> torch.Tensor:
        """The next forward pass is a decode step of `active` rows at `column`. The bias, `[active * kv, 1, width]`."""
        self.prefix = None
        self._active, self._first, self._column = active, first, column
        window = self.bias[:active, :, :, first : column + 1]
        return window.view(active * self.shape.kv_heads, 1, column + 1 - first)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model, layer by layer; `[row, kv_head, token, head_dim]` in and out."""
        if self.prefix is not None:
            self.prefix.update(key_states, value_states)
            return key_states, value_states
        rows, column = self._active, self._column
        keys, values = self.keys[layer_idx, :rows], self.values[layer_idx, :rows]
        keys[:, :, column] = key_states[:, :, 0]
        values[:, :, column] = value_states[:, :, 0]
        return keys[:, :, self._first : column + 1], values[:, :, self._first : column + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing, as far as the model is concerned: it is told every position."""
        return 0


def _zeros(size: tuple[int, ...], shape: CacheShape) -> torch.Tensor:
    if shape.device.type != "cpu" or math.prod(size) == 0:
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # torch.zeros writes every page; numpy's come from the system zeroed and cost nothing until they are used.
    raw = torch.from_numpy(np.zeros(math.prod(size) * shape.dtype.itemsize, np.uint8))
    return raw.view(shape.dtype).view(size)
