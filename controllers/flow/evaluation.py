"""Evaluation: answers to the held-out prompts, made by all peers together.

The prompts of a version's evaluation are cut into parts (`gcore.ledger.evaluation`). Every peer answers its own parts
(`controllers.rules.step`) on its engines, scores the answers as their set says, and writes each part to the ledger once. When all parts
are there, one peer composes the evaluation, and the parts are deleted. Answers are greedy, or sampled from a seed that follows from the
job, the version, the set, the prompt and the number of the response: the same, whichever peer samples them.

A response that its reward cannot score is not correct, counts as not scored, and is reported: as in training, it does not end the job.
Nothing is filtered here, and nothing decides when an evaluation is due (`gcore.config.spec`, or a person who asks: `controllers.api.jobs`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controllers.changes import ChangeSignal
from controllers.flow.episodes import EpisodeRequest, EpisodeRunner, EvalAnswer
from controllers.flow.job_data import JobData, SourcePipeline, eval_seed
from controllers.inference.pool import EnginePool
from controllers.rules.step import evaluation_order, members_with_engines, parts_to_take
from controllers.rules.view import TURN_SECONDS, JobView
from gcore.config.data import EvalSampling
from gcore.data.stream import EvalPromptSource
from gcore.errors import EngineError, EngineUnreachable
from gcore.ledger.evaluation import PartPlan, compose_evaluation, plan_parts, record_evaluation, record_part
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import EvalPart, EvalSample, Evaluation
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.reward.api import RewardError
from gcore.reward.scorer import ResponseNotJudged
from gcore.rollout.environments.episode import mark_observed
from gcore.system.clock import Clock, retry_delay
from gcore.system.concurrency import cancel_all, gather_or_cancel
from gcore.types import Prompt, Sample, Version, entry_text

log = logging.getLogger(__name__)

EVAL_BATCH = 64
"""Evaluation responses in one request."""

SHOWN_CHARACTERS = 1000

SHOWN_BYTES = 7200
"""Of a text in an evaluation's record, as JSON: fifty answers, the most there are, then fit into one write to the store."""


class LedgerEvaluations:
    """Writes parts and evaluations to the ledger: one guarded transaction each. The mirror shows what was written."""

    def __init__(self, ledger: TransactionExecutor, mirror: Callable[[], JobMirror]) -> None:
        self._ledger = ledger
        self._mirror = mirror

    async def write_part(self, part: EvalPart) -> bool:
        """Write a part. Whether it is in the ledger now, or is not needed any more; False if that is not known."""
        report = await self._ledger.run(record_part(self._mirror().keys, part))
        return report.outcome is not TxnOutcome.UNKNOWN

    async def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write the evaluation, if head still is the version that was evaluated."""
        mirror = self._mirror()
        if mirror.head is not None and mirror.head.record.version == evaluation.version:
            await self._ledger.run(record_evaluation(mirror.keys, mirror.head, evaluation))


@dataclass
class _Round:
    """One peer's progress with the evaluation of one version."""

    version: Version
    began: float
    complete_since: float | None = None
    heard: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How many parts each member has delivered, and when that last changed."""
    running: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    """Written down, whether the mirror shows it yet or not."""
    tries: dict[int, int] = field(default_factory=dict)
    not_before: dict[int, float] = field(default_factory=dict)

    def note(self, parts: Iterable[EvalPart], now: float) -> None:
        """Note which members have delivered what by `now`."""
        for name, count in Counter(part.by for part in parts).items():
            if self.heard.get(name, (0, now))[0] != count:
                self.heard[name] = (count, now)

    def quiet(self, members: Iterable[str], now: float) -> dict[str, float]:
        """Since when each of them has delivered nothing, in seconds."""
        return {name: now - self.heard.get(name, (0, self.began))[1] for name in members}


class Evaluator:
    """Makes one peer's part of a job's evaluations."""

    def __init__(
        self,
        data: JobData,
        look: Callable[[], JobView],
        changes: ChangeSignal,
        engines: EnginePool,
        ledger: LedgerEvaluations,
        clock: Clock,
        episodes: EpisodeRunner | None = None,
    ) -> None:
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
        """Until the version that is due, if any, is evaluated. Raises what a prompt that cannot be shown raises."""
        while (version := self._due_version()) is not None:
            await self._take_part(_Round(version, self._clock.monotonic()))

    def _due_version(self) -> Version | None:
        """Head's version, if it is to be evaluated and is not yet."""
        view = self.look()
        mirror = view.mirror
        if mirror.head is None or mirror.status is None or mirror.has_ended:
            return None
        version = mirror.head.record.version
        due_now = view.is_evaluated_after(version.step, last=view.is_over) and bool(self.plans)
        return version if due_now and str(version) not in mirror.evaluations else None

    async def _take_part(self, work: _Round) -> None:
        """Until the version is evaluated, or is head's no more."""
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
        """Start as many parts as the engines have room for. One at least, however large."""
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
        """Responses asked for at once: what my engines decode, and as many in their queues."""
        return 2 * self.data.spec.rollout.batch_slots * max(1, len(self.look().engines))

    def _responses(self, number: int) -> int:
        plan = self.plans[number]
        return len(plan.prompts) * self._sampling[plan.source].samples

    def _collect_ended(self, work: _Round, parts: Mapping[int, EvalPart], now: float) -> None:
        """Take note of what has ended. Raises what is neither an engine's nor a reward's failure."""
        for number, task in list(work.running.items()):
            if number in parts:
                task.cancel()  # another was faster; if it is done already, this does nothing
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
            except asyncio.CancelledError:  # nobody cancelled it, so at once it would end the same way
                log.warning("evaluation of %s, part %d: a task that it waited for was cancelled", work.version, number)
                stands = False
            if stands:
                work.delivered.add(number)
            else:
                tries = work.tries[number] = work.tries.get(number, 0) + 1
                work.not_before[number] = now + retry_delay(tries)

    async def _compose_in_turn(self, work: _Round, parts: Mapping[int, EvalPart], now: float) -> None:
        """Compose the evaluation, one peer after the other: all would write the same."""
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
        """Answer a part and write it down; whether it stands. Raises EngineError, DataError."""
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
        """The answers to some tries (prompt, number of the response) of one set, scored. Raises EngineError, DataError."""
        name, sampling = pipeline.source.name, self._sampling[pipeline.source.name]
        (first, number), me = tries[0], self.look().me
        rid = f"{self.data.uid}/eval/{version}/{name}/{first}.{number}/{me}"
        seeds = [eval_seed(self.data, version, name, *one) if sampling.temperature else 0 for one in tries]
        async with turns:  # a request that waits in an engine's queue would run into its time limit there
            prompts = {index: self._sets[name].prompt(index) for index in dict.fromkeys(index for index, _ in tries)}
            token_ids = [prompts[index].token_ids for index, _ in tries]
            samples: Sequence[EvalAnswer]
            if self._episodes is None:
                samples = await self._engines.generate(version, token_ids, pipeline.params, seeds, rid)
            else:
                renderer = self._sets[name].opened.renderer
                requests = [EpisodeRequest(version, prompts[index], renderer, pipeline.params) for index, _ in tries]
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


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """The score of a response to prompt `index` of a set, and what of it the record shows."""

    index: int
    shown: EvalSample
    parts: Mapping[str, float]
    """What each part of the reward says of it; nothing where it has none, or it could not be scored."""


