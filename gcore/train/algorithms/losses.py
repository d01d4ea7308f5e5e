"""Losses: policy and value losses per token; clip fractions; aggregation; importance corrections; KL estimates.

**Losses per token**, before masking and aggregation. The clip is PPO's with separate lower and upper bounds, which
covers DAPO's clip-higher (0.2 / 0.28). The log-ratio is clamped to ±20, because beyond that exp overflows float32. The
caller chooses π_old: the log-probabilities that the trainer recomputed at the start of the update, or those of the
engine.

**Aggregation** reduces token losses to one number that does not depend on the split over ranks and micro-batches. The
loss of an update is a sum over all its sequences divided by a global count of sequences or tokens. Each micro-batch
computes its part of the sum (`loss_sum`); the count covers the whole update and is known beforehand (`denominator`):

    loss = Σ over ranks and micro-batches of loss_sum(...) / denominator(global counts)

No mean is taken over a part. Each sequence is in one row. Rows of zeros (padding, dummies) contribute nothing.

**Corrections** compensate for the difference between the engine's and the trainer's log-probabilities. The two differ
for the same tokens and weights (kernels, precision, truncated sampling), and off-policy samples come from older
weights. The spec selects one:

- TIS (truncated importance sampling) multiplies each token's loss by the capped ratio.
- IcePop does the same within a band, and sets the loss of tokens outside to zero.
- MIS masks tokens outside the band, so that the denominator does not count them either.
- Decoupled PPO clips around a proximal policy and weights by its ratio to the behavior policy.

None of them changes the PPO ratio, which uses the trainer's log-probabilities only. All weights are detached.

**KL** against the reference, per token, estimated from samples of the policy. With d = logp - ref_logp, k1 is unbiased
and may be negative; k2 and k3 are never negative. As losses, their gradients differ (arXiv 2506.09477): the gradient of
k1 has mean zero and trains nothing, that of k2 is the gradient of the KL, that of k3 is not. "k3+" therefore has the
value of k3 and the gradient of k2. In the reward no gradient is taken, and k1 is the unbiased choice.
"""

from __future__ import annotations

from typing import Literal

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
    """PPO's clipped loss: max(-A·r, -A·clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old_logp) (arXiv
    1707.06347).

    `dual_clip` c (arXiv 1912.09729) limits the loss to -A·c where A is negative, so that a token whose probability grew
    a lot does not dominate. `logp` and `old_logp` [batch, tokens], `advantages` [batch, tokens] or [batch, 1]. Returns
    [batch, tokens] in the dtype of `logp`. The gradient flows through `logp` only. Raises ValueError unless `dual_clip`
    is above 1.
    """
    ratio = token_ratio(logp, old_logp)
    gain = advantages.detach().to(logp.dtype)
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1")
    return torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)


