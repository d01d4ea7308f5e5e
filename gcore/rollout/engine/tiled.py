"""The deterministic lane: what a row computes does not depend on the rows beside it, bit for bit.

Floating-point sums depend on their order, and a library chooses the order by the shapes it is given. So every shape here
is either fixed or a function of the row's own tokens:

- rows go through the model in tiles of `tile` rows, the last filled up with idle rows, so that every layer always
  multiplies matrices of the same size;
- a row begins at column 0 of its own stretch, and attention goes over blocks of `BLOCK` columns of one shape, joined in
  order (`attention.Blocks`): a block in which a row has nothing leaves its result as it is, to the bit;
- a prompt is read alone, cut only at multiples of `grid` from its beginning;
- a row that gave its place back makes its tokens again one by one, because reading them at once would sum otherwise.

What was seen with torch 2.13 in float32 on an x86 CPU, with one and with two threads, at widths 32 to 3072: matrix
products with four or more rows give a row the same bits whatever the other rows hold, wherever the row stands, and
whatever their number; with one or two rows they give others. Batched products are the same for every batch. Softmax,
log_softmax and cumulative sums go row by row. The bits also depend on where weights lie in memory: all begin at multiples
of 64 bytes (`model`). Whether it holds for a model on a machine is tried out at start (`prove`),
and where a fixed size is not enough (layers that send each token to experts of its own) the tile is one row. Models that
cannot be served here take the plain lane, sample by sample.

Slower than the shared lane: a full tile costs the same however few rows run, and attention takes more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from transformers.cache_utils import Cache

from gcore.rollout.engine.attention import BLOCK, Blocks
from gcore.rollout.engine.cache import CacheShape, zeros
from gcore.rollout.engine.columns import Refill
from gcore.rollout.engine.lane import Origin
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.prefill import Chunk, Place, read
from gcore.rollout.engine.rows import Ints
from gcore.rollout.engine.schedule import Size

TILE = 32
"""Rows in one forward pass."""


class Tile(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keys and values of one tile's rows, by layer `[row, kv_head, column, head_dim]`; position p stands at column p."""

    is_compileable = False

    def __init__(self, shape: CacheShape, rows: int) -> None:
        super().__init__(layers=[])
        self._shape = shape
        self._rows = rows
        self.columns = 0
        self.keys: list[torch.Tensor] = [torch.zeros(0)] * len(shape.layers)
        self.values: list[torch.Tensor] = [torch.zeros(0)] * len(shape.layers)
        self._all = torch.arange(rows, device=shape.device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=shape.device)

    def reserve(self, columns: int) -> None:
        """At least so many columns, in whole blocks."""
        if columns <= self.columns:
            return
        old, self.columns = self.columns, -(-columns // BLOCK) * BLOCK
        for number, layer in enumerate(self._shape.layers):
            for tables, dim in ((self.keys, layer.key_dim), (self.values, layer.value_dim)):
                table = zeros((self._rows, layer.kv_heads, self.columns, dim), self._shape)
                if old:
                    table[:, :, :old] = tables[number]
                tables[number] = table

    def aim(self, positions: torch.Tensor) -> None:
        """The next pass writes each row's token at its position."""
        self._positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model, layer by layer."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._all, :, self._positions] = key_states[:, :, 0]
        values[self._all, :, self._positions] = value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing, as far as the model is concerned: it is told every position."""
        return 0


class TiledLane:
    """See the module. `chunk`: the grid on which prompts are cut."""

    name: ClassVar[str] = "tiled"
    copies: ClassVar[bool] = True

    def __init__(self, model: Model, *, chunk: int, tile: int = TILE) -> None:
        self.replays = True
        self.grid: int | None = chunk
        self.model = model
        self.tile = tile
        self._tiles: list[Tile] = []
        self._active = 0
        self._logits = torch.zeros(0)

    def footprint(self, size: Size) -> int:
        """Cells that rows of this size take: whole tiles of whole blocks, as long as the longest row."""
        return -(-size.rows // self.tile) * self.tile * -(-size.longest // BLOCK) * BLOCK

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Each prompt in passes of its own."""
        read(self.model, chunks, grid=self.grid)

    def _at(self, row: int) -> tuple[Tile, int]:
        return self._tiles[row // self.tile], row % self.tile

    def enter(self, origins: Sequence[Origin], active: int) -> Sequence[int]:
        """In the order in which they come."""
        for row, origin in enumerate(origins, active):
            if row // self.tile == len(self._tiles):
                self._tiles.append(Tile(self.model.shape, self.tile))
            tile, place = self._at(row)
            tile.reserve(origin.length + 1)
            if origin.row is not None:
                other, source = self._at(origin.row)
                self._copy(other.keys, other.values, source, tile, place, origin.length)
            else:
                assert origin.prompt is not None
                kept: Place = origin.prompt.kept
                self._copy(kept.prefix.keys, kept.prefix.values, kept.index, tile, place, origin.length)
        self._active = active + len(origins)
        return range(len(origins))

    def _copy(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        source: int,
        tile: Tile,
        place: int,
        length: int,
    ) -> None:
        for tables, others in ((tile.keys, keys), (tile.values, values)):
            for table, other in zip(tables, others, strict=True):
                table[place, :, :length] = other[source, :, :length]

    def step(self, tokens: Ints, lengths: Ints) -> torch.Tensor:
        """Tile by tile."""
        active, device, tile_rows = self._active, self.model.shape.device, self.tile
        rows = -(-active // tile_rows) * tile_rows
        ids, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        ids[:active], positions[:active] = tokens, lengths - 1
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self.model.vocabulary), dtype=self.model.shape.dtype, device=device)
        for number in range(rows // tile_rows):
            own, tile = slice(number * tile_rows, (number + 1) * tile_rows), self._tiles[number]
            longest = int(positions[own].max()) + 1
            tile.reserve(longest)
            at = torch.from_numpy(positions[own]).to(device)
            tile.aim(at)
            self.model.attention.kind = Blocks(at, -(-longest // BLOCK))
            self._logits[own] = self.model.forward(torch.from_numpy(ids[own, None]).to(device), at[:, None], tile)
        return self._logits[:active]

    def leave(self, change: Refill) -> None:
        """The last rows move into the holes; tiles that nobody needs any more are given back."""
        for hole, source in zip(change.holes, change.sources, strict=True):
            tile, place = self._at(hole)
            other, origin = self._at(source)
            tile.reserve(other.columns)
            self._copy(other.keys, other.values, origin, tile, place, other.columns)
        self._active = change.active
        del self._tiles[-(-change.active // self.tile) :]

    def release(self) -> None:
        """Give the tiles back."""
        self._tiles.clear()
        self._logits = torch.zeros(0)

    def clean(self) -> None:
        """Replace what is not finite."""
        for tile in self._tiles:
            for table in (*tile.keys, *tile.values):
                table.nan_to_num_(0.0, 0.0, 0.0)
