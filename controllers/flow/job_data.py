"""A job's data on one controller: its prompts, and how responses are sampled and scored for each source.

Opening the data reads the disk and may take long: `controllers.job.preparation` does it in a thread and passes the
result to `make_job_data`. The order of a curriculum's prompts is in `controllers.flow.curriculum_orders`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from controllers.workers.job_media import JobMedia
from gcore.config.data import ResolvedSource
from gcore.config.reward import RewardSpec
from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.stream import EvalPromptSource, JobPrompts, PromptStream
from gcore.errors import DataError, EngineError, EngineUnreachable
from gcore.flows.filters import untrainable_reason
from gcore.ledger.records.cluster import patch_cost
from gcore.media.model_files import media_token_ids
from gcore.media.pictures import PictureError
from gcore.models.checks import read_config
from gcore.models.diffusion.requests import PictureRequests, why_untrainable
from gcore.reward.api import PictureFile, Response, RewardError, RewardResult, Scored
from gcore.reward.judges.judge import Judge
from gcore.reward.pool import FunctionScorer
from gcore.reward.scorer import ResponseNotJudged, Scorer, reward_functions
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT
from gcore.rollout.postprocess import is_truncated
from gcore.types import DenoisingTrajectory, Group, Medium, MediumKind, Prompt, PromptRef, Sample, Version


class PictureWork(NamedTuple):
    """Patches of a group's distinct pictures, and the tokens for which the language model costs the same. `step_tokens`: image
    tokens of a trained denoising step, of a policy that generates pictures."""

    patches: int = 0
    tokens: int = 0
    step_tokens: int = 0


@dataclass(frozen=True)
class JobData:
    """A job's prompts, and how the responses to each source's prompts are sampled and scored."""

    spec: JobSpec
    uid: str
    stream: PromptStream
    sources: Mapping[str, SourcePipeline]
    """The pipelines of the training sources, by source."""
    evaluation: tuple[EvalPromptSource, ...]
    """The held-out prompts, in the order of the spec."""
    evaluated: Mapping[str, SourcePipeline]
    """The pipelines of the evaluation sets, by set."""
    media_tokens: frozenset[int] = frozenset()
    """Token IDs that stand for media in the model."""
    pictures: PictureRequests | None = None
    """How pictures are requested; None: the policy writes texts."""

    @property
    def made_bytes(self) -> int:
        """Upper bound for the bytes of the blobs that are made for the responses to a prompt."""
        return self.spec.tool_picture_bytes if self.pictures is None else self.pictures.group_bytes

    def picture_work(self, group: Group) -> PictureWork:
        """The work for the pictures of a group: of the vision tower for the distinct ones of prompts and tools, forward and
        backward, or of a denoising network for a trained step."""
        if self.pictures is not None:
            return PictureWork(step_tokens=self.pictures.step_tokens)
        opened, _ = self.stream.found(group.ref)
        sizes = {one.sha256: one.shape[:2] for one in group.all_media if one.kind == "picture"}
        rule = opened.rule
        if rule is None or not sizes:
            return PictureWork()
        patches = sum(rule.patch_count(height, width) for height, width in sizes.values())
        # A backward pass costs twice as much as a forward pass, and a frozen tower has none.
        passes = 1 / 3 if "vision" in self.spec.train.freeze else 1.0
        return PictureWork(patches, math.ceil(patches * passes * patch_cost(rule.config)))

    def why_untrainable(self, group: Group) -> str | None:
        """Return why the train ranks could not train the group, which a flow returned; None if they can. A rank that finds
        other pictures than tokens for them ends its world."""
        if self.pictures is not None and (why := why_untrainable(group)) is not None:
            return why
        if (why := untrainable_reason(group, self.spec.train, self.media_tokens)) is not None:
            return why
        rule = self.stream.found(group.ref)[0].rule if self.media_tokens else None
        if rule is None:
            return None
        try:
            rule.runs(group.prompt_ids, _picture_sizes(group.media))
            for sample in group.samples:
                rule.runs(sample.token_ids, _picture_sizes(sample.media))
        except DataError as error:
            return f"the group's pictures are not those of its tokens: {error.what}"
        return None

    @property
    def is_held_back(self) -> bool:
        """Whether no further prompt should be started now, because a judge's queue is full."""
        return any(pipeline.rewards.is_full for pipeline in self.sources.values())


