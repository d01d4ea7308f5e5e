"""Weights for the difference between what the engine sampled from and what the trainer computes.

Engine and trainer give slightly different log-probabilities for the same tokens and weights (kernels, precision,
truncated sampling). Truncated importance sampling multiplies each token's loss by the capped ratio of the two. It does
not touch the PPO ratio, which stays within the trainer.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0


def tis_weight(old_logp: Tensor, rollout_logp: Tensor, cap: float) -> Tensor:
    """min(exp(old_logp - rollout_logp), cap), detached.

    `old_logp` is the trainer's π_old, `rollout_logp` the engine's, of one shape; returns that shape. To be multiplied
    into the token losses. Raises ValueError for a cap that is not above 0.
    """
    if cap <= 0:
        raise ValueError(f"the cap of the importance weight is {cap}; it must be above 0")
    return (old_logp - rollout_logp).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
