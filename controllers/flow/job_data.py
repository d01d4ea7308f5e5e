"""The orders that a job's curriculum gives: worked out off the event loop, one shard and epoch after the other.

An epoch's order follows from its record in the store (`gcore.ledger.statistics`), so that it is the same on every peer;
epoch 0 needs none. Nothing of a shard is issued in an epoch whose order is not there yet. What is kept is four bytes for
each ref of a shard and epoch that is due here; orders that a rollback made void, of shards that went elsewhere and of
epochs that are over are dropped; not while groups of them are held or in flight here, whose prompts people may want to read.
Without a curriculum none of this is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gcore.config.data import ResolvedSource
from gcore.config.reward import RewardSpec
from gcore.config.spec import JobSpec, eval_sources, training_sources
from gcore.data.curriculum import (
    Curriculum,
    CurriculumView,
    SourceStatistics,
    arrange_shard,
    entry_key,
    find_curriculum,
    shard_keys,
)
from gcore.data.stream import EvalPromptSource, JobPrompts, PromptStream, ShardPermutation
from gcore.errors import EngineError, EngineUnreachable
from gcore.ledger.records.chain import EpochRecord, SourceTally
from gcore.reward.api import Response, RewardError, RewardResult, Scored
from gcore.reward.judges.judge import Judge
from gcore.reward.pool import FunctionScorer
from gcore.reward.scorer import ResponseNotJudged, Scorer, reward_functions
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT
from gcore.rollout.postprocess import is_truncated
from gcore.types import Prompt, PromptRef, Sample, Version

# -------------------- material
# What a job is made of, opened once on each controller: prompts, and for each source how it is answered and scored.
#
# Opening touches the disk and may take long: it is done off the event loop, and this module only says what comes of it.


@dataclass(frozen=True)
class SourcePipeline:
    """How a source's prompts are answered, and what the answers are worth."""

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
        """The same, with an error in the place of each response that cannot be scored."""
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


@dataclass(frozen=True)
class JobData:
    """What a job is made of, opened once."""

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
    """What the opened prompts are made into. `scorer` and `judges` know the rewards and the judges that the spec names."""
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
    """A name that none of them has yet."""
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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Arranged:
    version: Version | None
    """Of the record it follows from; None for epoch 0."""
    order: ShardPermutation | None
    """None: the usual one."""