def _picture_sizes(media: Iterable[Medium]) -> list[tuple[int, int]]:
    """Height and width in pixels of the pictures among `media`."""
    return [(one.shape[0], one.shape[1]) for one in media if one.kind == "picture"]


def make_job_data(
    spec: JobSpec,
    uid: str,
    prompts: JobPrompts,
    scorer: FunctionScorer,
    judges: Mapping[str, Judge] = MappingProxyType({}),
    media: JobMedia | None = None,
) -> JobData:
    """Build a job's data from its opened prompts. `scorer`: runs the reward functions of the spec. `judges`: those of
    the spec by name. `media`: provides the pictures of prompts; None: they have none."""
    rewards = Scorer(scorer, judges)
    trained = [opened.source for opened in prompts.stream.sources]
    held_out = [opened.source for opened in prompts.evaluation]
    return JobData(
        spec=spec,
        uid=uid,
        stream=prompts.stream,
        sources={s.name: SourcePipeline(s, sampling_of(spec, s), rewards, media) for s in trained},
        evaluation=prompts.evaluation,
        evaluated={s.name: SourcePipeline(s, sampling_of(spec, s), rewards, media, evaluates=True) for s in held_out},
        media_tokens=frozenset(media_token_ids(read_config(Path(spec.model.path)))),
        pictures=PictureRequests.of(spec, Path(spec.model.path)),
    )


@dataclass(frozen=True)
class SourcePipeline:
    """How the responses to a source's prompts are sampled and scored."""

    source: ResolvedSource
    params: SamplingParams
    rewards: Scorer
    media: JobMedia | None = None
    """The pictures of prompts; None: they have none."""
    evaluates: bool = False
    """Whether responses are scored for an evaluation. It does not compare the responses of a group, whose standardised rewards
    have always the mean 0."""

    async def scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[RewardResult, ...]:
        """Score the responses to one prompt. Return their rewards in order.

        Raises RewardError if a response cannot be scored; EngineError if the prompt must be sampled again because of
        that.
        """
        results = []
        for result in await self.each_scored(prompt, samples):
            if isinstance(result, ResponseNotJudged) and result.again:
                raise (EngineUnreachable if result.away else EngineError)(
                    result.what, fix="The prompt is sampled again"
                )
            if isinstance(result, RewardError):
                raise result
            results.append(result)
        return tuple(results)

    async def each_scored(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Scored, ...]:
        """Score the responses to one prompt. The result has an error in the place of each response that cannot be
        scored, which are all if a picture of the prompt has changed or is damaged. Raises EngineError, also if a picture
        that a tool returned was lost."""
        async with contextlib.AsyncExitStack() as held:
            files: tuple[PictureFile, ...] = ()
            if self.media is not None and prompt.pictures:
                try:
                    files = await held.enter_async_context(self.media.files(prompt))
                except PictureError as error:
                    return (RewardError(error.what, where=error.where, fix=error.fix),) * len(samples)
            await held.enter_async_context(self._stored(samples))
            responses = [self._response(sample, files) for sample in samples]
            return await self.rewards.score(self.source.reward, prompt, responses, alone=self.evaluates)

    async def judge_early(self, prompt: Prompt, sample: Sample) -> None:
        """Send a finished response to the judges before the other responses of its group are finished; `scored` then
        uses their cached verdicts. Does nothing if a picture that a tool returned was lost, because `scored` says so."""
        with contextlib.suppress(EngineError):
            async with self._stored((sample,)):
                await self.rewards.judge_early(self.source.reward, prompt, self._response(sample))

    def _stored(self, samples: Sequence[Sample]) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep the pictures of responses in the store of this node: those of tools, and generated ones."""
        media = [medium for sample in samples for medium in sample.media if medium.kind in SEEN]
        return contextlib.nullcontext() if self.media is None or not media else self.media.stored(media)

    def _response(self, sample: Sample, files: Sequence[PictureFile] = ()) -> Response:
        if self.media is None or not sample.media:
            return make_response(sample, files)
        if isinstance(sample.output, DenoisingTrajectory):
            return make_response(sample, files, picture_file=self.media.generated_picture(sample.media))
        return make_response(sample, files, self.media.picture_files(sample.media))

    def forget(self, prompt: Prompt) -> None:
        """Forget failed judgements of responses to the prompt, so that they are requested again when the prompt is
        sampled again."""
        if self.has_judges:
            self.rewards.forget(self.source.reward, prompt)

    @property
    def has_judges(self) -> bool:
        """Whether a judge scores responses of this source."""
        return bool(self.source.reward.judges)


SEEN: Collection[MediumKind] = ("picture", "decoded")
"""Kinds of a response's media that rewards and judges see."""


