"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): the ranks of a sequence group compute one packed row.

The row is cut into as many slices of equal length as the group has ranks; padding of less than one token per rank makes
its length a multiple. A rank computes everything but attention on its own slice. For attention, an all-to-all gives it
all tokens of its share of the heads, and another one returns the outputs of all heads for its own tokens. KV heads that
the group's size does not divide are repeated first.

Outputs of scored tokens are gathered, so every rank of a group computes the same loss of the whole micro-batch. In the
backward pass each rank takes the gradient of its own outputs only, and the exchanges of attention return gradients to
the rank of their token. A rank's parameter gradient is therefore the part of its own tokens, and the sum over all
ranks, which backends compute anyway, is the gradient of the global loss: no factor corrects for the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gcore.train.packing import Rectangle


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """The sequence group of a rank: `size` consecutive ranks, of which this rank is number `index`.

    `processes`: their process group; None for a group of one rank.
    """

    index: int = 0
    size: int = 1
    processes: Any = None

    def fill(self, rectangles: tuple[Rectangle, ...]) -> tuple[Rectangle, ...]:
        """Add the rectangle of padding with which the group's size divides the number of tokens of a row."""
        lacking = -sum(one.tokens for one in rectangles) % self.size
        return (*rectangles, Rectangle(1, lacking)) if lacking else rectangles

    def slice_of(self, tokens: int, index: int | None = None) -> slice:
        """The slice of a row of `tokens` tokens that rank `index` of the group computes; None: this rank."""
        length = tokens // self.size
        number = self.index if index is None else index
        return slice(number * length, (number + 1) * length)

    def heads_of_rank(self, heads: int) -> int:
        """How many of `heads` query or KV heads a rank computes, with those that are repeated."""
        return heads // math.gcd(heads, self.size)

    def gather(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Concatenate the values [n] of all ranks of the group, in their order. `counts`: how many each rank has.

        A collective; in the backward pass a rank takes the gradient of its own values.
        """
        if self.size == 1:
            return own
        whole: Tensor = _Gather.apply(own, tuple(counts), self)
        return whole

    def divide_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange a slice of all heads for all tokens of this rank's heads: [1, head, t, dim] → [1, head / size,
        size * t, dim].

        KV heads are repeated as often as the group needs. A collective, as is its backward pass.
        """
        repeats = self.size * self.heads_of_rank(key.shape[1]) // key.shape[1]
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        three = (query, key, value)
        heads = [one[0].unflatten(0, (self.size, -1)) for one in three]
        received = _exchange(torch.cat([one.flatten(1) for one in heads], dim=1), self)
        # From each rank: the heads of this rank at the tokens of that one.
        parts = received.split([one[0].numel() for one in heads], dim=1)
        q, k, v = (
            part.unflatten(1, one.shape[1:]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
            for part, one in zip(parts, heads, strict=True)
        )
        return q, k, v

    def join_heads(self, out: Tensor) -> Tensor:
        """The inverse for the outputs of attention: [1, size * t, head / size, dim] → [1, t, head, dim]."""
        received = _exchange(out[0].unflatten(0, (self.size, -1)), self)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


ALONE = SequenceGroup()
"""The sequence group of a rank without sequence parallelism."""


def _exchange(parts: Tensor, group: SequenceGroup) -> Tensor:
    """Send `parts[r]` to rank r of the group. Returns what each rank has sent, in the same shape."""
    received: Tensor = _Exchange.apply(parts, group)
    return received


class _Exchange(torch.autograd.Function):
    """An all-to-all of parts of equal size, which is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: SequenceGroup) -> Tensor:
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=group.processes)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], group: SequenceGroup) -> Tensor:
        ctx.own = slice(sum(counts[: group.index]), sum(counts[: group.index + 1]))
        padded = own.new_zeros(max(counts))
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=group.processes)
        return torch.cat([one[:count] for one, count in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.own], None, None