class CurriculumOrders:
    """The orders of shards that curricula make. `notify` wakes who waits for an order."""

    def __init__(self, spec: JobSpec, stream: PromptStream, notify: Callable[[], None]) -> None:
        self._spec = spec
        self._stream = stream
        self._notify = notify
        name = spec.data.curriculum
        self._curriculum: Curriculum | None = find_curriculum(name) if name is not None else None
        self._arranged: dict[tuple[int, int], _Arranged] = {}
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self._defect: BaseException | None = None
        if self._curriculum is not None:
            stream.reorder = self.order

    @property
    def arranging(self) -> bool:
        """Whether an order is being worked out."""
        return self._work is not None

    def ready(
        self,
        refs: Iterable[PromptRef],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Iterable[PromptRef] = (),
    ) -> list[PromptRef]:
        """Those of `refs`, which are due of my shards `mine`, whose order is known; the others' are set about.

        `held`: refs that were issued here and are held or in flight, whatever shard they are of. Raises what a curriculum, or reading the data for it, raised.
        """
        due = list(refs)
        if self._curriculum is None:
            return due
        if self._defect is not None:
            raise self._defect
        wanted = list(dict.fromkeys((ref.data_epoch, ref.shard) for ref in due))
        self._forget(wanted, begun, mine, {(ref.data_epoch, ref.shard) for ref in held})
        known = {pair for pair in wanted if self._is_known(pair, begun)}
        if self._work is None and not self._closed:
            for epoch, shard in wanted:
                if (epoch, shard) not in known and (epoch == 0 or epoch in begun):
                    self._work = asyncio.create_task(self._arrange(epoch, shard, begun.get(epoch)), name="curriculum")
                    self._work.add_done_callback(self._done)
                    break
        return [ref for ref in due if (ref.data_epoch, ref.shard) in known]

    def order(self, data_epoch: int, shard: int) -> ShardPermutation | None:
        """For the stream. Raises RuntimeError if the order is not known: such a ref must not have been issued."""
        found = self._arranged.get((data_epoch, shard))
        if found is None:
            raise RuntimeError(f"the order of shard {shard} in epoch {data_epoch} was asked for before it was known")
        return found.order

    async def close(self) -> None:
        """Let what is being worked out end."""
        self._closed = True
        if self._work is not None:
            await asyncio.wait({self._work})

    def _is_known(self, pair: tuple[int, int], begun: Mapping[int, EpochRecord]) -> bool:
        found = self._arranged.get(pair)
        record = begun.get(pair[0])
        return found is not None and found.version == (record.version if record is not None else None)

    def _forget(
        self,
        wanted: Iterable[tuple[int, int]],
        begun: Mapping[int, EpochRecord],
        mine: Collection[int],
        held: Collection[tuple[int, int]],
    ) -> None:
        """Keep what is due or held, and what is newer: the window may reach into it again."""
        oldest: dict[int, int] = {}
        for epoch, shard in wanted:
            oldest[shard] = min(epoch, oldest.get(shard, epoch))
        for epoch, shard in list(self._arranged):
            # A shard of which nothing is due keeps what it has: the next step begins where this one ended.
            is_over = shard not in mine or epoch < oldest.get(shard, epoch)
            if (is_over and (epoch, shard) not in held) or not self._is_known((epoch, shard), begun):
                del self._arranged[epoch, shard]

    async def _arrange(self, epoch: int, shard: int, record: EpochRecord | None) -> None:
        found = await asyncio.to_thread(self._worked_out, epoch, shard, record)
        if found is not None:
            self._arranged[epoch, shard] = found

    def _done(self, task: asyncio.Task[None]) -> None:
        """What it raised is raised to whoever asks next: it must not end in silence."""
        self._work = None
        if not task.cancelled():
            self._defect = task.exception()
        self._notify()

    def _worked_out(self, epoch: int, shard: int, record: EpochRecord | None) -> _Arranged | None:
        """In a thread of its own. None if nobody wants it any more."""
        assert self._curriculum is not None
        version = record.version if record is not None else None
        key = self._curriculum(curriculum_view(self._spec, epoch, record))
        if key is None:
            return _Arranged(version, None)
        keys = shard_keys(self._stream, key, epoch, shard, stopped=lambda: self._closed)
        return None if keys is None else _Arranged(version, arrange_shard(self._spec.seed, epoch, shard, keys))


def curriculum_view(spec: JobSpec, epoch: int, record: EpochRecord | None) -> CurriculumView:
    """What a curriculum sees of an epoch; `record` None: nothing was committed before it."""
    names = tuple(source.name for source in training_sources(spec))
    so_far = record.so_far if record is not None else {}
    latest = record.latest if record is not None else {}
    return CurriculumView(
        seed=spec.seed,
        epoch=epoch,
        options=dict(spec.data.curriculum_options),
        sources=names,
        so_far={name: source_statistics(so_far.get(name, SourceTally())) for name in names},
        latest={name: source_statistics(latest.get(name, SourceTally())) for name in names},
    )


def source_statistics(tally: SourceTally) -> SourceStatistics:
    """A tally as means."""
    return SourceStatistics(
        kept=tally.kept,
        filtered=tally.filtered,
        failed=tally.failed,
        mean_reward=tally.reward / tally.kept if tally.kept else None,
        mean_length=tally.tokens / tally.samples if tally.samples else None,
        truncated=tally.truncated / tally.samples if tally.samples else None,
    )


def check_curriculum(spec: JobSpec, stream: PromptStream, sample: int) -> None:
    """Order some entries of epoch 0 as the job will, `sample` at most, spread over all. Raises SpecError, GcoreError."""
    if spec.data.curriculum is None:
        return
    key = find_curriculum(spec.data.curriculum)(curriculum_view(spec, 0, None))
    if key is None:
        return
    refs = sum(stream.shape.lengths)
    count = min(refs, sample)
    for number in range(count):
        place, shard = divmod(number * refs // count, len(stream.shape.lengths))
        entry_key(stream, key, 0, shard, place)
