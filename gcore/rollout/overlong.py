"""What a response is worth less because it is long: DAPO's soft punishment (arXiv 2503.14476). Pure.

Within `cache` tokens of the longest length the penalty grows along a line, from nothing to `penalty`. It comes on top of
what becomes of a response that was cut off (`gcore.rollout.truncated`). What counts is what the policy made: the words of a tool or
an environment make nothing longer. The same formula over tensors, for whoever trains
without the rest of gcore, is `gcore.train.algorithms.shaping.overlong_penalty`.
"""

from __future__ import annotations

from dataclasses import replace

from gcore.config.reward import LARGEST
from gcore.reward.registry import RewardError
from gcore.types import Sample

PART = "overlong"
"""The reward part that holds what was taken off."""


def overlong(length: int, *, longest: int, cache: int, penalty: float) -> float:
    """What is added to the reward, 0 or less. Lengths in tokens."""
    return min(-(length - (longest - cache)) / cache * penalty, 0.0)


def penalized(sample: Sample, *, longest: int, cache: int | None, penalty: float) -> Sample:
    """A scored sample with its penalty; without a cache there is none. Raises RewardError if its reward is no float32."""
    if cache is None:
        return sample
    off = overlong(sample.own_tokens, longest=longest, cache=cache, penalty=penalty)
    if off == 0.0:
        return sample
    reward = sample.reward + off
    if abs(reward) > LARGEST:
        raise RewardError(
            f"a reward of {sample.reward} less {-off} is not finite in float32", fix="Lower rollout.overlong_penalty"
        )
    return replace(sample, reward=reward, reward_parts=(*sample.reward_parts, (PART, off)))
