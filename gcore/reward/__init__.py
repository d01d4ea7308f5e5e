"""Scoring of responses, by rule or by a model. What a reward plug-in needs is exported here."""

from gcore.config.sources import RewardSpec
from gcore.reward.registry import Reward, RewardError, RewardResult, find_reward

__all__ = ["Reward", "RewardError", "RewardResult", "RewardSpec", "find_reward"]
