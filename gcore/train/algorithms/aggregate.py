"""How token losses become one number, the same for every split over ranks and micro-batches.

The loss of an update is a sum over all its sequences divided by a count of all its sequences or tokens. The sum is taken
where the sequences are, micro-batch by micro-batch (`loss_sum`); the count is the whole update's and known beforehand
(`denominator`). So

    loss = Σ over ranks and micro-batches of loss_sum(...) / denominator(global counts)

and no mean is ever taken over a part. A sequence stands whole in one row; rows of zeros (padding, dummies) add nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""Every token weighs the same (DAPO, arXiv 2503.14476); every sequence (GRPO, GSPO); every sequence by its tokens' sum;
that sum over a constant (Dr.GRPO, arXiv 2503.20783)."""


def loss_sum(token_loss: Tensor, mask: Tensor, mode: Mode, horizon: float | None = None) -> Tensor:
    """What this part contributes to the loss, still to be divided by `denominator`.

    `token_loss` and `mask` [batch, tokens]; mask of any type, trained where it is not 0. Returns a scalar: the sum over
    sequences of the sum over tokens (all modes but two), of the mean over tokens ("seq-mean-token-mean"), or of the sum
    over tokens divided by the constant `horizon` in tokens ("seq-mean-token-sum-norm", Dr.GRPO's). Raises ValueError for
    shapes that do not fit and for a missing horizon.
    """
    if token_loss.shape != mask.shape or token_loss.ndim != 2:
        raise ValueError(f"token losses {tuple(token_loss.shape)} and mask {tuple(mask.shape)} must both be [b, t]")
    trained = mask != 0
    kept = torch.where(trained, token_loss, torch.zeros_like(token_loss))
    if mode == "seq-mean-token-mean":
        return (kept.sum(dim=1) / trained.sum(dim=1).clamp(min=1)).sum()
    if mode == "seq-mean-token-sum-norm":
        return kept.sum() / _horizon(horizon)
    return kept.sum()


def denominator(mode: Mode, *, tokens: int, sequences: int, horizon: float | None = None) -> float:
    """What the sum over all parts is divided by: the update's trained tokens, or its sequences.

    `tokens` and `sequences` count the whole update, over all ranks and micro-batches; a sequence counts if at least one
    of its tokens is trained. `horizon` is only checked: it divides in `loss_sum` already. Raises ValueError if there is
    nothing to divide by.
    """
    if mode == "seq-mean-token-sum-norm":
        _horizon(horizon)
    count = tokens if mode == "token-mean" else sequences
    if count < 1:
        raise ValueError(f"an update over {tokens} tokens in {sequences} sequences has no {mode} loss")
    return float(count)


def _horizon(horizon: float | None) -> float:
    if horizon is None or horizon <= 0:
        raise ValueError(f"seq-mean-token-sum-norm needs a horizon above 0, not {horizon}")
    return float(horizon)
