"""Evaluation: all peers together generate and score responses to held-out prompts.

The prompts of an evaluation of one weight version are divided into parts (`gcore.ledger.evaluation`). Every peer
evaluates its own parts (`controllers.rules.step`) on its engines, scores the responses as the evaluation set says, and
writes each part to the store once. When all parts are there, one peer composes the evaluation, and the parts are
deleted. Responses are greedy, or sampled with a seed derived from the job, the version, the set, the prompt and the
number of the response, so that they do not depend on the peer.

A response that its reward cannot score counts as incorrect and as unscored, and is reported; it does not end the job.
Nothing is filtered here. When an evaluation is due is decided elsewhere (by the schedule in the spec, or by a user's
request: `controllers.api.jobs`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controllers.changes import ChangeSignal
from controllers.flow.episodes import EpisodeRequest, EpisodeRunner, EvalAnswer
from controllers.flow.job_data import JobData, SourcePipeline, eval_seed, picture_seed
from controllers.inference.pool import EnginePool
from controllers.rules.step import evaluation_order, members_with_engines, parts_to_take
from controllers.rules.view import TURN_SECONDS, JobView
from controllers.workers.job_media import JobMedia
from gcore.config.data import EvalSampling
from gcore.data.stream import EvalPromptSource
from gcore.errors import EngineError, EngineUnreachable
from gcore.ledger.evaluation import PartPlan, compose_evaluation, plan_parts, record_evaluation, record_part
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import EvalPart, EvalSample, Evaluation, KeptPicture
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.media.pictures import PictureError
from gcore.reward.api import RewardError
from gcore.reward.scorer import ResponseNotJudged
from gcore.rollout.environments.episode import mark_observed
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import cancel_all, gather_or_cancel
from gcore.types import Prompt, Sample, Version, entry_text

log = logging.getLogger(__name__)

EVAL_BATCH = 64
"""Maximum number of responses per request to an engine."""

SHOWN_CHARACTERS = 1000
"""Maximum characters of a prompt, response or answer in an evaluation's record."""

SHOWN_BYTES = 7200
"""Maximum size of such a text as JSON, in bytes, so that the maximum of fifty responses fits into one write to the
store."""


class LedgerEvaluations:
    """Writes parts and evaluations to the job's records in the store, each in one transaction that fails if the record
    exists."""

    def __init__(self, ledger: TransactionExecutor, mirror: Callable[[], JobMirror]) -> None:
        self._ledger = ledger
        self._mirror = mirror

    async def write_part(self, part: EvalPart) -> bool:
        """Write a part. Return True if the store has it (from whichever peer) or it is no longer needed, False if that
        is unknown."""
        report = await self._ledger.run(record_part(self._mirror().keys, part))
        return report.outcome is not TxnOutcome.UNKNOWN

    async def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write the evaluation, unless head has moved to another version."""
        mirror = self._mirror()
        if mirror.head is not None and mirror.head.record.version == evaluation.version:
            await self._ledger.run(record_evaluation(mirror.keys, mirror.head, evaluation))


@dataclass
class _Round:
    """This peer's progress in the evaluation of one version. Times are monotonic seconds; parts are identified by
    number."""

    version: Version
    began: float
    complete_since: float | None = None
    """When this peer saw that all parts exist."""
    last_delivery: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By member: the number of parts that it has delivered, and when that number last changed."""
    running: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    """Parts that this peer has written, whether its mirror of the store shows them yet or not."""
    tries: dict[int, int] = field(default_factory=dict)
    """Number of failed attempts of a part."""
    not_before: dict[int, float] = field(default_factory=dict)
    """Earliest time of the next attempt of a part."""

    def note(self, parts: Iterable[EvalPart], now: float) -> None:
        """Record how many parts each member has delivered by the time `now`."""
        for name, count in Counter(part.by for part in parts).items():
            if self.last_delivery.get(name, (0, now))[0] != count:
                self.last_delivery[name] = (count, now)

    def quiet(self, members: Iterable[str], now: float) -> dict[str, float]:
        """Seconds since each member last delivered a part."""
        return {name: now - self.last_delivery.get(name, (0, self.began))[1] for name in members}


