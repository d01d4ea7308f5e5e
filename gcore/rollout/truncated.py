"""What becomes of responses that were cut off at their longest length (finish reason "length"). Pure.

    keep         trained as they are
    mask         left out of the loss; their reward still counts for the group's baseline. A group of which nothing would
                 be left for the loss is filtered: it would take a place in the step and teach nothing
    penalise     worth `penalty` less, which is shown as a part of the reward called "truncated"
    drop_group   the whole group is filtered

A response that the engine cut off because the model's context ended is cut off like any other. Longest lengths are the
source's (`gcore.config.sources`). No penalty grows with length here, and nothing is known of how a loss is normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from gcore.config.reward import LARGEST
from gcore.reward.registry import RewardError
from gcore.types import Outcome, Sample

Policy = Literal["keep", "mask", "penalise", "drop_group"]
PART = "truncated"
"""The reward part that holds what `penalise` took off."""


def is_truncated(sample: Sample) -> bool:
    """Whether the response was cut off."""
    return sample.finish_reason == "length"


def dropped(samples: Sequence[Sample], policy: Policy) -> Outcome | None:
    """The outcome of a group that is not to be trained, before anything is scored; None for all others."""
    cut_off = [sample for sample in samples if is_truncated(sample)]
    if policy == "drop_group" and cut_off:
        longest = max(len(sample.token_ids) for sample in cut_off)
        return Outcome("filtered", f"a response was cut off at {longest} tokens (rollout.max_new_tokens)")
    if policy == "mask" and len(cut_off) == len(samples):
        return Outcome("filtered", "every response was cut off (rollout.max_new_tokens), and none is left for the loss")
    return None


def treated(sample: Sample, policy: Policy, penalty: float) -> Sample:
    """A scored sample as it is trained. Raises RewardError if its reward with the penalty is no float32."""
    if not is_truncated(sample) or policy in ("keep", "drop_group"):
        return sample
    if policy == "mask":
        return replace(sample, masked=True)
    reward = sample.reward - penalty
    if abs(reward) > LARGEST:
        raise RewardError(
            f"a reward of {sample.reward} less {penalty} is not finite in float32",
            fix="Lower rollout.truncated_penalty",
        )
    return replace(sample, reward=reward, reward_parts=(*sample.reward_parts, (PART, -penalty)))
