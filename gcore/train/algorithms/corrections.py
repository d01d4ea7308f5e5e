"""Weights for the difference between what the engine sampled from and what the trainer computes.

Engine and trainer give slightly different log-probabilities for the same tokens and weights (kernels, precision,
truncated sampling), and samples that were made ahead of training come from older weights. What is done about it is
the spec's choice:

- TIS, truncated importance sampling, multiplies each token's loss by the capped ratio of the two;
- IcePop does so within a band, and drops the loss of a token outside;
- MIS leaves such tokens out altogether, of the count too;
- decoupled PPO clips around a proximal policy and weighs by its ratio to the behaviour policy.

None of them touches the PPO ratio, which stays within the trainer. All weights are detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


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
