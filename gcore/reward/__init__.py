"""Rewards: rules, processes for reward code, judges; the interface of reward plug-ins."""

from gcore.config.reward import RewardSpec
from gcore.reward.api import Response, Reward, RewardError, RewardResult, batch_reward, find_reward

__all__ = ["Response", "Reward", "RewardError", "RewardResult", "RewardSpec", "batch_reward", "find_reward"]
