"""What a job is made of, opened once on each controller: prompts, and for each source how it is answered and scored.

Opening touches the disk and may take long: it is done off the event loop, and this module only says what comes of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gcore.config import JobSpec
from gcore.config.sources import Source
from gcore.config.spec import RewardSpec
from gcore.prompts.opening import JobPrompts
from gcore.prompts.source import EvalSource
from gcore.prompts.stream import PromptStream
from gcore.reward.registry import Response, RewardError, RewardResult
from gcore.reward.scoring import Scored, Scorer
from gcore.rollout.client import SamplingParams
from gcore.rollout.truncated import is_truncated
from gcore.types import Prompt, PromptRef, Sample, Version


@dataclass(frozen=True)
class Practice:
    """How a source's prompts are answered, and what the answers are worth."""

    source: Source
    params: SamplingParams
    scorer: Scorer

    async def scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
        """The rewards of the responses to one prompt, in their order. Raises RewardError if one has none."""
        results = []
        for result in await self.each_scored(prompt, samples):
            if isinstance(result, RewardError):
                raise result
            results.append(result)
        return tuple(results)

    async def each_scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Scored, ...]:
        """The same, with an error in the place of each response that cannot be scored."""
        responses = [Response(sample.text, len(sample.token_ids), is_truncated(sample)) for sample in samples]
        return await self.scorer.score(self.source.reward, prompt.fields, responses)


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
    """How those are answered and scored, by set."""


def material_of(spec: JobSpec, uid: str, prompts: JobPrompts, scorer: Scorer) -> Material:
    """What the opened prompts are made into. `scorer` knows the rewards that the spec names."""
    trained = [opened.source for opened in prompts.stream.sources]
    held_out = [opened.source for opened in prompts.evaluation]
    return Material(
        spec=spec,
        uid=uid,
        stream=prompts.stream,
        sources={s.name: Practice(s, sampling_of(spec, s), scorer) for s in trained},
        evaluation=prompts.evaluation,
        evaluated={s.name: Practice(s, sampling_of(spec, s), scorer) for s in held_out},
    )


def rewards_of(sources: Iterable[Source]) -> dict[str, RewardSpec]:
    """Every reward that the sources want, once, under the name of the first that wants it.

    `sources`: those of training first; a set of evaluation may have the name of one of them, and another reward.
    """
    found: dict[str, RewardSpec] = {}
    for source in sources:
        if source.reward not in found.values():
            found[f"{source.name} of eval" if source.name in found else source.name] = source.reward
    return found


def sampling_of(spec: JobSpec, source: Source) -> SamplingParams:
    """How responses to a source's prompts are drawn; of a set of evaluation, as `eval` says, and ended as in training."""
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


def sample_seed(material: Material, ref: PromptRef, index: int, reissue: int) -> int:
    """A sample's seed: a hash of (job's name and seed, prompt ref, sample index, re-issue), 63 bits.

    The name and the seed, not the uid: the same spec started anew draws the same samples.
    """
    return _seed(f"{material.spec.name}|{material.spec.seed}|{ref}|{index}|{reissue}")


def eval_seed(material: Material, version: Version, name: str, index: int, number: int) -> int:
    """The seed of response `number` to prompt `index` of a set: a hash of these, the job's name and seed and the version.

    63 bits. Not of the uid, nor of who asks: the same spec started anew draws the same, as long as its weights are the same.
    """
    return _seed(f"{material.spec.name}|{material.spec.seed}|eval|{version}|{name}|{index}|{number}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
