"""Rewards: built-in rules, processes for reward code, judges (models that score); the interface of reward plug-ins.

Read `api` first. `scorer` combines all rewards of a job, `pool` runs reward code, `rules` has the built-in rewards.
"""

from gcore.config.reward import RewardSpec
from gcore.reward.api import PictureFile, Response, Reward, RewardError, RewardResult, batch_reward, find_reward

__all__ = [
    "PictureFile",
    "Response",
    "Reward",
    "RewardError",
    "RewardResult",
    "RewardSpec",
    "batch_reward",
    "find_reward",
]
