"""Evaluation: greedy answers to the held-out prompts, made by one peer for all.

The first peer in the version's order makes it; the others wait for its record and take over, one after the other, when it
does not come. It is written once for a version; what a second peer made meanwhile is thrown away. Every source has its
own prompts, reward and longest response; the accuracy is the mean over all prompts, whichever source they are from. An
answer that its reward cannot score is worth 0, and the log says so: as in training, it does not end the job.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from controllers.changes import Changes
from controllers.engines import EngineBook
from controllers.material import Material, Practice
from controllers.step import Look
from controllers.turns import turn
from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.ledger.job import EvalSample, Evaluation, SourceScore
from gcore.prompts.source import EvalSource
from gcore.reward.registry import RewardError
from gcore.types import Prompt, Sample, Version

log = logging.getLogger(__name__)
T = TypeVar("T")

EVAL_BATCH = 64
"""Evaluation prompts in one request."""
SHOWN_CHARACTERS = 1000
"""Of a text in an evaluation's record: fifty answers, the most there are, then fit into one write to the store."""
EVAL_TAKEOVER_S = 20.0
"""An evaluation that its peer has not delivered by then is made by the next."""


class RecordEvaluation(Protocol):
    """Writes an evaluation down, unless someone has."""

    async def __call__(self, evaluation: Evaluation) -> None:
        """Returns when it was tried; the view tells what stands."""
        ...


class Evaluator:
    """One peer's part in a job's evaluations."""

    def __init__(
        self,
        material: Material,
        look: Look,
        changes: Changes,
        engines: EngineBook,
        record_evaluation: RecordEvaluation,
        clock: Clock,
    ) -> None:
        self.material = material
        self.look = look
        self.changes = changes
        self._engines = engines
        self._record_evaluation = record_evaluation
        self._clock = clock

    async def evaluate(self) -> None:
        """Greedy answers to the held-out prompts, once for a version that is due. The others wait for the first peer."""
        began = self._clock.monotonic()
        while (version := self._eval_missing()) is not None:
            view = self.look()
            place = turn(view.mirror.members, view.me, f"eval {version}")
            if self._clock.monotonic() - began < place * EVAL_TAKEOVER_S:
                await self.changes.wait(timeout=1.0)
                continue
            if not self._engines.serves(version):
                await self.changes.wait(timeout=1.0)
                continue
            try:
                await self._record_evaluation(await self._evaluate(version))
            except EngineError as error:
                log.warning("evaluation of %s: %s", version, error)
            await self.changes.wait(timeout=1.0)

    def _eval_missing(self) -> Version | None:
        """Head's version, if it is to be evaluated and is not yet."""
        mirror = self.look().mirror
        if mirror.head is None or mirror.status is None or mirror.status.record.phase.ended:
            return None
        version = mirror.head.record.version
        due_now = version.step in self.material.spec.eval_due and bool(self.material.evaluation)
        return version if due_now and str(version) not in mirror.evaluations else None

    async def _evaluate(self, version: Version) -> Evaluation:
        limit = self.material.spec.eval.limit
        parts = [
            (source, range(first, min(first + EVAL_BATCH, len(source), limit)))
            for source in self.material.evaluation
            for first in range(0, min(len(source), limit), EVAL_BATCH)
        ]
        answers = [one for part in await all_or_none(self._answer(version, *p) for p in parts) for one in part]
        by_source: dict[str, list[EvalSample]] = {}
        for answer in answers:
            by_source.setdefault(answer.source, []).append(answer)
        return Evaluation(
            version=version,
            accuracy=_mean_reward(answers),
            count=len(answers),
            by=self.look().me,
            samples=shown(list(by_source.values()), self.material.spec.eval.show),
            by_source={
                name: SourceScore(accuracy=_mean_reward(of_it), count=len(of_it)) for name, of_it in by_source.items()
            },
        )

    async def _answer(self, version: Version, source: EvalSource, indexes: range) -> list[EvalSample]:
        """The answers to some prompts of one source. Raises EngineError."""
        practice = self.material.evaluated[source.source.name]
        prompts = [source.prompt(index) for index in indexes]
        rid = f"{self.material.uid}/eval/{version}/{source.source.name}/{indexes.start}/{self.look().me}"
        token_ids = [prompt.token_ids for prompt in prompts]
        samples = await self._engines.generate(version, token_ids, practice.params, [0] * len(prompts), rid)
        pairs = zip(prompts, samples, strict=True)
        return await all_or_none(judged(practice, prompt, sample, version) for prompt, sample in pairs)


async def judged(practice: Practice, prompt: Prompt, sample: Sample, version: Version) -> EvalSample:
    """An evaluation answer and what it is worth. Raises EngineError if other weights had a part in it."""
    if sample.oldest != version or sample.finish_reason == "abort":
        raise EngineError(f"an evaluation answer was made by {sample.oldest}, not {version}", fix="It is made again")
    try:
        (result,) = await practice.scored(prompt, (sample,))
        reward = result.value
    except RewardError as error:
        log.warning("evaluation of %s, source %s, prompt %s: %s", version, practice.source.name, prompt.ref.seq, error)
        reward = 0.0
    expected = str(prompt.fields.get(practice.source.reward.answer, ""))
    return EvalSample(
        prompt=prompt.text,
        response=sample.text,
        answer=expected,
        reward=reward,
        source=practice.source.name,
    )


def shown(by_source: Sequence[Sequence[EvalSample]], count: int) -> tuple[EvalSample, ...]:
    """`count` answers to be shown, from every source in turn, with texts that a record has room for."""
    in_turn = [one for row in itertools.zip_longest(*by_source) for one in row if one is not None]
    return tuple(
        one.model_copy(update={name: _shortened(getattr(one, name)) for name in ("prompt", "response", "answer")})
        for one in in_turn[:count]
    )


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def _mean_reward(answers: Sequence[EvalSample]) -> float:
    return math.fsum(answer.reward for answer in answers) / len(answers)


async def all_or_none(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails, the others are cancelled, and have ended, before its error is raised.

    Left to themselves they would load the engines beside the next try, or wait for a version that nobody serves again.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
