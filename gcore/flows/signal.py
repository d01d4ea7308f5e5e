"""Whether a group says which of its samples were better. Pure."""

from __future__ import annotations

import statistics

from gcore.types import Group

CONSTANT_REWARD_STD = 1e-6
"""As `gcore.train.algorithms.advantages` has it: such a group has advantages of zero."""


def has_signal(group: Group) -> bool:
    """False if the rewards are the same up to rounding, in float64, or if there is only one.

    A masked sample's reward counts: it stands in the group's baseline.
    """
    rewards = [float(sample.reward) for sample in group.samples]
    return len(rewards) > 1 and statistics.stdev(rewards) > CONSTANT_REWARD_STD