class Evaluator:
    """Evaluates this peer's share of a job's evaluations. `look`: returns the present view of the job."""

    def __init__(
        self,
        data: JobData,
        look: Callable[[], JobView],
        changes: ChangeSignal,
        engines: EnginePool,
        ledger: LedgerEvaluations,
        clock: Clock,
        episodes: EpisodeRunner | None = None,
        media: JobMedia | None = None,
    ) -> None:
        """`media`: provides the pictures of prompts; None: they have none."""
        self._media = media
        self.data = data
        self.look = look
        self.changes = changes
        self._engines = engines
        self._ledger = ledger
        self._clock = clock
        self._episodes = episodes
        self._sets: dict[str, EvalPromptSource] = {one.source.name: one for one in data.evaluation}
        self._sampling: Mapping[str, EvalSampling] = data.spec.eval.drawn
        sizes = [
            (n, min(len(one), self._sampling[n].limit), self._sampling[n].samples) for n, one in self._sets.items()
        ]
        self.plans = plan_parts(sizes)

    async def evaluate(self) -> None:
        """Take part in the evaluation that is due, and return when its result is recorded; at once if none is due.
        Raises the error of a prompt that cannot be rendered."""
        while (version := self._due_version()) is not None:
            await self._take_part(_Round(version, self._clock.monotonic()))

    def _due_version(self) -> Version | None:
        """The newest version, if its evaluation is due and not recorded yet."""
        view = self.look()
        mirror = view.mirror
        if mirror.head is None or mirror.status is None or mirror.has_ended:
            return None
        version = mirror.head.record.version
        due_now = view.is_evaluated_after(version.step, last=view.is_over) and bool(self.plans)
        return version if due_now and str(version) not in mirror.evaluations else None

    async def _take_part(self, work: _Round) -> None:
        """Evaluate parts until the evaluation is recorded or head has moved on."""
        try:
            while self._due_version() == work.version:
                now = self._clock.monotonic()
                parts = self.look().mirror.eval_parts_of(work.version)
                work.note(parts.values(), now)
                self._collect_ended(work, parts, now)
                if len(parts) == len(self.plans):
                    await self._compose_in_turn(work, parts, now)
                elif self._engines.serves(work.version):
                    self._start_parts(work, parts, now)
                await self.changes.wait(timeout=1.0)
        finally:
            await cancel_all(work.running.values())

    def _start_parts(self, work: _Round, parts: Mapping[int, EvalPart], now: float) -> None:
        """Start to evaluate parts that are this peer's turn, as many as the engines have room for, at least one."""
        view = self.look()
        away = parts.keys() | work.delivered | work.running.keys()
        open_parts = [plan.number for plan in self.plans if plan.number not in away]
        plan = view.mirror.plan.record if view.mirror.plan is not None else None
        members = evaluation_order(work.version, members_with_engines(view.mirror.members, plan))
        room = self._room() - sum(self._responses(number) for number in work.running)
        for number in parts_to_take(view.me, open_parts, members, work.quiet(members, now)):
            if now < work.not_before.get(number, now):
                continue
            if work.running and self._responses(number) > room:
                return
            room -= self._responses(number)
            task = asyncio.create_task(self._deliver(work.version, self.plans[number]), name=f"evaluation {number}")
            task.add_done_callback(lambda _: self.changes.notify())
            work.running[number] = task

    def _room(self) -> int:
        """Maximum number of concurrent responses: as many as this peer's engines decode at once, and as many again in
        their queues."""
        return 2 * self.data.spec.rollout.batch_slots * max(1, len(self.look().engines))

    def _responses(self, number: int) -> int:
        plan = self.plans[number]
        return len(plan.prompts) * self._sampling[plan.source].samples

    def _collect_ended(self, work: _Round, parts: Mapping[int, EvalPart], now: float) -> None:
        """Take note of tasks that have ended, and cancel those whose part another peer has written. A part whose engine
        failed is retried later. Raises other exceptions of a task."""
        for number, task in list(work.running.items()):
            if number in parts:
                task.cancel()  # another peer was faster; no effect if the task is done
            if not task.done():
                continue
            del work.running[number]
            if task.cancelled() and task.cancelling():
                continue
            try:
                stands = task.result()
            except EngineError as error:
                log.warning("evaluation of %s, part %d: %s", work.version, number, error)
                stands = False
            except asyncio.CancelledError:  # the cancellation belongs to an inner task; retry later
                log.warning("evaluation of %s, part %d: an inner task was cancelled", work.version, number)
                stands = False
            if stands:
                work.delivered.add(number)
            else:
                tries = work.tries[number] = work.tries.get(number, 0) + 1
                work.not_before[number] = now + retry_delay(tries)

    async def _compose_in_turn(self, work: _Round, parts: Mapping[int, EvalPart], now: float) -> None:
        """Compose and write the evaluation from its parts, after a delay by turn order, because every peer would write
        the same."""
        view = self.look()
        members = evaluation_order(work.version, view.mirror.members)
        place = members.index(view.me) if view.me in members else len(members)
        work.complete_since = now if work.complete_since is None else work.complete_since
        if now - work.complete_since >= place * TURN_SECONDS:
            evaluation = compose_evaluation(work.version, self.plans, parts, self._sampling, self.data.spec.eval.show)
            if not self.data.spec.evaluates_after(work.version.step, last=view.is_over):
                evaluation = evaluation.model_copy(update={"asked": True})
            await self._ledger.write_evaluation(evaluation)

    async def _deliver(self, version: Version, plan: PartPlan) -> bool:
        """Evaluate a part and write it. Return whether it is written. Raises EngineError, DataError."""
        return await self._ledger.write_part(await self._answer_part(version, plan))

    async def _answer_part(self, version: Version, plan: PartPlan) -> EvalPart:
        sampling, pipeline = self._sampling[plan.source], self.data.evaluated[plan.source]
        tries = [(index, number) for index in plan.prompts for number in range(sampling.samples)]
        batches = [tries[first : first + EVAL_BATCH] for first in range(0, len(tries), EVAL_BATCH)]
        turns = asyncio.Semaphore(max(1, self._room() // EVAL_BATCH))
        answered = await gather_or_cancel(self._answer_batch(turns, version, pipeline, batch) for batch in batches)
        scores = list(itertools.chain.from_iterable(answered))
        unscored = [one for one in scores if one.shown.unscored]
        if unscored:
            log.warning(
                "evaluation of %s, set %s: %d of %d responses could not be scored; the first, to prompt %d: %s",
                version,
                plan.source,
                len(unscored),
                len(scores),
                unscored[0].index,
                unscored[0].shown.unscored,
            )
        firsts = [one.shown for one in scores[:: sampling.samples] if one.index < self.data.spec.eval.show]
        by_prompt = [scores[at : at + sampling.samples] for at in range(0, len(scores), sampling.samples)]
        return EvalPart(
            version=version,
            number=plan.number,
            parts=plan.parts,
            source=plan.source,
            first=plan.first,
            samples=sampling.samples,
            correct=tuple(sum(bool(one.shown.correct) for one in answers) for answers in by_prompt),
            reward=math.fsum(one.shown.reward for one in scores if not one.shown.unscored),
            rewards={
                label: part_total(label, scores) for label in sorted({label for one in scores for label in one.parts})
            },
            unscored=len(unscored),
            why_unscored=unscored[0].shown.unscored if unscored else "",
            shown=tuple(firsts),
            by=self.look().me,
        )

    async def _answer_batch(
        self,
        turns: asyncio.Semaphore,
        version: Version,
        pipeline: SourcePipeline,
        tries: Sequence[tuple[int, int]],
    ) -> list[AnswerScore]:
        """Generate and score responses for pairs (index of a prompt in the set, number of the response). `turns`:
        limits the concurrent requests. Raises EngineError, DataError."""
        name, sampling = pipeline.source.name, self._sampling[pipeline.source.name]
        (first, number), me = tries[0], self.look().me
        rid = f"{self.data.uid}/eval/{version}/{name}/{first}.{number}/{me}"
        if self.data.pictures is not None:
            seeds = [picture_seed(self.data, name, *one) for one in tries]
        else:
            seeds = [eval_seed(self.data, version, name, *one) if sampling.temperature else 0 for one in tries]
        async with turns:  # limits the wait in an engine's queue, which counts towards the request's timeout
            prompts = {index: self._sets[name].prompt(index) for index in dict.fromkeys(index for index, _ in tries)}
            token_ids = [prompts[index].token_ids for index, _ in tries]
            samples: Sequence[EvalAnswer]
            if self._episodes is None:
                if self._media is not None:
                    samples = await self._with_pictures(
                        version, [prompts[index] for index, _ in tries], pipeline, seeds, rid
                    )
                else:
                    samples = await self._engines.generate(version, token_ids, pipeline.params, seeds, rid)
            else:
                opened = self._sets[name].opened
                requests = [EpisodeRequest(version, prompts[index], opened, pipeline.params) for index, _ in tries]
                samples = await self._episodes.each(requests, seeds, rid)
        of_prompt: dict[int, list[EvalAnswer]] = {}
        for (index, _), sample in zip(tries, samples, strict=True):
            of_prompt.setdefault(index, []).append(sample)
        judgements = (
            score_answers(pipeline, sampling.threshold, prompts[index], answers, version)
            for index, answers in of_prompt.items()
        )
        try:
            return list(itertools.chain.from_iterable(await gather_or_cancel(judgements)))
        finally:
            for prompt in prompts.values():
                pipeline.forget(prompt)

    async def _with_pictures(
        self, version: Version, prompts: Sequence[Prompt], pipeline: SourcePipeline, seeds: Sequence[int], rid: str
    ) -> Sequence[EvalAnswer]:
        """Generate one response to each prompt, in one request for each, because requests name their pictures. A prompt
        whose picture has changed or is damaged gets an error in place of a response."""
        media = self._media
        assert media is not None

        async def one(prompt: Prompt, seed: int, number: int) -> EvalAnswer:
            params, ids = pipeline.params, prompt.token_ids
            if self.data.pictures is not None:
                params = replace(params, denoising=self.data.pictures.evaluation(prompt.text))
            elif prompt.pictures:
                try:
                    pictures = await media.in_request(prompt, trained=False)
                except PictureError as error:
                    return RewardError(error.what, where=error.where, fix=error.fix)
                params, ids = replace(params, pictures=pictures), prompt.request_ids
            (made,) = await self._engines.generate(version, [ids], params, [seed], f"{rid}.{number}")
            return made

        asked = [one(prompt, seed, i) for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))]
        return await gather_or_cancel(asked)


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """The score of a response to prompt `index` of a set. `shown`: the response in the form for the record, with its
    reward."""

    index: int
    shown: EvalSample
    parts: Mapping[str, float]
    """The value of each reward part; empty if the response was not scored."""


