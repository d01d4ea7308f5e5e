"""The prompt that the samples of a group have in common, where an agent told the policy what it liked. Pure.

A group has one prompt, and each of its samples is what comes behind it. Agents ask in their own words, mostly in the same ones; then
these are the prompt. Where they differ, what all begin with is, and the rest of each one's question stands in its sample as observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from gcore.reward.registry import RewardError
from gcore.types import Sample, VersionSpan


def alike(prompt_ids: tuple[int, ...], samples: Sequence[Sample]) -> tuple[tuple[int, ...], tuple[Sample, ...]]:
    """The prompt's tokens, and the samples behind them. Raises RewardError if there is nothing that all begin with."""
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
    return replace(
        sample,
        token_ids=rest + sample.token_ids,
        logprobs=(0.0,) * more + sample.logprobs,
        spans=(first, *spans[1:]),
        observed=tuple(observed),
        prompt_ids=None,
    )
