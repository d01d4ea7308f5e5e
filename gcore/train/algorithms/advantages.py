"""How much better a sample was than the others of its group.

A group's statistics need all of its samples, and samples of one group are spread over ranks: the caller gathers the
rewards of the whole step first, and every rank computes the same advantages from them. Always in float64: rewards that
differ by little would otherwise lose their difference to rounding. Groups that are all the same are found with a
tolerance, not by `== 0`; they get advantages of zero. Dropping such groups is the flow's business, not this module's.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

CONSTANT_REWARD_STD = 1e-6
STD_EPSILON = 1e-6


def group_advantages(rewards: Tensor, group_index: Tensor, kind: Literal["grpo", "dr_grpo"]) -> Tensor:
    """Advantages of samples against their groups.

    `rewards` [n], any float type; `group_index` [n] int64, equal for samples of one group, otherwise without meaning.
    Returns [n] float64: "grpo" (R - mean) / (std + 1e-6) with the unbiased std; "dr_grpo" R - mean. A group whose rewards
    have a std of at most 1e-6 gets zeros. Raises ValueError for a group of one (there is nothing to compare with), for
    rewards that are not finite, and for shapes that do not fit.
    """
    if rewards.ndim != 1 or rewards.shape != group_index.shape:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_index {tuple(group_index.shape)} must both be [n]")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is not finite")
    values = rewards.to(torch.float64)
    _, inverse, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError("a group of one sample has no group-relative advantage; use at least 2 samples a prompt")
    sums = torch.zeros(len(counts), dtype=torch.float64, device=values.device).index_add_(0, inverse, values)
    centred = values - (sums / counts)[inverse]
    squares = torch.zeros_like(sums).index_add_(0, inverse, centred * centred)
    std = (squares / (counts - 1)).sqrt()
    advantages = centred / (std + STD_EPSILON)[inverse] if kind == "grpo" else centred
    return torch.where((std <= CONSTANT_REWARD_STD)[inverse], torch.zeros_like(centred), advantages)
