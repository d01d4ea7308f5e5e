"""Estimators of the KL divergence from the reference, token by token, from samples of the policy.

With d = logp - ref_logp. k1 is unbiased and may be negative; k2 and k3 never are. As a loss their gradients differ, which
matters more than their values (arXiv 2506.09477): that of k1 has mean zero and teaches nothing, that of k2 is the KL's own,
that of k3 is not. "k3+" therefore shows k3's value and has k2's gradient. As a term of the reward no gradient is taken, and k1 is the
unbiased choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

MAX_EXPONENT = 20.0


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: Literal["k1", "k2", "k3", "k3+"]) -> Tensor:
    """k1 = d; k2 = d²/2; k3 = e^(-d) - 1 + d (Schulman, 2020); "k3+" with the value of k3 and the gradient of k2.

    Both inputs of one shape, such as [batch, tokens]; returns that shape, nats, in the type of `logp`. The gradient goes through `logp` only. The
    exponent is held below 20, so that a token the policy all but excludes does not overflow.
    """
    d = logp - ref_logp.detach()
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            return _k3(d)
        case "k3+":
            k2 = d * d / 2
            return _k3(d).detach() + (k2 - k2.detach())  # the bracket is exactly 0 and has k2's gradient


def _k3(d: Tensor) -> Tensor:
    return torch.expm1((-d).clamp(max=MAX_EXPONENT)) + d
