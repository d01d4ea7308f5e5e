"""Advantages and losses for denoising models: flow matching and diffusion.

A *row* is one trained denoising step of one sample; rows are independent of each other. Log-probabilities are means over
dimensions (`gcore.models.diffusion.steps`), so ratios are within about 1e-4 of 1, and clip ranges are of this order.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

StdOf = Literal["batch", "group", "none"]


def denoising_advantages(
    rewards: Tensor, group_index: Tensor, *, std_of: StdOf, ddof: int, epsilon: float, clip: float | None
) -> Tensor:
    """Advantages [n] (R - mean of the group) / (std + epsilon), at most `clip` in size, as in Flow-GRPO (arXiv 2505.05470).

    `rewards` [n]. `group_index` [n] int64: equal for samples of one prompt. `std_of`: "batch" takes the deviation of all
    rewards (Flow-GRPO), "group" of the group's own (DanceGRPO); "none" divides by nothing, for rewards that are standardised
    already. `ddof`: 0 for the population's, 1 for the sample's deviation. Returns [n] float64. A group with equal rewards gets
    exactly zeros. Raises ValueError for rewards that are not finite, and for a group of one sample whose own deviation with
    `ddof` 1 is needed.
    """
    values = rewards.detach().to(torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise ValueError("rewards must be finite")
    _, inverse, counts = torch.unique(group_index, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, inverse, values)
    centred = values - (sums / counts)[inverse]
    squares = torch.zeros_like(sums).index_add_(0, inverse, centred**2)
    highest = torch.full_like(sums, -torch.inf).scatter_reduce(0, inverse, values, "amax")
    lowest = torch.full_like(sums, torch.inf).scatter_reduce(0, inverse, values, "amin")
    centred = torch.where((highest == lowest)[inverse], 0.0, centred)  # the mean of equal numbers may be rounded
    if std_of == "none":
        std, epsilon = torch.ones(()), 0.0
    elif std_of == "batch":
        if len(values) <= ddof:
            raise ValueError(f"the deviation of {len(values)} rewards with ddof {ddof} is not defined")
        std = (((values - values.mean()) ** 2).sum() / (len(values) - ddof)).sqrt()
    else:
        if bool((counts <= ddof).any()):
            raise ValueError("a group of one sample has no deviation; use at least 2 samples per prompt")
        std = (squares / (counts - ddof)).sqrt()[inverse]
    advantages = centred / (std + epsilon)
    return advantages if clip is None else advantages.clamp(-clip, clip)


def guarded_log_ratio(log_prob: Tensor, old_log_prob: Tensor, mean_gap: Tensor, std: Tensor) -> Tensor:
    """Logarithm of GRPO-Guard's ratio (arXiv 2510.22319), which has mean 1 and equal spread at all steps:
    (log_prob - old_log_prob + mean_gap / (2 std²))·std.

    All of one shape. `mean_gap`: mean over dimensions of (mean - mean of the old policy)², with its gradient, as in the
    method's own code. `std`: of the step. The method's loss is PPO's clipped loss with this ratio, divided by σ - σ'.
    """
    return (log_prob - old_log_prob.detach() + mean_gap / (2 * std**2)) * std


def nft_weights(advantages: Tensor, *, most: float) -> Tensor:
    """DiffusionNFT's probability [n] that a sample is a good one (arXiv 2509.16117): r = clamp(A / most / 2 + 1/2, 0, 1)."""
    return (advantages / most / 2 + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    state: Tensor,
    clean: Tensor,
    level: Tensor,
    weights: Tensor,
    *,
    beta: float,
    most: float,
) -> Tensor:
    """DiffusionNFT's loss [batch], by row (arXiv 2509.16117): pull towards good samples and push away from bad ones, on the forward
    process. The method adds the squared distance to the reference's velocity, with a small weight.

    `state` [rows, ...] = (1 - t)·clean + t·ε at level t = `level` [rows]; `velocity` and `old_velocity` are the networks'
    velocities there. `weights` [rows]: `nft_weights`. `beta`: mixture of the new and the old velocity. `most`: the bound of
    advantages, which scales the loss. Each branch's error is divided by its own detached mean size, at least 1e-5. The
    gradient flows through `velocity` only; at v = v_old both branches are equal, and its factor is (2r - 1).
    """
    t = level.reshape(-1, *(1,) * (state.dim() - 1)).to(state.dtype)
    old = old_velocity.detach()
    positive = beta * velocity + (1 - beta) * old
    negative = (1 + beta) * old - beta * velocity
    errors = []
    for branch in (positive, negative):
        gap = (state - t * branch) - clean
        scale = gap.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5).to(gap.dtype)
        errors.append((gap**2).flatten(1).mean(1) / scale)
    r = weights.detach().to(velocity.dtype)
    return most * (r * errors[0] + (1 - r) * errors[1]) / beta


def prediction_gap(prediction: Tensor, reference: Tensor) -> Tensor:
    """Squared distance [batch] of `prediction` to `reference` [batch, ...] on any device, as a mean over dimensions.

    The KL of DiffusionNFT (arXiv 2509.16117), the error of flow matching if `reference` is the target, and (mean - mean of
    another policy)² of a step. The gradient flows through `prediction` only.
    """
    return ((prediction - reference.detach().to(prediction.device)) ** 2).flatten(1).mean(1)


def matching_weights(advantages: Tensor, *, temperature: float) -> Tensor:
    """Weights [n] of reward-weighted fine-tuning: exp(A / temperature), as in reward-weighted regression (arXiv 2305.13301),
    with an advantage in place of the reward, so that prompts with high rewards do not count more."""
    return (advantages.detach() / temperature).exp()
