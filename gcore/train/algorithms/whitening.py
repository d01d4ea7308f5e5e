"""Mean zero and variance one over all trained tokens of a step, however they are spread over ranks and micro-batches.

Each part's `Moments` are added up first; every part is then whitened by those of the whole. Whitening comes after returns
are taken from advantages, never before. The variance is the unbiased one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance, as public implementations of REINFORCE++ and GAE do."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of some trained tokens: how many, their mean, and the sum of their squared distances from it; float64."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """Of both together, without the cancellation of a sum of squares (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if count == 0:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return Moments(count, mean, squares)

    @property
    def variance(self) -> float:
        """Unbiased; 0 of fewer than two tokens."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Of `values` [batch, tokens] where `mask`, of the same shape, is not 0."""
        kept = values.detach()[mask != 0].to(torch.float64)
        if kept.numel() == 0:
            return cls()
        mean = kept.mean()
        return cls(kept.numel(), float(mean), float((kept - mean).square().sum()))


def whitened(values: Tensor, mask: Tensor, whole: Moments) -> Tensor:
    """(value - mean) / sqrt(variance + 1e-8) by the moments of the whole step; 0 where `mask` is 0 (arXiv 2501.03262).

    `values` and `mask` [batch, tokens]; returns [batch, tokens] float64. Values that are all the same become 0.
    """
    scale = (whole.variance + EPSILON) ** -0.5
    return torch.where(mask != 0, (values.to(torch.float64) - whole.mean) * scale, 0.0)
