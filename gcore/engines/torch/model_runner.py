"""Model runner: how a batch passes through the model. `runner_selection` chooses one of three at start.

- `FastRunner`: all rows write the same column of one KV table; for models whose attention can be replaced.
- `DeterministicRunner`: the same models in fixed tiles; the bits of a row do not depend on other rows.
- `GenericRunner`: any causal model of transformers, with its own attention and cache.

A runner owns its cache and turns tokens into logits. It does not sample and knows no requests.
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
    prefill,
    record_logits,
)
from gcore.engines.torch.scheduler import IDLE_TOKENS, BatchSize, Compaction, Ints

UNCUT = 2**62


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Where a joining row's first `length` tokens come from: a prompt that has been read, or a running row."""

    length: int
    logits: torch.Tensor
    """[vocabulary]: what follows them."""
    prompt: PromptPrefill | None = None
    row: int | None = None


class ModelRunner(Protocol):
    """See the module."""

    name: ClassVar[str]
    copies: ClassVar[bool]
    """Whether a joining row can have the prompt of a running one."""
    replays: bool
    """Whether a row that gave its place back makes its tokens again one by one, instead of being read at once."""
    grid: int | None
    """Prompts are cut at multiples of it only (`UNCUT`: not at all); None: anywhere."""

    def footprint(self, size: BatchSize) -> int:
        """Cells that rows of this size take."""

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prompts, or parts of them, through the model."""

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """New rows behind the first `active`, in an order of the lane's choice: which origin each of them is."""

    def step(self, tokens: Ints, lengths: Ints) -> torch.Tensor:
        """`[row, vocabulary]`, valid until the next call. `tokens`: each row's last; `lengths`: it and all before."""

    def leave(self, change: Compaction) -> None:
        """Rows leave, others move into their places."""

    def release(self) -> None:
        """Give the cache's memory back; no row may be running."""

    def clean(self) -> None:
        """What is not finite in the cache must not reach other rows."""


class FastRunner:
    """All rows in one table, with one write column. `slots`: rows at most; `budget`: cells at most, None for no bound.

    `kv_cache` decides where everything stands and moves it. Needs a model whose attention can be replaced and
    whose layers keep keys and values alike, and that takes positions as they are given (`runner_selection` tries it out).

    Memory: the table has `rows x columns` cells and never more than the budget, as long as what runs fits it
    (`scheduler`). Besides, what a pass over prompts makes stands in memory until its rows have joined: at most
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
        """Cells that rows of this size take."""
        return table_footprint(size.rows, size.longest)

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prompts through the model."""
        prefill(self.model, chunks)

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Rows that come from the same pass and are equally long are written at once."""
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
        """The leftmost live column; there must be a row."""
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

    def step(self, tokens: Ints, lengths: Ints) -> torch.Tensor:
        """All rows write the same column."""
        active, device = self._active, self.model.shape.device
        if self.column >= self.cache.columns:
            self._make_room(longest=0, rows=active)
        starts = self._starts[:active]
        first = self._first()
        bias = self.cache.aim(active=active, first=first, column=self.column)
        self.model.attention.kind = DecodePass(bias if int(starts.max()) > first else None)
        logits = self.model.forward(
            torch.from_numpy(tokens[:, None]).to(device),
            torch.from_numpy((self.column - starts)[:, None]).to(device),
            self.cache,
        )
        self.column += 1
        return logits

    def leave(self, change: Compaction) -> None:
        """The last rows move into the holes."""
        if change.holes:
            self.cache.refill(change, first=self._first(), column=self.column)
            self._starts[list(change.holes)] = self._starts[list(change.sources)]
        self._active = change.active

    def release(self) -> None:
        """Give the table's memory back."""
        self.cache.release()
        self.column = 0

    def clean(self) -> None:
        """Replace what is not finite."""
        self.cache.clean()


TILE = 32
"""Rows in one forward pass."""


class KVTile(Cache):  # type: ignore[misc]  # transformers is not typed
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
                table = new_table((self._rows, layer.kv_heads, self.columns, dim), self._shape)
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


