"""The fast lane: all rows in one table, with one write column.

Where everything stands `columns` decides; `cache` moves it. Needs a model whose attention can be replaced and whose layers
keep keys and values alike, and that takes positions as they are given (`prove` tries it out).

Memory: the table has `rows x columns` cells and never more than the budget, as long as what runs fits it (`schedule`).
Besides, what a pass over prompts makes stands in memory until its rows have joined: at most `IDLE_TOKENS` tokens, or one
longer prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import numpy as np
import torch

from gcore.rollout.engine import columns
from gcore.rollout.engine.attention import OneToken
from gcore.rollout.engine.cache import RowCache
from gcore.rollout.engine.columns import Refill, make_room, rows_for
from gcore.rollout.engine.lane import Origin
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.prefill import Chunk, Place, read
from gcore.rollout.engine.rows import Ints
from gcore.rollout.engine.schedule import Size


class SharedLane:
    """See the module. `slots`: rows at most; `budget`: cells at most, None for no bound."""

    name: ClassVar[str] = "shared"
    copies: ClassVar[bool] = True

    def __init__(self, model: Model, *, slots: int, budget: int | None = None) -> None:
        self.replays = False
        self.grid: int | None = None
        self.model = model
        self.cache = RowCache(model.shape)
        self.column = 0
        """The next write column."""
        self._slots = slots
        self._budget = budget
        self._active = 0
        self._starts: Ints = np.zeros(slots, np.int64)
        """The first column of each row's window."""

    def footprint(self, size: Size) -> int:
        """Cells that rows of this size take."""
        return columns.footprint(size.rows, size.longest)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Prompts through the model."""
        read(self.model, chunks)

    def enter(self, origins: Sequence[Origin], active: int) -> Sequence[int]:
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
                places: list[Place] = [m.prompt.kept for m in members if m.prompt is not None]
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
        wanted = rows_for(rows, rows=self.cache.rows, most=self._slots, longest=end, budget=self._budget)
        most = None if self._budget is None else max(self._budget // wanted, end + 1)
        room = make_room(first=first, column=self.column, longest=longest, columns=self.cache.columns, most=most)
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
        self.model.attention.kind = OneToken(bias if int(starts.max()) > first else None)
        logits = self.model.forward(
            torch.from_numpy(tokens[:, None]).to(device),
            torch.from_numpy((self.column - starts)[:, None]).to(device),
            self.cache,
        )
        self.column += 1
        return logits

    def leave(self, change: Refill) -> None:
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