async def score_answers(
    pipeline: SourcePipeline, threshold: float, prompt: Prompt, answered: Sequence[EvalAnswer], version: Version
) -> list[AnswerScore]:
    """Score the evaluation responses to one prompt. `threshold`: reward from which a response is correct. A response
    whose environment or reward failed is unscored. Raises EngineError, so that the responses are requested again, if
    other weights generated a part of one, or a judge was unreachable."""
    samples = [one for one in answered if isinstance(one, Sample)]
    for sample in samples:
        if sample.oldest != version or sample.finish_reason == "abort":
            made_by = f"an evaluation response was generated with weights {sample.oldest}, not {version}"
            raise EngineError(made_by, fix="The response is requested again")
    scores = []
    labels = {part.shown_as for part in pipeline.source.reward.parts}
    scored = iter(await pipeline.each_scored(prompt, samples))
    for one in answered:
        text, result = (
            (mark_observed(one.text, one.observed_text), next(scored)) if isinstance(one, Sample) else ("", one)
        )
        if isinstance(result, ResponseNotJudged) and result.away:  # this says nothing about the response
            raise EngineUnreachable(result.what, fix="The response is requested again")
        why = str(result) if isinstance(result, RewardError) else ""
        reward = 0.0 if isinstance(result, RewardError) else result.value
        shown = EvalSample(
            prompt=clip_for_record(prompt.text),
            response=clip_for_record(text),
            answer=clip_for_record(entry_text(prompt.fields, pipeline.source.reward.answer)),
            reward=reward,
            source=pipeline.source.name,
            correct=not why and meets_threshold(reward, threshold),
            unscored=clip_for_record(why),
            picture=next(iter(KeptPicture.of(one.media, "decoded")), None) if isinstance(one, Sample) else None,
        )
        parts = {} if isinstance(result, RewardError) else {k: v for k, v in result.parts if k in labels}
        scores.append(AnswerScore(prompt.ref.seq, shown, parts))
    return scores


def part_total(label: str, scores: Sequence[AnswerScore]) -> float:
    """The sum of the reward part `label` over all scored responses. A response without this part (a judge with weight 0
    could not judge it) counts with the mean of the others."""
    having = [one.parts[label] for one in scores if label in one.parts]
    scored = sum(1 for one in scores if not one.shown.unscored)
    return math.fsum(having) * (scored / len(having)) if having else 0.0


def meets_threshold(reward: float, threshold: float) -> bool:
    """Whether a response with this reward is correct. Tolerates rounding: 0.7 + 0.2 + 0.1 is slightly below 1 in
    floating point."""
    return reward >= threshold or math.isclose(reward, threshold, rel_tol=1e-6, abs_tol=1e-9)


def clip_for_record(text: str) -> str:
    """The beginning of `text`, within `SHOWN_CHARACTERS` and `SHOWN_BYTES`."""
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
    while len(json.dumps(short)) > SHOWN_BYTES:  # JSON escapes a non-ASCII character in up to twelve bytes
        short = f"{short[: len(short) // 2]}…"
    return short
