"""Log-probabilities and entropies of tokens from logits, in little memory.

With a vocabulary of 150k, logits are by far the largest tensor of a step. So they are kept once, in the type the model
made them in, and everything float32 is made a few rows at a time: forward keeps the logarithm of each row's sum, and
backward makes the softmax again from that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 22
"""Logits that are looked at together."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: Tensor | None, *, entropic: bool = False
) -> tuple[Tensor, Tensor]:
    """Of softmax(logits / temperature): the log-probability of each row's target, and its entropy in nats.

    `logits` [n, vocabulary], `targets` [n] int64, `temperature` [n] float32 or None for 1. Returns two [n], float32 (or
    float64, if the logits are). The gradient goes through the log-probabilities, and through the entropies if `entropic`.
    """
    if temperature is not None:
        temperature = temperature.to(_precise(logits.dtype))
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets, temperature, entropic)
    return found


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _pieces(logits: Tensor) -> list[slice]:
    rows = max(1, PIECE // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]


def _scaled(logits: Tensor, temperature: Tensor | None, piece: slice) -> Tensor:
    part = logits[piece].to(_precise(logits.dtype))
    return part if temperature is None else part / temperature[piece, None]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor | None, entropic: bool
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(logits.shape[0], dtype=_precise(logits.dtype), device=logits.device)
        total, entropy = torch.empty_like(logp), torch.empty_like(logp)
        for piece in _pieces(logits):
            part = _scaled(logits, temperature, piece)
            total[piece] = torch.logsumexp(part, dim=-1)
            logp[piece] = part.gather(1, targets[piece, None])[:, 0] - total[piece]
            weights = (part - total[piece, None]).exp_()
            # Where a model forbids a token with -inf, 0 · -inf would be nan; that token adds nothing.
            entropy[piece] = total[piece] - weights.mul_(part).nan_to_num_(nan=0.0).sum(dim=-1)
        ctx.save_for_backward(logits, targets, temperature, total, entropy if entropic else None)
        if not entropic:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, temperature, total, entropy = ctx.saved_tensors
        out = torch.empty_like(logits)
        for piece in _pieces(logits):
            scale = gradients[0][piece] if temperature is None else gradients[0][piece] / temperature[piece]
            logp = _scaled(logits, temperature, piece).sub(total[piece, None])
            if entropy is None:
                part = logp.exp_().mul_(-scale[:, None])
            else:
                # d entropy / d scaled logit j = -p_j (log p_j + entropy); a token forbidden with -inf has p = 0.
                pull = gradients[1][piece] if temperature is None else gradients[1][piece] / temperature[piece]
                bent = (logp + entropy[piece, None]).mul_(pull[:, None]).add_(scale[:, None])
                weights = logp.exp_()
                part = torch.where(weights == 0, 0.0, -weights * bent)
            part.scatter_add_(1, targets[piece, None], scale[:, None])
            out[piece] = part
        return out, None, None, None