async def score_answers(
    pipeline: SourcePipeline, threshold: float, prompt: Prompt, answered: Sequence[EvalAnswer], version: Version
) -> list[AnswerScore]:
    """The evaluation responses to one prompt, scored; one whose environment failed cannot be. Raises EngineError if other weights
    had a part in one, or a judge could not be asked."""
    samples = [one for one in answered if isinstance(one, Sample)]
    for sample in samples:
        if sample.oldest != version or sample.finish_reason == "abort":
            made_by = f"an evaluation answer was made by {sample.oldest}, not {version}"
            raise EngineError(made_by, fix="It is made again")
    scores = []
    labels = {part.shown_as for part in pipeline.source.reward.parts}
    scored = iter(await pipeline.each_scored(prompt, samples))
    for one in answered:
        text, result = (
            (mark_observed(one.text, one.observed_text), next(scored)) if isinstance(one, Sample) else ("", one)
        )
        if isinstance(result, ResponseNotJudged) and result.away:  # which says nothing of the answer
            raise EngineUnreachable(result.what, fix="It is made again")
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
        )
        parts = {} if isinstance(result, RewardError) else {k: v for k, v in result.parts if k in labels}
        scores.append(AnswerScore(prompt.ref.seq, shown, parts))
    return scores


def part_total(label: str, scores: Sequence[AnswerScore]) -> float:
    """What a part of the reward gives to all responses that were scored. Those that it says nothing of, for a judge that is only
    shown could not judge them, count as what the others have on the average."""
    having = [one.parts[label] for one in scores if label in one.parts]
    scored = sum(1 for one in scores if not one.shown.unscored)
    return math.fsum(having) * (scored / len(having)) if having else 0.0


def meets_threshold(reward: float, threshold: float) -> bool:
    """Whether a response of that reward is correct. A sum of parts such as 0.7 + 0.2 + 0.1, which floats make a little less
    than 1, is."""
    return reward >= threshold or math.isclose(reward, threshold, rel_tol=1e-6, abs_tol=1e-9)


def clip_for_record(text: str) -> str:
    """The beginning of `text` that a record has room for."""
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
    while len(json.dumps(short)) > SHOWN_BYTES:  # JSON spells out what is not ASCII, in up to twelve bytes
        short = f"{short[: len(short) // 2]}…"
    return short
