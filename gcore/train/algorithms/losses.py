"""Policy and value losses token by token, before masking and aggregation.

The clip is PPO's, with two bounds, so that DAPO's wider upper one (0.2 / 0.28) is the same function. The log-ratio is
held within ±20: beyond it the exponential overflows float32, and what is so far off is clipped or lost anyway. Whether
π_old is this update's own policy, recomputed, or the engine's is the caller's choice and not known here.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def ppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """max(-A·r, -A·clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp) (arXiv 1707.06347).

    `dual_clip` c (arXiv 1912.09729): where A is negative, at most -A·c, so that a token which became much likelier does not
    outweigh all others. `logp` and `old_logp` [batch, tokens], `advantages` [batch, tokens] or [batch, 1]; returns [batch,
    tokens] in the type of `logp`. The gradient goes through `logp` only. Raises ValueError for a `dual_clip` that is not
    above 1.
    """
    ratio = token_ratio(logp, old_logp)
    gain = advantages.detach().to(logp.dtype)
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"the dual clip is {dual_clip}; it must be above 1")
    return torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)


def gspo_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO (arXiv 2507.18071): the clip is on the sequence's ratio, the geometric mean of its tokens' ratios.

    s = exp(mean over the row's trained tokens of log r), in the token form sg(s)·π/sg(π): every token has the value of s and
    its own gradient. To be aggregated as "seq-mean-token-mean". `logp`, `old_logp` and `mask` [batch, tokens], `advantages`
    [batch, 1] or [batch, tokens]; a sequence stands whole in one row. Returns [batch, tokens] in the type of `logp`.
    """
    ratio = sequence_ratio(logp, old_logp, mask) * (logp - logp.detach()).exp()
    gain = advantages.detach().to(logp.dtype)
    return torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))


def cispo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """CISPO (arXiv 2506.13585): -sg(clip(r, 1 - clip_low, 1 + clip_high))·A·logp.

    The weight is clipped, not the update: every token keeps a gradient. Shapes as in `ppo_loss`.
    """
    weight = token_ratio(logp, old_logp).detach().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages.detach().to(logp.dtype) * logp


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """0.5·max((V - R)², (clip(V, V_old ± clip) - R)²): no gain from moving a value further than `clip` (PPO's own code,
    described in arXiv 2005.12729).

    `values`, `returns` and `old_values` [batch, tokens]; None: 0.5·(V - R)². Returns [batch, tokens] in the type of
    `values`. The gradient goes through `values` only.
    """
    target, old = returns.detach().to(values.dtype), old_values.detach().to(values.dtype)
    plain = (values - target).square()
    if clip is None:
        return 0.5 * plain
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - target).square())


def nll_loss(logp: Tensor) -> Tensor:
    """-logp: maximum likelihood of given responses (supervised fine-tuning), without rewards or an old policy.

    `logp` [batch, tokens] in nats; returns that shape. Aggregated by "token-mean" it is the cross entropy a token.
    """
    return -logp


def value_clip_tokens(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """1.0 where the clip holds a value back: its loss is the clipped one, which has no gradient there; else 0.0.

    Shapes as in `value_loss`; returns [batch, tokens] in the type of `values`, detached.
    """
    if clip is None:
        return torch.zeros_like(values).detach()
    value, target, old = (one.detach().to(values.dtype) for one in (values, returns, old_values))
    held = old + (value - old).clamp(-clip, clip)
    beyond = (held - target).square() > (value - target).square()
    return (beyond & ((value - old).abs() > clip)).to(values.dtype)


def clip_fraction_tokens(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Where the clip holds a token back: 1.0 where `ppo_loss` has no gradient because of it, else 0.0.

    Shapes as in `ppo_loss`; returns [batch, tokens] in the type of `logp`, detached. Its mean over the mask is the clip
    fraction.
    """
    ratio = token_ratio(logp, old_logp).detach()
    held = _held(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        held = held | ((advantages < 0) & (ratio > dual_clip))
    return held.to(logp.dtype)


def gspo_clip_fraction_tokens(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """As `clip_fraction_tokens`, by the ratio of the sequence; shapes as in `gspo_loss`."""
    ratio = sequence_ratio(logp, old_logp, mask).expand(logp.shape)
    return _held(ratio, advantages, clip_low, clip_high).to(logp.dtype)


def cispo_clip_fraction_tokens(logp: Tensor, old_logp: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """1.0 where the weight of `cispo_loss` is not the ratio itself, whatever the advantage, else 0.0.

    Shapes as in `ppo_loss`; returns [batch, tokens] in the type of `logp`, detached. These tokens keep their gradients.
    """
    ratio = token_ratio(logp, old_logp).detach()
    return ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).to(logp.dtype)


def token_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """r = exp(logp - old_logp), the log-ratio held within ±20; of one shape. The gradient goes through `logp` only."""
    return (logp - old_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """s = exp(mean over the row's trained tokens of log r), [batch, tokens] to [batch, 1], detached; 1 without any."""
    trained = mask != 0
    apart = torch.where(trained, logp.detach() - old_logp.detach(), 0.0)
    mean = apart.sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _held(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