class DeterministicRunner:
    """`chunk`: the grid on which prompts are cut.

    Floating-point sums depend on their order, and a library chooses the order by the shapes it is given. So every
    shape here is either fixed or a function of the row's own tokens:

    - rows go through the model in tiles of `tile` rows, the last filled up with idle rows, so that every layer always
      multiplies matrices of the same size;
    - a row begins at column 0 of its own stretch, and attention goes over blocks of `BLOCK` columns of one shape,
      joined in order (`attention.BlockDecodePass`): a block in which a row has nothing leaves its result as it is, to the bit;
    - a prompt is read alone, cut only at multiples of `grid` from its beginning;
    - a row that gave its place back makes its tokens again one by one, because reading them at once would sum
      otherwise.

    What was seen with torch 2.13 in float32 on an x86 CPU, with one and with two threads, at widths 32 to 3072:
    matrix products with four or more rows give a row the same bits whatever the other rows hold, wherever the row
    stands, and whatever their number; with one or two rows they give others. Batched products are the same for every
    batch. Softmax, log_softmax and cumulative sums go row by row. The bits also depend on where weights lie in
    memory: all begin at multiples of 64 bytes (`model`). Whether it holds for a model on a machine is tried out at
    start (`select_runner`), and where a fixed size is not enough (layers that send each token to experts of its own) the tile
    is one row. Models that cannot be served here take the plain lane, sample by sample.

    Slower than the shared lane: a full tile costs the same however few rows run, and attention takes more steps.
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
        """Cells that rows of this size take: whole tiles of whole blocks, as long as the longest row."""
        return -(-size.rows // self.tile) * self.tile * -(-size.longest // BLOCK) * BLOCK

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Each prompt in passes of its own."""
        prefill(self.model, chunks, grid=self.grid)

    def _at(self, row: int) -> tuple[KVTile, int]:
        return self._tiles[row // self.tile], row % self.tile

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """In the order in which they come."""
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
            self.model.attention.kind = BlockDecodePass(at, -(-longest // BLOCK))
            self._logits[own] = self.model.forward(torch.from_numpy(ids[own, None]).to(device), at[:, None], tile)
        return self._logits[:active]

    def leave(self, change: Compaction) -> None:
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


@dataclass(slots=True, eq=False)
class CachedPass:
    """A model's own cache after a pass over equally long prompts."""

    cache: Any = None


@dataclass(frozen=True, slots=True)
class PassPosition:
    """A read prompt is the i-th of a pass."""

    one: CachedPass
    index: int


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows in step: which rows they are, in the order in which the cache has them."""

    rows: list[int]
    cache: Any


class GenericRunner:
    """Any causal model of transformers, with its own attention and the cache that it wants. Correct, not fast.

    `whole`: prompts are read in one piece, for models that cannot go on in the middle of one. Rows that joined together
    with equally long prompts form a group that goes through the model in step: nothing is padded, so the model needs no
    mask and counts positions itself. A group shrinks as its rows end, and groups are never joined; rows that come one by
    one are decoded one by one. A model whose cache cannot be taken apart by rows (it has no `reorder_cache`) has every
    row in a group of its own.

    With `alone` no row shares a pass with another, which makes it deterministic. Knows nothing of what the cache holds.
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
        """Whether a cache can be taken apart by rows; None before the first was seen."""
        self._groups: list[RowGroup] = []

    def footprint(self, size: BatchSize) -> int:
        """Every token of every row."""
        return size.tokens

    def read(self, chunks: Sequence[PrefillChunk]) -> None:
        """Whole prompts of one length in one pass, unless rows must be alone; the rest one by one."""
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
        """The next `count` tokens of prompts that are equally far."""
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
            logits, one.cache = self.model.forward_own(ids, one.cache, wanted=(rows, columns))
            logits = logits.view(len(prompts), len(wanted), -1)
            for index, prompt in enumerate(prompts):
                record_logits(prompt, wanted, logits[index])
                prompt.done = end
            left -= count
        if self._splits is None:
            self._splits = hasattr(one.cache, "reorder_cache")

    def enter(self, origins: Sequence[PrefillResult], active: int) -> Sequence[int]:
        """Rows of one pass are one group. All rows that come from a pass come at once."""

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

    def step(self, tokens: Ints, lengths: Ints) -> torch.Tensor:
        """Group by group."""
        device = self.model.shape.device
        logits: torch.Tensor | None = None
        for group in self._groups:
            made, group.cache = self.model.forward_own(
                torch.from_numpy(tokens[group.rows][:, None]).to(device), group.cache
            )
            if logits is None:
                logits = torch.empty((len(tokens), made.shape[-1]), dtype=made.dtype, device=device)
            logits[torch.tensor(group.rows, device=device)] = made
        assert logits is not None
        return logits

    def leave(self, change: Compaction) -> None:
        """Rows keep their place in their group and get another number; the others go."""
        moved = dict(zip(change.sources, change.holes, strict=True))
        gone = set(change.holes)
        for group in self._groups:
            stay = [i for i, row in enumerate(group.rows) if row in moved or (row < change.active and row not in gone)]
            if len(stay) < len(group.rows) and stay:
                group.cache.reorder_cache(torch.tensor(stay, device=self.model.shape.device))
            group.rows = [moved.get(group.rows[i], group.rows[i]) for i in stay]
        self._groups = [group for group in self._groups if group.rows]

    def release(self) -> None:
        """Nothing is kept beyond the rows."""
        self._groups.clear()

    def clean(self) -> None:
        """No row sees another's numbers."""
