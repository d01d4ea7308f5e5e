"""What a job is made of, opened once on each controller: prompts, and for each source how it is answered and scored.

Opening touches the disk and may take long: it is done off the event loop, and this module only says what comes of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gcore.config import JobSpec
from gcore.config.sources import Source
from gcore.errors import SpecError
from gcore.prompts.opening import JobPrompts
from gcore.prompts.source import EvalSource
from gcore.prompts.stream import PromptStream
from gcore.reward.registry import Reward, RewardResult, find_reward
from gcore.rollout.client import SamplingParams
from gcore.types import Prompt, PromptRef, Sample


@dataclass(frozen=True)
class Practice:
    """How a source's prompts are answered, and what the answers are worth."""

    source: Source
    params: SamplingParams
    reward: Reward

    def scored(self, prompt: Prompt, sample: Sample) -> RewardResult:
        """The reward of one response. Raises RewardError."""
        return self.reward(sample.text, prompt.fields, self.source.reward)


@dataclass(frozen=True)
class Material:
    """What a job is made of, opened once."""

    spec: JobSpec
    uid: str
    stream: PromptStream
    sources: Mapping[str, Practice]
    """How the prompts of training are answered and scored, by source."""
    evaluation: tuple[EvalSource, ...]
    """Held-out prompts, in the order of the spec."""
    evaluated: Mapping[str, Practice]
    """How those are answered (greedy) and scored, by source."""


def material_of(spec: JobSpec, uid: str, prompts: JobPrompts) -> Material:
    """Raises SpecError for a reward that cannot be had."""
    trained = [opened.source for opened in prompts.stream.sources]
    held_out = [opened.source for opened in prompts.evaluation]
    rewards = rewards_of((*trained, *held_out))
    return Material(
        spec=spec,
        uid=uid,
        stream=prompts.stream,
        sources={s.name: Practice(s, sampling_of(spec, s), rewards[s.reward.name]) for s in trained},
        evaluation=prompts.evaluation,
        evaluated={s.name: Practice(s, greedy_of(spec, s), rewards[s.reward.name]) for s in held_out},
    )


def rewards_of(sources: Iterable[Source]) -> dict[str, Reward]:
    """Every reward that the sources name, by name. Raises SpecError naming the source whose reward cannot be had."""
    found: dict[str, Reward] = {}
    for source in sources:
        if source.reward.name not in found:
            try:
                found[source.reward.name] = find_reward(source.reward.name)
            except SpecError as error:
                raise SpecError(error.what, where=f"{error.where} of source {source.name!r}", fix=error.fix) from error
    return found


def sampling_of(spec: JobSpec, source: Source) -> SamplingParams:
    """How responses to a source's prompts are drawn in training."""
    own = source.sampling
    return SamplingParams(
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=own.top_k,
        min_p=own.min_p,
        max_new_tokens=own.max_new_tokens,
        min_new_tokens=spec.rollout.min_new_tokens,
        stop=own.stop,
        stop_token_ids=spec.rollout.stop_token_ids,
    )


def greedy_of(spec: JobSpec, source: Source) -> SamplingParams:
    """How held-out prompts are answered: always the likeliest token, but as long, and ended by the same, as in training."""
    return SamplingParams(
        temperature=0.0,
        max_new_tokens=source.sampling.max_new_tokens,
        min_new_tokens=spec.rollout.min_new_tokens,
        stop=source.sampling.stop,
        stop_token_ids=spec.rollout.stop_token_ids,
    )


def sample_seed(material: Material, ref: PromptRef, index: int, reissue: int) -> int:
    """A sample's seed: a hash of (job's name and seed, prompt ref, sample index, re-issue), 63 bits.

    The name and the seed, not the uid: the same spec started anew draws the same samples.
    """
    text = f"{material.spec.name}|{material.spec.seed}|{ref}|{index}|{reissue}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
