"""Advantages, in this order: of a group, from returns, from a critic's values (GAE); whitening; penalties inside the reward.

A group's statistics need all of its samples, and samples of one group are spread over ranks: the caller gathers the
rewards of the whole step first, and every rank computes the same advantages from them. Always in float64: rewards that
differ by little would otherwise lose their difference to rounding. Groups that are all the same are found with a
tolerance, not by `== 0`; they get advantages of zero. Dropping such groups is the flow's business, not this module's.

Returns and GAE go from rewards at tokens to what was still to come. Rows are sequences, columns tokens, [batch, tokens]. A
token whose mask is 0 (padding, or an observation in the middle of a sequence with several turns) is skipped: what comes
behind it is handed through unchanged, without discount, to what is before it.

Whitening gives mean zero and variance one over all trained tokens of a step, however they are spread over ranks and
micro-batches: each part's `Moments` are added up first; every part is then whitened by those of the whole. Whitening comes
after returns are taken from advantages, never before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

GroupKind = Literal["grpo", "dr_grpo", "rloo"]
CONSTANT_REWARD_STD = 1e-6
STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_index: Tensor, kind: GroupKind) -> Tensor:
    """Advantages of samples against their groups.

    `rewards` [n], any float type; `group_index` [n] int64, equal for samples of one group, otherwise without meaning.
    Returns [n] float64:

    - "grpo" (arXiv 2402.03300): (R - mean) / (std + 1e-6) with the unbiased std;
    - "dr_grpo" (arXiv 2503.20783): R - mean. REINFORCE++'s form with a baseline (arXiv 2501.03262) begins with it too, and
      whitens over the batch afterwards (`whitened`);
    - "rloo" (arXiv 2402.14740): R less the mean of the others, (k R - sum) / (k - 1) for a group of k.

    A group whose rewards have a std of at most 1e-6 gets zeros. Raises ValueError for a group of one (there is nothing to
    compare with), for rewards that are not finite, for shapes that do not fit and for another kind.
    """
    if kind not in get_args(GroupKind):
        raise ValueError(f"{kind!r} is no group-relative advantage; there are {', '.join(get_args(GroupKind))}")
    values = _rewards(rewards, group_index)
    _, inverse, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError("a group of one sample has no group-relative advantage; use at least 2 samples a prompt")
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


def against_greedy(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """ReMax (arXiv 2310.10505): R less the reward of the greedy answer to the same prompt.

    `rewards` and `greedy_rewards` [n], the latter repeated for each sample of its prompt; returns [n] float64. Where
    rewards stand at single tokens, it is their return to go that is compared (`discounted`). Raises ValueError for
    rewards that are not finite and for shapes that do not fit.
    """
    return _rewards(rewards, greedy_rewards) - _rewards(greedy_rewards, rewards)


def _rewards(rewards: Tensor, beside: Tensor) -> Tensor:
    if rewards.ndim != 1 or rewards.shape != beside.shape:
        raise ValueError(f"tensors of shapes {tuple(rewards.shape)} and {tuple(beside.shape)} must both be [n]")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    return rewards.to(torch.float64)


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """[batch, tokens]: each sequence's reward (`rewards` [batch]) at its last token that counts, 0 elsewhere.

    Raises ValueError for a sequence of which no token counts: its reward would be lost in silence.
    """
    counted = mask != 0
    if not bool(counted.any(dim=1).all()):
        raise ValueError("a sequence has no token that counts, so its reward has no place")
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(counted, columns, -1).amax(dim=1, keepdim=True)
    return torch.where(columns == last, rewards.to(torch.float64)[:, None], 0.0)


def discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return to go: G = R + gamma · G', token by token (REINFORCE: Williams, 1992).

    `rewards` and `mask` [batch, tokens]; returns [batch, tokens] float64, 0 where `mask` is 0. With `gamma` 1 and the reward
    at the last token, every token has the reward.
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
    """Generalised advantage estimation (arXiv 1506.02438): δ = R + γ V' - V, A = δ + γ λ A'.

    `rewards`, `values` and `mask` [batch, tokens]; behind the last token that counts V' and A' are 0. Returns (advantages,
    returns), each [batch, tokens] float64 and 0 where `mask` is 0; returns = A + V, taken before anything is whitened, are
    what the critic is fitted to. No gradient goes through.
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
"""Added to the variance, as public implementations of REINFORCE++ and GAE do."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments of some trained tokens: how many, their mean, and the sum of their squared distances from it; float64."""

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


def overlong_penalty(lengths: Tensor, *, longest: int, cache: int, factor: float) -> Tensor:
    """DAPO's soft punishment of length (arXiv 2503.14476): min(-(len - (longest - cache)) / cache · factor, 0).

    `lengths` [n] in tokens; `longest` and `cache` in tokens: it begins at `longest - cache` and is `-factor` at `longest`.
    Returns [n] float64, to be added to the rewards. Raises ValueError unless 0 < cache <= longest and factor >= 0.
    """
    if not 0 < cache <= longest:
        raise ValueError(f"a cache of {cache} tokens does not fit into {longest}")
    if factor < 0:
        raise ValueError(f"the factor is {factor}; a penalty is not negative")
    over = lengths.to(torch.float64) - (longest - cache)
    return (-over / cache * factor).clamp(max=0.0)


def less_kl(token_rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """KL inside the reward (arXiv 1909.08593): R - coef·kl at every token that counts; [batch, tokens] each, returns float64.

    `kl` is k1 (`losses.kl_estimate`), the unbiased one, for no gradient is taken of a reward. KL as a loss is another thing:
    it is added to the token losses, as k3 or k2.
    """
    return torch.where(mask != 0, token_rewards.to(torch.float64) - coef * kl.detach().to(torch.float64), 0.0)
