"""A job's data, opened once on each controller: its prompts, and for each source how responses are sampled and scored.

Opening the data reads the disk and may take long: `controllers.job.preparation` does it off the event loop and hands the result to
`make_job_data`. The order of a curriculum's prompts is in `controllers.flow.curriculum_orders`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gcore.config.data import ResolvedSource
from gcore.config.reward import RewardSpec
from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.stream import EvalPromptSource, JobPrompts, PromptStream
from gcore.errors import EngineError, EngineUnreachable
from gcore.reward.api import Response, RewardError, RewardResult, Scored
from gcore.reward.judges.judge import Judge
from gcore.reward.pool import FunctionScorer
from gcore.reward.scorer import ResponseNotJudged, Scorer, reward_functions
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT
from gcore.rollout.postprocess import is_truncated
from gcore.types import Prompt, PromptRef, Sample, Version


@dataclass(frozen=True)
class JobData:
    """A job's prompts, and how the prompts of each source are sampled and scored; opened once."""

    spec: JobSpec
    uid: str
    stream: PromptStream
    sources: Mapping[str, SourcePipeline]
    """How the prompts of training are answered and scored, by source."""
    evaluation: tuple[EvalPromptSource, ...]
    """Held-out prompts, in the order of the spec."""
    evaluated: Mapping[str, SourcePipeline]
    """How those are answered and scored, by set."""

    @property
    def is_held_back(self) -> bool:
        """Whether no prompt should be begun, because a judge has all the questions that it may have."""
        return any(pipeline.rewards.is_full for pipeline in self.sources.values())


def make_job_data(
    spec: JobSpec,
    uid: str,
    prompts: JobPrompts,
    scorer: FunctionScorer,
    judges: Mapping[str, Judge] = MappingProxyType({}),
) -> JobData:
    """Make a job's data of its opened prompts. `scorer` and `judges` know the rewards and the judges that the spec names."""
    rewards = Scorer(scorer, judges)
    trained = [opened.source for opened in prompts.stream.sources]
    held_out = [opened.source for opened in prompts.evaluation]
    return JobData(
        spec=spec,
        uid=uid,
        stream=prompts.stream,
        sources={s.name: SourcePipeline(s, sampling_of(spec, s), rewards) for s in trained},
        evaluation=prompts.evaluation,
        evaluated={s.name: SourcePipeline(s, sampling_of(spec, s), rewards) for s in held_out},
    )


@dataclass(frozen=True)
class SourcePipeline:
    """How a source's prompts are sampled, and how their responses are scored."""

    source: ResolvedSource
    params: SamplingParams
    rewards: Scorer

    async def scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
        """The rewards of the responses to one prompt, in their order.

        Raises RewardError if one has none, EngineError if its prompt is to be issued again because of that.
        """
        results = []
        for result in await self.each_scored(prompt, samples):
            if isinstance(result, ResponseNotJudged) and result.again:
                raise (EngineUnreachable if result.away else EngineError)(result.what, fix="It is issued again")
            if isinstance(result, RewardError):
                raise result
            results.append(result)
        return tuple(results)

    async def each_scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Scored, ...]:
        """The rewards as `scored` gives them, with an error in the place of each response that cannot be scored."""
        return await self.rewards.score(self.source.reward, prompt, [make_response(sample) for sample in samples])

    async def judge_early(self, prompt: Prompt, sample: Sample) -> None:
        """Have judges look at a response before the others of its group are finished."""
        await self.rewards.judge_early(self.source.reward, prompt, make_response(sample))

    def forget(self, prompt: Prompt) -> None:
        """No more of its responses are scored, until it is issued again: what judges could not judge is then asked again."""
        if self.has_judges:
            self.rewards.forget(self.source.reward, prompt)

    @property
    def has_judges(self) -> bool:
        """Whether any judge looks at its responses."""
        return bool(self.source.reward.judges)


def make_response(sample: Sample) -> Response:
    """A sample as rewards are shown it: its length is what the policy made."""
    of_environment = dict(sample.reward_parts).get(ENVIRONMENT)
    return Response(sample.text, sample.own_tokens, is_truncated(sample), of_environment)


def rewards_of(spec: JobSpec) -> dict[str, RewardSpec]:
    """Every function that scores for the job, once, under the name of the first source that wants it.

    Those of training first; a set of evaluation may have the name of one of them, and another reward.
    """
    found: dict[str, RewardSpec] = {}
    judges = {judge.name: judge for judge in spec.judges}
    for source in (*training_sources(spec), *eval_sources(spec)):
        for reward in reward_functions(source.reward, judges):
            if reward not in found.values():
                found[_free(source.name, found)] = reward
    return found


def _free(name: str, taken: Mapping[str, RewardSpec]) -> str:
    """A name like `name` that is not taken yet."""
    names = itertools.chain((name, f"{name} of eval"), (f"{name}, {number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def sampling_of(spec: JobSpec, source: ResolvedSource) -> SamplingParams:
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


def sample_seed(data: JobData, ref: PromptRef, index: int, reissue: int) -> int:
    """A sample's seed: a hash of (job's name and seed, prompt ref, sample index, re-issue), 63 bits.

    The name and the seed, not the uid: the same spec started anew draws the same samples.
    """
    return _seed(f"{data.spec.name}|{data.spec.seed}|{ref}|{index}|{reissue}")


def eval_seed(data: JobData, version: Version, name: str, index: int, number: int) -> int:
    """The seed of response `number` to prompt `index` of a set: a hash of these, the job's name and seed and the version.

    63 bits. Not of the uid, nor of who asks: the same spec started anew draws the same, as long as its weights are the same.
    """
    return _seed(f"{data.spec.name}|{data.spec.seed}|eval|{version}|{name}|{index}|{number}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
