"""Advantages: group-relative, returns, GAE; whitening; penalties added to the reward.

Group statistics need all samples of a group, and the samples of one group are spread over ranks. The caller gathers the
rewards of the whole step, and every rank computes the same advantages from them. All computation is in float64, so that
small differences between rewards are not lost to rounding. A group with equal rewards is detected with a tolerance, not
with `== 0`, and gets zero advantages. The job's flow may drop such groups before training; nothing is dropped here.

Returns and GAE work on [batch, tokens]: rows are sequences, columns are tokens. A masked token (padding, or an
observation within a multi-turn sequence) is skipped: the values after it reach the token before it unchanged and
without discount.

Whitening normalizes to mean zero and variance one over all trained tokens of a step, independent of how they are split
over ranks and micro-batches. Add up the `Moments` of all parts first, then whiten each part with the total. Whiten
after returns were computed from advantages, never before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

GroupKind = Literal["grpo", "dr_grpo", "rloo"]
CONSTANT_REWARD_STD = 1e-6
"""A group whose rewards have at most this standard deviation counts as one with equal rewards."""
STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_index: Tensor, kind: GroupKind) -> Tensor:
    """Group-relative advantages of samples.

    `rewards` [n], any float type. `group_index` [n] int64: equal for samples of one group; the value itself has no
    meaning. Returns [n] float64:

    - "grpo" (arXiv 2402.03300): (R - mean) / (std + 1e-6) with the unbiased std.
    - "dr_grpo" (arXiv 2503.20783): R - mean. REINFORCE++ with baseline (arXiv 2501.03262) uses the same term and then
      whitens over the batch (`whitened`).
    - "rloo" (arXiv 2402.14740): R minus the mean of the other rewards, = (k R - sum) / (k - 1) for a group of k.

    A group whose rewards have a std of at most 1e-6 gets zeros. Raises ValueError for a group of one sample, for
    non-finite rewards, for mismatched shapes and for an unknown kind.
    """
    if kind not in get_args(GroupKind):
        raise ValueError(f"unknown group-relative advantage {kind!r}; choose one of {', '.join(get_args(GroupKind))}")
    values = _rewards(rewards, group_index)
    _, inverse, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError("a group of one sample has no group-relative advantage; use at least 2 samples per prompt")
    sums = torch.zeros(len(counts), dtype=torch.float64, device=values.device).index_add_(0, inverse, values)
    centred = values - (sums / counts)[inverse]
    squares = torch.zeros_like(sums).index_add_(0, inverse, centred * centred)
    std = (squares / (counts - 1)).sqrt()
    match kind:
        case "grpo":
            advantages = centred / (std + STD_EPSILON)[inverse]
        case "dr_grpo":
            advantages = centred
        case "rloo":
            advantages = centred * (counts / (counts - 1))[inverse]
    return torch.where((std <= CONSTANT_REWARD_STD)[inverse], torch.zeros_like(centred), advantages)


def _rewards(rewards: Tensor, beside: Tensor) -> Tensor:
    if rewards.ndim != 1 or rewards.shape != beside.shape:
        raise ValueError(f"tensors of shapes {tuple(rewards.shape)} and {tuple(beside.shape)} must both be [n]")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    return rewards.to(torch.float64)


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Place each sequence's reward at its last unmasked token: [batch, tokens] float64, 0 elsewhere.

    `rewards` [batch]; `mask` [batch, tokens]. Raises ValueError for a sequence without an unmasked token, because its
    reward would be lost.
    """
    counted = mask != 0
    if not bool(counted.any(dim=1).all()):
        raise ValueError("a sequence has no unmasked token, so its reward cannot be placed")
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(counted, columns, -1).amax(dim=1, keepdim=True)
    return torch.where(columns == last, rewards.to(torch.float64)[:, None], 0.0)


def discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return to go per token: G = R + gamma · G' (REINFORCE: Williams, 1992).

    `rewards` and `mask` [batch, tokens]. Returns [batch, tokens] float64, 0 where `mask` is 0. With `gamma` 1 and the
    reward at the last token, every token gets the whole reward.
    """
    values, counted = rewards.to(torch.float64), mask != 0
    running = torch.zeros(values.shape[0], dtype=torch.float64, device=values.device)
    out = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        here = counted[:, t]
        running = torch.where(here, values[:, t] + gamma * running, running)
        out[:, t] = torch.where(here, running, 0.0)
    return out


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438): δ = R + γ V' - V, A = δ + γ λ A'.

    `rewards`, `values` and `mask` [batch, tokens]. After the last unmasked token V' and A' are 0. Returns (advantages,
    returns), each [batch, tokens] float64 and 0 where `mask` is 0. Returns are A + V before whitening: the target of
    the critic. No gradient flows through.
    """
    reward, value = rewards.detach().to(torch.float64), values.detach().to(torch.float64)
    counted = mask != 0
    advantages = torch.zeros_like(reward)
    ahead = torch.zeros(reward.shape[0], dtype=torch.float64, device=reward.device)
    running = torch.zeros_like(ahead)
    for t in range(reward.shape[1] - 1, -1, -1):
        here = counted[:, t]
        delta = reward[:, t] + gamma * ahead - value[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        ahead = torch.where(here, value[:, t], ahead)
        advantages[:, t] = torch.where(here, running, 0.0)
    return advantages, torch.where(counted, advantages + value, 0.0)


EPSILON = 1e-8
"""Added to the variance when whitening, as in public implementations of REINFORCE++ and GAE."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of per-token values, in float64; moments of parts can be added."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Moments) -> Moments:
        """Combine two sets of moments without catastrophic cancellation (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        if count == 0:
            return self
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return Moments(count, mean, squares)

    @property
    def variance(self) -> float:
        """Unbiased variance; 0 for fewer than two tokens."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Moments of `values` [batch, tokens] where `mask`, of the same shape, is nonzero."""
        kept = values.detach()[mask != 0].to(torch.float64)
        if kept.numel() == 0:
            return cls()
        mean = kept.mean()
        return cls(kept.numel(), float(mean), float((kept - mean).square().sum()))


def whitened(values: Tensor, mask: Tensor, whole: Moments) -> Tensor:
    """Normalize per-token values with the moments of the whole step: (value - mean) / sqrt(variance + 1e-8); 0 where
    `mask` is 0 (arXiv 2501.03262).

    `values` and `mask` [batch, tokens]; `whole`: moments over all ranks and micro-batches. Returns [batch, tokens]
    float64. Equal values become 0.
    """
    scale = (whole.variance + EPSILON) ** -0.5
    return torch.where(mask != 0, (values.to(torch.float64) - whole.mean) * scale, 0.0)


def overlong_penalty(lengths: Tensor, *, longest: int, cache: int, factor: float) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476): min(-(len - (longest - cache)) / cache · factor, 0).

    `lengths` [n], `longest` and `cache` in tokens. The penalty starts at length `longest - cache` and reaches `-factor`
    at `longest`. Returns [n] float64, to be added to the rewards. Raises ValueError unless 0 < cache <= longest and
    factor >= 0.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"cache is {cache} tokens; it must be above 0 and at most {longest}")
    if factor < 0:
        raise ValueError(f"factor is {factor}; it must be at least 0")
    over = lengths.to(torch.float64) - (longest - cache)
    return (-over / cache * factor).clamp(max=0.0)


def less_kl(token_rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Subtract a KL penalty from the reward of every unmasked token: R - coef·kl; 0 elsewhere (arXiv 1909.08593).

    All tensors [batch, tokens]; returns float64. `kl` is the k1 estimate (`losses.kl_estimate`): it is unbiased, and no
    gradient of a reward is taken. A KL loss is separate: add k2 or k3 to the token losses.
    """
    return torch.where(mask != 0, token_rewards.to(torch.float64) - coef * kl.detach().to(torch.float64), 0.0)
