"""Policy losses token by token, before masking and aggregation.

The clip is PPO's, with two bounds, so that DAPO's wider upper one (0.2 / 0.28) is the same function. The log-ratio is
held within ±20: beyond it the exponential overflows float32, and what is so far off is clipped or lost anyway. Whether
π_old is this update's own policy, recomputed, or the engine's is the caller's choice and not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def ppo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """max(-A·r, -A·clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp).

    `logp` and `old_logp` [batch, tokens], `advantages` [batch, tokens] or [batch, 1]; returns [batch, tokens] in the type
    of `logp`. The gradient goes through `logp` only.
    """
    ratio = _ratio(logp, old_logp)
    gain = advantages.detach().to(logp.dtype)
    return torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))


def clip_fraction_tokens(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Where the clip holds a token back: 1.0 where the loss has no gradient because of it, else 0.0.

    Shapes as in `ppo_loss`; returns [batch, tokens] in the type of `logp`, detached. Its mean over the mask is the clip
    fraction.
    """
    ratio = _ratio(logp, old_logp).detach()
    held = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return held.to(logp.dtype)


def _ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    return (logp - old_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