def gspo_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """GSPO (arXiv 2507.18071): PPO's loss with the sequence ratio, the geometric mean of the token ratios.

    s = exp(mean of log r over the row's trained tokens), in the token form sg(s)·π/sg(π): every token has the value s
    and its own gradient. Aggregate with "seq-mean-token-mean". `logp`, `old_logp` and `mask` [batch, tokens],
    `advantages` [batch, 1] or [batch, tokens]; each sequence is in one row. Returns [batch, tokens] in the dtype of
    `logp`.
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
    """Clipped value loss: 0.5·max((V - R)², (clip(V, V_old ± clip) - R)²) (PPO's code, described in arXiv 2005.12729).

    `values`, `returns` and `old_values` [batch, tokens]. With `clip` None: 0.5·(V - R)². Returns [batch, tokens] in the
    dtype of `values`. The gradient flows through `values` only.
    """
    target, old = returns.detach().to(values.dtype), old_values.detach().to(values.dtype)
    plain = (values - target).square()
    if clip is None:
        return 0.5 * plain
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum(plain, (held - target).square())


def nll_loss(logp: Tensor) -> Tensor:
    """-logp: negative log-likelihood of given responses (supervised fine-tuning), without rewards or an old policy.

    `logp` [batch, tokens] in nats; returns the same shape. Aggregated with "token-mean" it is the cross entropy per
    token.
    """
    return -logp


def value_clip_tokens(values: Tensor, returns: Tensor, old_values: Tensor, clip: float | None) -> Tensor:
    """1.0 where the clip of `value_loss` removes the gradient of a value, else 0.0.

    Shapes as in `value_loss`; returns [batch, tokens] in the dtype of `values`, detached.
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
    """1.0 where the clip of `ppo_loss` removes the gradient of a token, else 0.0.

    Shapes as in `ppo_loss`; returns [batch, tokens] in the dtype of `logp`, detached. The mean over the mask is the
    clip fraction.
    """
    ratio = token_ratio(logp, old_logp).detach()
    held = _held(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        held = held | ((advantages < 0) & (ratio > dual_clip))
    return held.to(logp.dtype)


def gspo_clip_fraction_tokens(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """1.0 where the clip of `gspo_loss` removes the gradient of a token, else 0.0; shapes as in `gspo_loss`."""
    ratio = sequence_ratio(logp, old_logp, mask).expand(logp.shape)
    return _held(ratio, advantages, clip_low, clip_high).to(logp.dtype)


def cispo_clip_fraction_tokens(logp: Tensor, old_logp: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """1.0 where the weight of `cispo_loss` is clipped, for any advantage, else 0.0. These tokens keep their gradients.

    Shapes as in `ppo_loss`; returns [batch, tokens] in the dtype of `logp`, detached.
    """
    ratio = token_ratio(logp, old_logp).detach()
    return ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).to(logp.dtype)


def token_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Probability ratio r = exp(logp - old_logp) of each token, with the log-ratio clamped to ±20; both of one shape.

    The gradient flows through `logp` only.
    """
    return (logp - old_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """Probability ratio of each sequence: s = exp(mean of log r over the row's trained tokens), clamped like
    `token_ratio`.

    Inputs [batch, tokens]; returns [batch, 1], detached; 1 for a row without trained tokens.
    """
    trained = mask != 0
    apart = torch.where(trained, logp.detach() - old_logp.detach(), 0.0)
    mean = apart.sum(dim=1, keepdim=True) / trained.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _held(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where PPO's clip removes the gradient: the ratio is beyond the bound in the direction that the advantage pushes
    it.
    """
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How token losses are aggregated. "token-mean": every token has the same weight (DAPO, arXiv 2503.14476).
"seq-mean-token-mean": every sequence has the same weight (GRPO, GSPO). "seq-mean-token-sum": every sequence counts with
the sum of its tokens. "seq-mean-token-sum-norm": that sum divided by a constant (Dr.GRPO, arXiv 2503.20783).
"""


def loss_sum(token_loss: Tensor, mask: Tensor, mode: Mode, horizon: float | None = None) -> Tensor:
    """Sum of the losses of one part of the update, to be divided by `denominator`.

    `token_loss` and `mask` [batch, tokens]; tokens with a nonzero mask are trained. Returns a scalar, the sum over
    sequences of: the mean over tokens ("seq-mean-token-mean"), the sum over tokens divided by the constant `horizon` in
    tokens ("seq-mean-token-sum-norm", Dr.GRPO), or the sum over tokens (other modes). Raises ValueError for mismatched
    shapes and for a missing horizon.
    """
    if token_loss.shape != mask.shape or token_loss.ndim != 2:
        raise ValueError(
            f"token_loss {tuple(token_loss.shape)} and mask {tuple(mask.shape)} must have one shape [batch, tokens]"
        )
    trained = mask != 0
    kept = torch.where(trained, token_loss, torch.zeros_like(token_loss))
    if mode == "seq-mean-token-mean":
        return (kept.sum(dim=1) / trained.sum(dim=1).clamp(min=1)).sum()
    if mode == "seq-mean-token-sum-norm":
        return kept.sum() / _horizon(horizon)
    return kept.sum()


def denominator(mode: Mode, *, tokens: int, sequences: int, horizon: float | None = None) -> float:
    """Divisor of the sum over all parts: the number of trained tokens of the update, or of its sequences.

    `tokens` and `sequences` count the whole update over all ranks and micro-batches. A sequence counts if at least one
    of its tokens is trained. `horizon` is only validated, because `loss_sum` divides by it. Raises ValueError if the
    count is 0.
    """
    if mode == "seq-mean-token-sum-norm":
        _horizon(horizon)
    count = tokens if mode == "token-mean" else sequences
    if count < 1:
        raise ValueError(f"the update has {tokens} trained tokens in {sequences} sequences; {mode} needs at least 1")
    return float(count)


def _horizon(horizon: float | None) -> float:
    if horizon is None or horizon <= 0:
        raise ValueError(f"horizon is {horizon}; seq-mean-token-sum-norm needs a number above 0")
    return float(horizon)


def ratio_weight(logp: Tensor, behave_logp: Tensor) -> Tensor:
    """exp(logp - behave_logp), detached, with the log-ratio clamped to ±20; both of one shape, such as [batch, tokens].

    The weight of decoupled PPO (arXiv 2505.24298): π_prox / π_behave, times the PPO loss with ratio π / π_prox.
    """
    return (logp - behave_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def tis_weight(old_logp: Tensor, rollout_logp: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling (Yao et al., 2025): min(exp(old_logp - rollout_logp), cap), detached.

    `old_logp` is the trainer's π_old, `rollout_logp` the engine's, both of one shape, such as [batch, tokens]; returns
    that shape. Multiply the token losses by it. Raises ValueError unless `cap` is above 0.
    """
    if cap <= 0:
        raise ValueError(f"the cap of the importance weight is {cap}; it must be above 0")
    return ratio_weight(old_logp, rollout_logp).clamp(max=cap)


def icepop_weight(old_logp: Tensor, rollout_logp: Tensor, *, low: float, high: float) -> Tensor:
    """IcePop (arXiv 2510.18855): exp(old_logp - rollout_logp) where it is within [low, high], else 0, detached.

    Shapes as in `tis_weight`. Tokens outside the band still count in the denominator. Raises ValueError unless 0 <= low
    < high.
    """
    weight = ratio_weight(old_logp, rollout_logp)
    return torch.where(_inside(weight, low, high), weight, 0.0)


def mis_mask(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Masked importance sampling: `mask` without tokens whose ratio exp(old_logp - rollout_logp) is outside [low,
    high].

    All [batch, tokens]. Follows public implementations of 2025. Compute denominators from the returned mask, so that
    tokens outside do not count. Raises ValueError unless 0 <= low < high.
    """
    return torch.where(_inside(ratio_weight(old_logp, rollout_logp), low, high), mask, torch.zeros_like(mask))


def _inside(weight: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low < high:
        raise ValueError(f"the band of the importance weight is [{low}, {high}]; it must be 0 <= low < high")
    return (weight >= low) & (weight <= high)


MAX_EXPONENT = 20.0


def kl_estimate(
    logp: Tensor, ref_logp: Tensor, kind: Literal["k1", "k2", "k3", "k3+"], *, most: float | None = None
) -> Tensor:
    """KL per token, with d = logp - ref_logp: k1 = d; k2 = d²/2; k3 = e^(-d) - 1 + d (Schulman, 2020); "k3+" has the
    value of k3 and the gradient of k2 (arXiv 2506.09477).

    Both inputs of one shape, such as [batch, tokens]; returns that shape in nats, in the dtype of `logp`. The gradient
    flows through `logp` only. The exponent is clamped to 20, so that a token of very low probability does not overflow.
    `most` limits k3 per token to this many nats, without a gradient beyond (public implementations use 10, which is d
    below -2.6). None: no limit. "k3+" ignores `most`.
    """
    d = logp - ref_logp.detach()
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            return _k3(d) if most is None else _k3(d).clamp(max=most)
        case "k3+":
            k2 = d * d / 2
            return _k3(d).detach() + (k2 - k2.detach())  # the bracket is exactly 0 and has the gradient of k2


def _k3(d: Tensor) -> Tensor:
    return torch.expm1((-d).clamp(max=MAX_EXPONENT)) + d
