"""From rewards at tokens to what was still to come: discounted returns, and generalised advantage estimation.

Rows are sequences, columns tokens, [batch, tokens]. A token whose mask is 0 (padding, or an observation in the middle of a
sequence with several turns) is not there: what comes behind it is handed through unchanged, without discount, to what
stands before it. All in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
