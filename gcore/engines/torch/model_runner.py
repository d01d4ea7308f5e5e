"""Model runner: passes a batch of rows (running sequences) through the model. `runner_selection` chooses one of three.

- `FastRunner`: all rows are in one KV table and write the same column; for models whose attention can be replaced.
- `DeterministicRunner`: for the same models. Rows are computed in tiles of fixed size, so that the bits of a row's
  result do not depend on other rows.
- `GenericRunner`: any causal model of transformers, with its own attention and cache.

A runner owns its KV cache and turns tokens into logits. It does not sample, and does not know requests. Memory is
counted in cells: one cell is the keys and values of one token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache

from gcore.engines.torch.attention import BLOCK, BlockDecodePass, DecodePass
from gcore.engines.torch.kv_cache import CacheShape, KVCache, new_table, plan_resize, table_footprint, table_rows
from gcore.engines.torch.model import Model
from gcore.engines.torch.prefill import (
    PrefillChunk,
    PrefixSlice,
    PromptPrefill,
    chunk_length,
    logit_positions,
    picture_inputs,
    prefill,
    record_logits,
)
from gcore.engines.torch.scheduler import IDLE_TOKENS, BatchSize, Compaction, Ints

UNCUT = 2**62


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Where the keys and values of a joining row's first `length` tokens come from: a prefilled prompt (`prompt`), or a
    running row to copy (`row`).
    """

    length: int
    logits: torch.Tensor
    """[vocabulary]: the logits after these tokens."""
    prompt: PromptPrefill | None = None
    row: int | None = None


class ModelRunner(Protocol):
    """Interface of the three runners; see the module docstring."""

    name: ClassVar[str]
    copies: ClassVar[bool]
    """Whether a joining row can copy the prompt of a running one."""
    replays: bool
    """Whether a preempted row's earlier tokens pass through the model again one by one, instead of being prefilled."""
    grid: int | None
    """Prompts are cut only at multiples of this (`UNCUT`: not at all); None: anywhere."""

    def footprint(self, size: BatchSize) -> int:
        """Return the number of cells that rows of this size take."""

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill prompts, or parts of them."""

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Add new rows after the first `active`, in any order. Return for each new row the index of its origin."""

    def step(self, tokens: Ints, lengths: Ints, adapters: Ints, shifts: Ints) -> torch.Tensor:
        """Run a decode step, and return logits [row, vocabulary], valid until the next call.

        `tokens` [row]: each row's last token, which is not in the cache yet. `lengths` [row]: tokens including it. `adapters` [row]:
        number of its adapter. `shifts` [row]: by how much pictures shift its position.
        """

    def leave(self, change: Compaction) -> None:
        """Remove rows, and move others into their places."""

    def release(self) -> None:
        """Free the KV cache's memory. No row may be running."""

    def clean(self) -> None:
        """Make sure that values in the cache that are not finite cannot reach other rows."""