def make_response(
    sample: Sample,
    files: Sequence[PictureFile] = (),
    tool_files: Sequence[PictureFile] = (),
    picture_file: PictureFile | None = None,
) -> Response:
    """Convert a sample to the form that reward functions get. Its length counts only the tokens that the policy
    generated; a picture has none. `files`: the pictures of its prompt. `tool_files`: those that tools returned.
    `picture_file`: the one that the policy generated."""
    of_environment = dict(sample.reward_parts).get(ENVIRONMENT)
    tokens = None if isinstance(sample.output, DenoisingTrajectory) else sample.own_tokens
    return Response(sample.text, tokens, is_truncated(sample), of_environment, files, tool_files, picture_file)


def rewards_of(spec: JobSpec) -> dict[str, RewardSpec]:
    """Every distinct reward function of the job, under the name of the first source that uses it.

    Training sources come first. An evaluation set may have the name of a training source and a different reward; it
    then gets a name of its own.
    """
    found: dict[str, RewardSpec] = {}
    judges = {judge.name: judge for judge in spec.judges}
    for source in (*training_sources(spec), *eval_sources(spec)):
        for reward in reward_functions(source.reward, judges):
            if reward not in found.values():
                found[_free(source.name, found)] = reward
    return found


def _free(name: str, taken: Mapping[str, RewardSpec]) -> str:
    """An unused name derived from `name`."""
    names = itertools.chain((name, f"{name} of eval"), (f"{name}, {number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken)


def sampling_of(spec: JobSpec, source: ResolvedSource) -> SamplingParams:
    """The sampling parameters for a source's prompts. Evaluation sets use the values of the spec's `eval`, with the
    stop tokens of training."""
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
    """The seed of sample `index` of a prompt in its attempt `reissue`: a 63-bit hash of these and the job's name and
    seed.

    It does not depend on the job's ID, so that a new job with the same spec samples the same.
    """
    return _seed(f"{data.spec.name}|{data.spec.seed}|{ref}|{index}|{reissue}")


def eval_seed(data: JobData, version: Version, name: str, index: int, number: int) -> int:
    """The seed of response `number` to prompt `index` of the evaluation set `name`: a 63-bit hash of these, the
    version, and the job's name and seed.

    It does not depend on the job's ID or the peer, so that a new job with the same spec and weights samples the same.
    """
    return _seed(f"{data.spec.name}|{data.spec.seed}|eval|{version}|{name}|{index}|{number}")


def picture_seed(data: JobData, name: str, index: int, number: int) -> int:
    """The seed of picture `number` for prompt `index` of the evaluation set `name`. Unlike `eval_seed` it does not depend on the
    version: pictures of different versions begin with the same noise, so that they can be compared."""
    return _seed(f"{data.spec.name}|{data.spec.seed}|eval|{name}|{index}|{number}")


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
