"""What becomes of responses that were cut off at their longest length (finish reason "length"). Pure.

    keep         trained as they are
    mask         left out of the loss; their reward still counts for the group's baseline. A group of which nothing would
                 be left for the loss is filtered: it would take a place in the step and teach nothing
    penalise     worth `penalty` less, which is shown as a part of the reward called "truncated"
    drop_group   the whole group is filtered

A response that the engine cut off because the model's context ended is cut off like any other. Longest lengths are the
source's (`gcore.config.data`). No penalty grows with length here, and nothing is known of how a loss is normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Literal

from gcore.config.data import SourceSampling
from gcore.config.rollout import RolloutSpec
from gcore.reward.api import RewardError, RewardResult
from gcore.types import LARGEST_REWARD, Group, Outcome, Prompt, Sample, VersionSpan


def align_prompts(prompt_ids: tuple[int, ...], samples: Sequence[Sample]) -> tuple[tuple[int, ...], tuple[Sample, ...]]:
    """The prompt that the samples of a group have in common, and the samples behind it. Raises RewardError if there is none.

    A group has one prompt, and each of its samples is what comes behind it. Agents ask in their own words, mostly in
    the same ones; then these are the prompt. Where they differ, what all begin with is, and the rest of each one's
    question stands in its sample as observed.
    """
    if all(sample.prompt_ids is None for sample in samples):
        return prompt_ids, tuple(samples)
    each = [prompt_ids if sample.prompt_ids is None else sample.prompt_ids for sample in samples]
    common: tuple[int, ...] = tuple(
        at_once[0] for at_once in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*each, strict=False))
    )
    if not common:
        raise RewardError(
            "the agents of one prompt begin with different tokens, so their samples have no prompt in common",
            where="agent",
            fix="Let the first message begin alike, or use a chat template, which does",
        )
    return common, tuple(_behind(sample, own[len(common) :]) for sample, own in zip(samples, each, strict=True))


def _behind(sample: Sample, rest: tuple[int, ...]) -> Sample:
    """The sample with the rest of its own question in front of it."""
    if not rest:
        return replace(sample, prompt_ids=None)
    more = len(rest)
    spans = tuple(VersionSpan(span.version, span.start + more, span.end + more) for span in sample.spans)
    first = replace(spans[0], start=0)
    observed = [(start + more, end + more) for start, end in sample.observed]
    if observed and observed[0][0] == more:
        observed[0] = (0, observed[0][1])
    else:
        observed.insert(0, (0, more))
    output = sample.output._replace(
        token_ids=rest + sample.token_ids,
        logprobs=(0.0,) * more + sample.logprobs,
        spans=(first, *spans[1:]),
        observed=tuple(observed),
    )
    return replace(sample, output=output, prompt_ids=None)


OVERLONG_PART = "overlong"
"""The reward part that holds what was taken off."""


def length_penalty(length: int, *, longest: int, cache: int, penalty: float) -> float:
    """What is added to the reward of a long response, 0 or less: DAPO's soft punishment (arXiv 2503.14476). Lengths in tokens.

    Within `cache` tokens of the longest length the penalty grows along a line, from nothing to `penalty`. It comes on
    top of what becomes of a response that was cut off. What counts is what the policy made: the words of a tool or an
    environment make nothing longer. The same formula over tensors, for whoever trains without the rest of gcore, is
    `gcore.train.algorithms.advantages.overlong_penalty`.
    """
    return min(-(length - (longest - cache)) / cache * penalty, 0.0)


def penalize_sample(sample: Sample, *, longest: int, cache: int | None, penalty: float) -> Sample:
    """A scored sample with its penalty; without a cache there is none. Raises RewardError if its reward is no float32."""
    if cache is None:
        return sample
    off = length_penalty(sample.own_tokens, longest=longest, cache=cache, penalty=penalty)
    if off == 0.0:
        return sample
    reward = sample.reward + off
    if abs(reward) > LARGEST_REWARD:
        raise RewardError(
            f"a reward of {sample.reward} less {-off} is not finite in float32", fix="Lower rollout.overlong_penalty"
        )
    return replace(sample, reward=reward, reward_parts=(*sample.reward_parts, (OVERLONG_PART, off)))


TruncationPolicy = Literal["keep", "mask", "penalise", "drop_group"]

TRUNCATED_PART = "truncated"
"""The reward part that holds what `penalise` took off."""


def is_truncated(sample: Sample) -> bool:
    """Whether the response was cut off."""
    return sample.finish_reason == "length"


def drop_truncated(samples: Sequence[Sample], policy: TruncationPolicy) -> Outcome | None:
    """The outcome of a group that is not to be trained, before anything is scored; None for all others."""
    cut_off = [sample for sample in samples if is_truncated(sample)]
    if policy == "drop_group" and cut_off:
        longest = max(len(sample.token_ids) for sample in cut_off)
        return Outcome("filtered", f"a response was cut off at {longest} tokens (rollout.max_new_tokens)")
    if policy == "mask" and len(cut_off) == len(samples):
        return Outcome("filtered", "every response was cut off (rollout.max_new_tokens), and none is left for the loss")
    return None


def treat_truncated(sample: Sample, policy: TruncationPolicy, penalty: float) -> Sample:
    """A scored sample as it is trained. Raises RewardError if its reward with the penalty is no float32."""
    if not is_truncated(sample) or policy in ("keep", "drop_group"):
        return sample
    if policy == "mask":
        return replace(sample, masked=True)
    reward = sample.reward - penalty
    if abs(reward) > LARGEST_REWARD:
        raise RewardError(
            f"a reward of {sample.reward} less {penalty} is not finite in float32",
            fix="Lower rollout.truncated_penalty",
        )
    return replace(sample, reward=reward, reward_parts=(*sample.reward_parts, (TRUNCATED_PART, -penalty)))


def make_scored_group(
    prompt: Prompt,
    samples: Sequence[Sample],
    results: Sequence[RewardResult],
    rollout: RolloutSpec,
    sampling: SourceSampling,
) -> Group:
    """The scored responses to a prompt as the group that is trained: rewards, what length takes off, what cut-off ones become.

    `results`: of the samples, in their order; `sampling`: the source's. Raises RewardError for no float32, and for responses
    that have no prompt in common. Pure, and the same for a controller's peer and for the peers in memory of `gcore.testing`.
    What is not to be scored at all is found before (`drop_truncated`).
    """
    scored = []
    for sample, result in zip(samples, results, strict=True):
        rewarded = replace(sample, reward=result.value, reward_parts=result.parts)
        long = penalize_sample(
            rewarded,
            longest=sampling.max_new_tokens,
            cache=rollout.overlong_tokens,
            penalty=rollout.overlong_penalty,
        )
        scored.append(treat_truncated(long, rollout.truncated, rollout.truncated_penalty))
    prompt_ids, behind = align_prompts(prompt.token_ids, scored)
    return Group(prompt.ref, prompt_ids, behind, prompt.source, sampling.temperature)
