"""How rows go through the model: what the three lanes have in common.

A lane owns a cache and turns tokens into logits; it draws nothing and knows no request. There are three:

- `shared`: the fast one, for models whose attention can be replaced; all rows write one column of one table;
- `tiled`: the same models, decoded so that no row depends on its neighbours, bit for bit (`deterministic: true`);
- `plain`: any causal model of transformers, with the model's own attention and the cache that it wants.

Which of them serves a model is found out at start (`prove`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from gcore.rollout.engine.columns import Refill
from gcore.rollout.engine.prefill import Chunk, Prompt
from gcore.rollout.engine.rows import Ints
from gcore.rollout.engine.schedule import Size

UNCUT = 2**62


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a joining row's first `length` tokens come from: a prompt that has been read, or a running row."""

    length: int
    logits: torch.Tensor
    """[vocabulary]: what follows them."""
    prompt: Prompt | None = None
    row: int | None = None


class Lane(Protocol):
    """See the module."""

    name: ClassVar[str]
    copies: ClassVar[bool]
    """Whether a joining row can have the prompt of a running one."""
    replays: bool
    """Whether a row that gave its place back makes its tokens again one by one, instead of being read at once."""
    grid: int | None
    """Prompts are cut at multiples of it only (`UNCUT`: not at all); None: anywhere."""

    def footprint(self, size: Size) -> int:
        """Cells that rows of this size take."""

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Prompts, or parts of them, through the model."""

    def enter(self, origins: Sequence[Origin], active: int) -> Sequence[int]:
        """New rows behind the first `active`, in an order of the lane's choice: which origin each of them is."""

    def step(self, tokens: Ints, lengths: Ints) -> torch.Tensor:
        """`[row, vocabulary]`, valid until the next call. `tokens`: each row's last; `lengths`: it and all before."""

    def leave(self, change: Refill) -> None:
        """Rows leave, others move into their places."""

    def release(self) -> None:
        """Give the cache's memory back; no row may be running."""

    def clean(self) -> None:
        """What is not finite in the cache must not reach other rows."""
