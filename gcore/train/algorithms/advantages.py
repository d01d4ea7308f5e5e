"""How much better a sample was than the others of its group.

A group's statistics need all of its samples, and samples of one group are spread over ranks: the caller gathers the
rewards of the whole step first, and every rank computes the same advantages from them. Always in float64: rewards that
differ by little would otherwise lose their difference to rounding. Groups that are all the same are found with a
tolerance, not by `== 0`; they get advantages of zero. Dropping such groups is the flow's business, not this module's.
"""

from __future__ import annotations

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
      whitens over the batch afterwards (`whitening`);
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
    rewards stand at single tokens, it is their return to go that is compared (`returns.discounted`). Raises ValueError for
    rewards that are not finite and for shapes that do not fit.
    """
    return _rewards(rewards, greedy_rewards) - _rewards(greedy_rewards, rewards)


def _rewards(rewards: Tensor, beside: Tensor) -> Tensor:
    if rewards.ndim != 1 or rewards.shape != beside.shape:
        raise ValueError(f"tensors of shapes {tuple(rewards.shape)} and {tuple(beside.shape)} must both be [n]")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    return rewards.to(torch.float64)
