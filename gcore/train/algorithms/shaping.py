"""What is taken off a reward before advantages are made of it: for length, and for leaving the reference."""

from __future__ import annotations

import torch
from torch import Tensor


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

    `kl` is k1 (`kl.kl_estimate`), the unbiased one, for no gradient is taken of a reward. KL as a loss is another thing:
    it is added to the token losses, as k3 or k2.
    """
    return torch.where(mask != 0, token_rewards.to(torch.float64) - coef * kl.detach().to(torch.float64), 0.0)
