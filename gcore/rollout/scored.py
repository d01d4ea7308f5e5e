"""The scored responses to a prompt as the group that is trained: rewards, what length takes off, what cut-off ones become.

Pure, and the same for a controller's peer and for the peers in memory of `gcore.testing`. What is not to be scored at all is
found before (`gcore.rollout.truncated.dropped`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gcore.config.rollout import RolloutSpec
from gcore.config.sources import SourceSampling
from gcore.reward.registry import RewardResult
from gcore.rollout.alike import alike
from gcore.rollout.overlong import penalized
from gcore.rollout.truncated import treated
from gcore.types import Group, Prompt, Sample


def scored_group(
    prompt: Prompt,
    samples: Sequence[Sample],
    results: Sequence[RewardResult],
    rollout: RolloutSpec,
    sampling: SourceSampling,
) -> Group:
    """The group. `results`: of the samples, in their order; `sampling`: the source's. Raises RewardError for no float32, and for
    responses that have no prompt in common."""
    scored = []
    for sample, result in zip(samples, results, strict=True):
        rewarded = replace(sample, reward=result.value, reward_parts=result.parts)
        long = penalized(
            rewarded,
            longest=sampling.max_new_tokens,
            cache=rollout.overlong_tokens,
            penalty=rollout.overlong_penalty,
        )
        scored.append(treated(long, rollout.truncated, rollout.truncated_penalty))
    prompt_ids, behind = alike(prompt.token_ids, scored)
    return Group(prompt.ref, prompt_ids, behind, prompt.source, sampling.temperature)
