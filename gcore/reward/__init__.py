"""Scoring of responses, by rule or by a model. What a reward plug-in needs is exported here."""

from gcore.config.reward import RewardSpec
from gcore.reward.api import Response, Reward, RewardError, RewardResult, find_reward

__all__ = ["Response", "Reward", "RewardError", "RewardResult", "RewardSpec", "find_reward"]
