"""Losses, in this order: policy and value losses by token; clip fractions; aggregation; corrections; estimates of the KL.

**Losses by token**, before masking and aggregation. The clip is PPO's, with two bounds, so that DAPO's wider upper one (0.2 /
0.28) is the same function. The log-ratio is held within ±20: beyond it the exponential overflows float32, and what is so far
off is clipped or lost anyway. Whether π_old is this update's own policy, recomputed, or the engine's is the caller's choice
and not known here.

**Aggregation.** Token losses become one number, the same for every split over ranks and micro-batches. The loss of an update
is a sum over all its sequences divided by a count of all its sequences or tokens. The sum is taken where the sequences are,
micro-batch by micro-batch (`loss_sum`); the count is the whole update's and known beforehand (`denominator`). So

    loss = Σ over ranks and micro-batches of loss_sum(...) / denominator(global counts)

and no mean is ever taken over a part. A sequence is whole in one row; rows of zeros (padding, dummies) add nothing.

**Corrections** weigh the difference between what the engine sampled from and what the trainer computes. Both give slightly
different log-probabilities for the same tokens and weights (kernels, precision, truncated sampling), and samples that were
made ahead of training come from older weights. What is done about it is the spec's choice:

- TIS, truncated importance sampling, multiplies each token's loss by the capped ratio of the two;
- IcePop does so within a band, and drops the loss of a token outside;
- MIS leaves such tokens out altogether, of the count too;
- decoupled PPO clips around a proximal policy and weighs by its ratio to the behaviour policy.

None of them touches the PPO ratio, which stays within the trainer. All weights are detached.

**KL** from the reference, token by token, from samples of the policy. With d = logp - ref_logp, k1 is unbiased and may be
negative; k2 and k3 never are. As a loss their gradients differ, which matters more than their values (arXiv 2506.09477): that
of k1 has mean zero and teaches nothing, that of k2 is the KL's own, that of k3 is not. "k3+" therefore shows k3's value and
has k2's gradient. As a term of the reward no gradient is taken, and k1 is the unbiased choice.
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


def ratio_weight(logp: Tensor, behave_logp: Tensor) -> Tensor:
    """exp(logp - behave_logp), detached, of one shape such as [batch, tokens], the log-ratio held within ±20.

    As the weight of decoupled PPO (arXiv 2505.24298): π_prox / π_behave, times the PPO loss whose ratio is π / π_prox.
    """
    return (logp - behave_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def tis_weight(old_logp: Tensor, rollout_logp: Tensor, cap: float) -> Tensor:
    """min(exp(old_logp - rollout_logp), cap), detached: truncated importance sampling (Yao et al., 2025).

    `old_logp` is the trainer's π_old, `rollout_logp` the engine's, of one shape, such as [batch, tokens]; returns that shape. To be multiplied
    into the token losses. Raises ValueError for a cap that is not above 0.
    """
    if cap <= 0:
        raise ValueError(f"the cap of the importance weight is {cap}; it must be above 0")
    return ratio_weight(old_logp, rollout_logp).clamp(max=cap)


def icepop_weight(old_logp: Tensor, rollout_logp: Tensor, *, low: float, high: float) -> Tensor:
    """exp(old_logp - rollout_logp) where it is within [low, high], else 0, detached: IcePop (arXiv 2510.18855).

    Shapes as in `tis_weight`; the tokens outside still count in the denominator. Raises ValueError unless 0 <= low < high.
    """
    weight = ratio_weight(old_logp, rollout_logp)
    return torch.where(_inside(weight, low, high), weight, 0.0)


def mis_mask(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """`mask` without the tokens whose ratio exp(old_logp - rollout_logp) is outside [low, high]; all [batch, tokens].

    Masked importance sampling as public implementations of 2025 have it. The tokens outside are not counted: denominators are those of what it returns. Raises ValueError unless 0 <= low < high.
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
    """With d = logp - ref_logp: k1 = d; k2 = d²/2; k3 = e^(-d) - 1 + d (Schulman, 2020); "k3+" with the value of k3 and the gradient of k2.

    Both inputs of one shape, such as [batch, tokens]; returns that shape, nats, in the type of `logp`. The gradient goes through `logp` only. The
    exponent is held below 20, so that a token the policy all but excludes does not overflow. `most`: k3 of a token is held at so many nats, and
    has no gradient beyond (public implementations hold it at 10, which is d below -2.6); None: no bound.
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
            return _k3(d).detach() + (k2 - k2.detach())  # the bracket is exactly 0 and has k2's gradient


def _k3(d: Tensor) -> Tensor:
    return torch.expm1((-d).clamp(max=MAX_EXPONENT)) + d
