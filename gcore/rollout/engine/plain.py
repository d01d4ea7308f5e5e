"""The plain lane: any causal model of transformers, with its own attention and the cache that it wants. Correct, not quick.

Rows that joined together with equally long prompts form a group that goes through the model in step: nothing is padded,
so the model needs no mask and counts positions itself. A group shrinks as its rows end, and groups are never joined; rows
that come one by one are decoded one by one. A model whose cache cannot be taken apart by rows (it has no
`reorder_cache`) has every row in a group of its own.

With `alone` no row shares a pass with another, which makes it deterministic. Knows nothing of what the cache holds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch

from gcore.rollout.engine.columns import Refill
from gcore.rollout.engine.lane import UNCUT, Origin
from gcore.rollout.engine.model import Model
from gcore.rollout.engine.prefill import Chunk, Prompt, judge, piece, positions_wanted
from gcore.rollout.engine.rows import Ints
from gcore.rollout.engine.schedule import IDLE_TOKENS, Size


@dataclass(slots=True, eq=False)
class Pass:
    """A model's own cache after a pass over equally long prompts."""

    cache: Any = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A read prompt is the i-th of a pass."""

    one: Pass
    index: int


@dataclass(slots=True, eq=False)
class Group:
    """Rows in step: which rows they are, in the order in which the cache has them."""

    rows: list[int]
    cache: Any


class PlainLane:
    """See the module. `whole`: prompts are read in one piece, for models that cannot go on in the middle of one."""

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
        self._groups: list[Group] = []

    def footprint(self, size: Size) -> int:
        """Every token of every row."""
        return size.tokens

    def read(self, chunks: Sequence[Chunk]) -> None:
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

    def _forward(self, prompts: Sequence[Prompt], count: int) -> None:
        """The next `count` tokens of prompts that are equally far."""
        first = prompts[0]
        if first.kept is None:
            one = Pass()
            for index, prompt in enumerate(prompts):
                prompt.kept = Kept(one, index)
        one = first.kept.one
        left = count
        while left:
            count = left if self._whole else piece(first, left, self.model.vocabulary, self.grid)
            begin, end = first.done, first.done + count
            wanted = positions_wanted(first, begin, end)
            rows = [i for i in range(len(prompts)) for _ in wanted]
            columns = [position - begin for _ in prompts for position in wanted]
            ids = torch.tensor([p.tokens[begin:end] for p in prompts], device=self.model.shape.device)
            logits, one.cache = self.model.forward_own(ids, one.cache, wanted=(rows, columns))
            logits = logits.view(len(prompts), len(wanted), -1)
            for index, prompt in enumerate(prompts):
                judge(prompt, wanted, logits[index])
                prompt.done = end
            left -= count
        if self._splits is None:
            self._splits = hasattr(one.cache, "reorder_cache")

    def enter(self, origins: Sequence[Origin], active: int) -> Sequence[int]:
        """Rows of one pass are one group. All rows that come from a pass come at once."""

        def together(index: int) -> int:
            prompt = origins[index].prompt
            assert prompt is not None
            return id(prompt.kept.one)

        order = sorted(range(len(origins)), key=together)
        row = active
        for _, same in groupby(order, key=together):
            kept: list[Kept] = [origins[i].prompt.kept for i in same]  # type: ignore[union-attr]
            cache = kept[0].one.cache
            if self._splits and not self._alone:
                cache.reorder_cache(torch.tensor([k.index for k in kept], device=self.model.shape.device))
                self._groups.append(Group(list(range(row, row + len(kept))), cache))
            else:
                copies = [*(copy.deepcopy(cache) for _ in kept[1:]), cache]
                self._groups += [Group([row + i], own) for i, own in enumerate(copies)]
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

    def leave(self, change: Refill) -> None:
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
