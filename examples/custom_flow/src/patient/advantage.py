"""Against the median: what is better than the middle of its group is made likelier, what is worse less likely.

One very good or very bad answer moves a mean, and hardly a median.
"""

from __future__ import annotations

import torch
from torch import Tensor


def against_median(outcomes: Tensor, groups: Tensor) -> Tensor:
    """`outcomes` [n] float64, `groups` [n] int64; advantages [n] float64."""
    found = torch.empty_like(outcomes)
    for group in groups.unique():
        mine = groups == group
        found[mine] = outcomes[mine] - outcomes[mine].quantile(0.5)
    return found