class FastRunner:
    """Runner with all rows in one KV table with one write column. `slots`: maximum number of rows. `budget`: maximum
    number of cells; None: no limit.

    `kv_cache` decides all positions and moves data. Needs a model whose attention can be replaced, whose layers all
    keep keys and values, and that honours the given positions (`runner_selection` tests this).

    Memory: the table has `rows x columns` cells, and never more than the budget while the running rows fit it
    (`scheduler`). In addition, results of a prefill pass stay in memory until its rows have joined: at most
    `IDLE_TOKENS` tokens, or one longer prompt.
    """

    name: ClassVar[str] = "shared"
    copies: ClassVar[bool] = True

    def __init__(self, model: Model, *, slots: int, budget: int | None = None) -> None:
        self.replays = False
        self.grid: int | None = None
        self.model = model
        self.cache = KVCache(model.shape)
        self.column = 0
        """The next write column."""
        self._slots = slots
        self._budget = budget
        self._active = 0
        self._starts: Ints = np.zeros(slots, np.int64)
        """The first column of each row's window."""

    def footprint(self, size: BatchSize) -> int:
        """Return the number of cells that rows of this size take."""
        return table_footprint(size.rows, size.longest)

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill prompts, several in one pass where possible."""
        prefill(self.model, chunks)

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Add rows, ordered so that rows from the same prefill pass with equal lengths are written at once."""
        passes = {id(o.prompt.kept.prefix) for o in origins if o.prompt is not None}
        number = {one: i for i, one in enumerate(sorted(passes))}

        def together(index: int) -> tuple[int, int, int]:
            origin = origins[index]
            if origin.prompt is None:
                assert origin.row is not None
                return (-1, origin.length, origin.row)
            return (number[id(origin.prompt.kept.prefix)], origin.length, 0)

        order = sorted(range(len(origins)), key=together)
        self._make_room(longest=max(o.length for o in origins), rows=active + len(origins))
        row = active
        for _, group in groupby(order, key=together):
            members = [origins[i] for i in group]
            one, new = members[0], slice(row, row + len(members))
            if one.row is not None:
                self.cache.copy(one.row, int(self._starts[one.row]), one.length, rows=new, column=self.column)
            else:
                places: list[PrefixSlice] = [m.prompt.kept for m in members if m.prompt is not None]
                prefix, indices = places[0].prefix, [place.index for place in places]
                self.cache.join(prefix.keys, prefix.values, indices, one.length, row=row, column=self.column)
            self._starts[new] = self.column - one.length
            row = new.stop
        self._active = row
        return order

    def _first(self) -> int:
        """Return the leftmost live column; there must be a row."""
        return int(self._starts[: self._active].min())

    def _make_room(self, *, longest: int, rows: int) -> None:
        first = self._first() if self._active else None
        end = max(longest, 0 if first is None else self.column - first)
        wanted = table_rows(rows, rows=self.cache.rows, most=self._slots, longest=end, budget=self._budget)
        most = None if self._budget is None else max(self._budget // wanted, end + 1)
        room = plan_resize(first=first, column=self.column, longest=longest, columns=self.cache.columns, most=most)
        starts = self._starts[: self._active]
        self.cache.move(
            room, rows=wanted, active=self._active, first=first or 0, column=self.column, starts=starts.tolist()
        )
        starts += room.shift
        self.column += room.shift

    def step(self, tokens: Ints, lengths: Ints, adapters: Ints, shifts: Ints) -> torch.Tensor:
        """Decode one token per row; all rows write the same column."""
        active, device = self._active, self.model.shape.device
        if self.column >= self.cache.columns:
            self._make_room(longest=0, rows=active)
        starts = self._starts[:active]
        first = self._first()
        bias = self.cache.aim(active=active, first=first, column=self.column)
        self.model.attention.kind = DecodePass(bias if int(starts.max()) > first else None)
        self.model.select_adapters(adapters.tolist())
        logits = self.model.forward(
            torch.from_numpy(tokens[:, None]).to(device),
            torch.from_numpy((self.column - starts + shifts)[:, None]).to(device),
            self.cache,
        )
        self.column += 1
        return logits

    def leave(self, change: Compaction) -> None:
        """Move the last rows into the holes."""
        if change.holes:
            self.cache.refill(change, first=self._first(), column=self.column)
            self._starts[list(change.holes)] = self._starts[list(change.sources)]
        self._active = change.active

    def release(self) -> None:
        """Free the table's memory."""
        self.cache.release()
        self.column = 0

    def clean(self) -> None:
        """Replace values in the cache that are not finite."""
        self.cache.clean()


TILE = 32
"""Number of rows in one forward pass of `DeterministicRunner`."""


class KVTile(Cache):  # type: ignore[misc]  # transformers is not typed
    """KV cache of the rows of one tile, by layer [row, kv_head, column, head_dim]. Position p is at column p."""

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
        """Provide at least this many columns, in whole blocks."""
        if columns <= self.columns:
            return
        old, self.columns = self.columns, -(-columns // BLOCK) * BLOCK
        for number, layer in enumerate(self._shape.layers):
            for tables, dim in ((self.keys, layer.key_dim), (self.values, layer.value_dim)):
                table = new_table((self._rows, layer.kv_heads, self.columns, dim), self._shape)
                if old:
                    table[:, :, :old] = tables[number]
                tables[number] = table

    def aim(self, positions: torch.Tensor) -> None:
        """Set the position [row] at which the next pass writes each row's token."""
        self._positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, and return all of the layer. The model calls it in each layer."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self._all, :, self._positions] = key_states[:, :, 0]
        values[self._all, :, self._positions] = value_states[:, :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the model receives every position and must not count tokens itself."""
        return 0


class DeterministicRunner:
    """Runner whose results for a row do not depend, in any bit, on other rows. `chunk`: prompts are cut at multiples of
    this many tokens. `tile`: number of rows in one forward pass.

    Floating-point sums depend on their order, and a library chooses the order by the shapes of its inputs. So every
    shape here is either fixed or a function of the row's own tokens:

    - rows pass through the model in tiles of `tile` rows, the last one filled up with idle rows, so that every layer
      always multiplies matrices of the same size;
    - a row begins at column 0 of its own range, and attention uses blocks of `BLOCK` columns of one shape, combined in
      order (`attention.BlockDecodePass`): a block without columns of a row does not change a bit of its result;
    - a prompt is prefilled alone, cut only at multiples of `grid` from its beginning;
    - a preempted row generates its tokens again one by one, because prefilling them at once would sum in another order.

    Observed with torch 2.13 in float32 on an x86 CPU, with one and with two threads, at widths 32 to 3072: matrix
    products with four or more rows give a row the same bits for any content of the other rows, any position of the row,
    and any number of rows; with one or two rows they give others. Batched products are the same for every batch.
    Softmax, log_softmax and cumulative sums work row by row. The bits also depend on the address of weights: all begin
    at multiples of 64 bytes (`model`). A trial at start tests whether this holds for a model on a machine
    (`select_runner`). If a fixed size does not suffice (layers that route each token to experts), the tile is one row.
    Models that cannot be served here use `GenericRunner`, sample by sample.

    Slower than `FastRunner`: a tile costs the same with few rows as with many, and attention takes more steps.
    """

    name: ClassVar[str] = "tiled"
    copies: ClassVar[bool] = True

    def __init__(self, model: Model, *, chunk: int, tile: int = TILE) -> None:
        self.replays = True
        self.grid: int | None = chunk
        self.model = model
        self.tile = tile
        self._tiles: list[KVTile] = []
        self._active = 0
        self._logits = torch.zeros(0)

    def footprint(self, size: BatchSize) -> int:
        """Return the number of cells that rows of this size take: complete tiles, as long as the longest row."""
        return -(-size.rows // self.tile) * self.tile * -(-size.longest // BLOCK) * BLOCK

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill each prompt in passes of its own."""
        prefill(self.model, chunks, grid=self.grid)

    def _at(self, row: int) -> tuple[KVTile, int]:
        return self._tiles[row // self.tile], row % self.tile

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Add rows in the given order."""
        for row, origin in enumerate(origins, active):
            if row // self.tile == len(self._tiles):
                self._tiles.append(KVTile(self.model.shape, self.tile))
            tile, place = self._at(row)
            tile.reserve(origin.length + 1)
            if origin.row is not None:
                other, source = self._at(origin.row)
                self._copy(other.keys, other.values, source, tile, place, origin.length)
            else:
                assert origin.prompt is not None
                kept: PrefixSlice = origin.prompt.kept
                self._copy(kept.prefix.keys, kept.prefix.values, kept.index, tile, place, origin.length)
        self._active = active + len(origins)
        return range(len(origins))

    def _copy(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        source: int,
        tile: KVTile,
        place: int,
        length: int,
    ) -> None:
        for tables, others in ((tile.keys, keys), (tile.values, values)):
            for table, other in zip(tables, others, strict=True):
                table[place, :, :length] = other[source, :, :length]

    def step(self, tokens: Ints, lengths: Ints, adapters: Ints, shifts: Ints) -> torch.Tensor:
        """Run a decode step, one forward pass per tile."""
        active, device, tile_rows = self._active, self.model.shape.device, self.tile
        rows = -(-active // tile_rows) * tile_rows
        ids, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        ids[:active], positions[:active] = tokens, lengths - 1
        chosen = [*adapters.tolist(), *[0] * (rows - active)]
        shifted = positions.copy()
        shifted[:active] += shifts
        if self._logits.shape[0] < rows:
            self._logits = torch.empty((rows, self.model.vocabulary), dtype=self.model.shape.dtype, device=device)
        for number in range(rows // tile_rows):
            own, tile = slice(number * tile_rows, (number + 1) * tile_rows), self._tiles[number]
            longest = int(positions[own].max()) + 1
            tile.reserve(longest)
            at = torch.from_numpy(positions[own]).to(device)
            tile.aim(at)
            self.model.attention.kind = BlockDecodePass(at, -(-longest // BLOCK))
            self.model.select_adapters(chosen[own])
            counted = torch.from_numpy(shifted[own, None]).to(device)
            self._logits[own] = self.model.forward(torch.from_numpy(ids[own, None]).to(device), counted, tile)
        return self._logits[:active]

    def leave(self, change: Compaction) -> None:
        """Move the last rows into the places of rows that leave, and free unused tiles."""
        for hole, source in zip(change.holes, change.sources, strict=True):
            tile, place = self._at(hole)
            other, origin = self._at(source)
            tile.reserve(other.columns)
            self._copy(other.keys, other.values, origin, tile, place, other.columns)
        self._active = change.active
        del self._tiles[-(-change.active // self.tile) :]

    def release(self) -> None:
        """Free the memory of all tiles."""
        self._tiles.clear()
        self._logits = torch.zeros(0)

    def clean(self) -> None:
        """Replace values in the cache that are not finite."""
        for tile in self._tiles:
            for table in (*tile.keys, *tile.values):
                table.nan_to_num_(0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class CachedPass:
    """The model's own cache object after a pass over prompts of equal length."""

    cache: Any = None


@dataclass(frozen=True, slots=True)
class PassPosition:
    """Where a prefilled prompt is: at `index` in the cache of pass `one`."""

    one: CachedPass
    index: int


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows that share a cache object and pass through the model together. `rows`: their numbers, in the cache's order."""

    rows: list[int]
    cache: Any


class GenericRunner:
    """Runner for any causal model of transformers, with its own attention and cache. Correct, not fast.

    Rows that joined together with prompts of equal length form a group that passes through the model together: nothing
    is padded, so the model needs no mask and counts positions itself. A group shrinks as its rows end, and groups are
    never merged; rows that arrive one by one are decoded one by one. If a model's cache cannot be split by rows (it has
    no `reorder_cache`), every row is its own group.

    `whole`: prefill prompts in one piece, for models that cannot continue in the middle of a prompt. `alone`: no row
    shares a pass with another, which makes decoding deterministic. `chunk`: with `alone`, prompts are cut at multiples
    of this many tokens.
    """

    name: ClassVar[str] = "plain"
    copies: ClassVar[bool] = False

    def __init__(self, model: Model, *, whole: bool, alone: bool = False, chunk: int | None = None) -> None:
        self.replays = alone
        self.grid: int | None = UNCUT if whole else chunk if alone else None
        self.model = model
        self._whole = whole
        self._alone = alone
        self._splits: bool | None = None
        """Whether a cache can be split by rows; None before the first one."""
        self._groups: list[RowGroup] = []

    def footprint(self, size: BatchSize) -> int:
        """Return the number of cells that rows of this size take: one per token."""
        return size.tokens

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill complete prompts of equal length in one pass, unless rows must not share passes; others one by one."""
        together = not self._alone and self._splits is True
        sharing = [c for c in chunks if together and not c.alone]
        for chunk in chunks:
            if chunk not in sharing:
                self._forward([chunk.prompt], chunk.count)
        sharing.sort(key=lambda c: c.count)
        for count, same in groupby(sharing, key=lambda c: c.count):
            prompts = [chunk.prompt for chunk in same]
            most = max(1, IDLE_TOKENS // count)
            for begin in range(0, len(prompts), most):
                self._forward(prompts[begin : begin + most], count)

    def _forward(self, prompts: Sequence[PromptPrefill], count: int) -> None:
        """Prefill the next `count` tokens of prompts that share a pass and have the same progress."""
        first = prompts[0]
        if first.kept is None:
            one = CachedPass()
            for index, prompt in enumerate(prompts):
                prompt.kept = PassPosition(one, index)
        one = first.kept.one
        left = count
        while left:
            count = left if self._whole else chunk_length(first, left, self.model.vocabulary, self.grid)
            begin, end = first.done, first.done + count
            wanted = logit_positions(first, begin, end)
            rows = [i for i in range(len(prompts)) for _ in wanted]
            columns = [position - begin for _ in prompts for position in wanted]
            ids = torch.tensor([p.tokens[begin:end] for p in prompts], device=self.model.shape.device)
            self.model.select_adapters([prompt.adapter for prompt in prompts])
            positions, more = picture_inputs(self.model, [(prompt, begin, end) for prompt in prompts], ids)
            logits, one.cache = self.model.forward_own(
                ids,
                one.cache,
                positions=positions if self.model.counts_positions else None,
                wanted=(rows, columns),
                pictures=more,
            )
            logits = logits.view(len(prompts), len(wanted), -1)
            for index, prompt in enumerate(prompts):
                record_logits(prompt, wanted, logits[index])
                prompt.done = end
            left -= count
        if self._splits is None:
            self._splits = hasattr(one.cache, "reorder_cache")

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Add rows. Rows whose prompts were prefilled in one pass form a group; they all join in the same call."""

        def together(index: int) -> int:
            prompt = origins[index].prompt
            assert prompt is not None
            return id(prompt.kept.one)

        order = sorted(range(len(origins)), key=together)
        row = active
        for _, same in groupby(order, key=together):
            kept: list[PassPosition] = [origins[i].prompt.kept for i in same]  # type: ignore[union-attr]
            cache = kept[0].one.cache
            if self._splits and not self._alone:
                cache.reorder_cache(torch.tensor([k.index for k in kept], device=self.model.shape.device))
                self._groups.append(RowGroup(list(range(row, row + len(kept))), cache))
            else:
                copies = [*(copy.deepcopy(cache) for _ in kept[1:]), cache]
                self._groups += [RowGroup([row + i], own) for i, own in enumerate(copies)]
            row += len(kept)
        return order

    def step(self, tokens: Ints, lengths: Ints, adapters: Ints, shifts: Ints) -> torch.Tensor:
        """Run a decode step, one forward pass per group."""
        device = self.model.shape.device
        logits: torch.Tensor | None = None
        for group in self._groups:
            self.model.select_adapters(adapters[group.rows].tolist())
            places = (lengths - 1 + shifts)[group.rows][:, None]
            made, group.cache = self.model.forward_own(
                torch.from_numpy(tokens[group.rows][:, None]).to(device),
                group.cache,
                positions=torch.from_numpy(places).to(device) if self.model.counts_positions else None,
            )
            if logits is None:
                logits = torch.empty((len(tokens), made.shape[-1]), dtype=made.dtype, device=device)
            logits[torch.tensor(group.rows, device=device)] = made
        assert logits is not None
        return logits

    def leave(self, change: Compaction) -> None:
        """Remove rows. The others stay in their groups and get new row numbers."""
        moved = dict(zip(change.sources, change.holes, strict=True))
        gone = set(change.holes)
        for group in self._groups:
            stay = [i for i, row in enumerate(group.rows) if row in moved or (row < change.active and row not in gone)]
            if len(stay) < len(group.rows) and stay:
                group.cache.reorder_cache(torch.tensor(stay, device=self.model.shape.device))
            group.rows = [moved.get(group.rows[i], group.rows[i]) for i in stay]
        self._groups = [group for group in self._groups if group.rows]

    def release(self) -> None:
        """Drop all groups; nothing else is kept."""
        self._groups.clear()

    def clean(self) -> None:
        """Do nothing: no row reads another row's values."""
