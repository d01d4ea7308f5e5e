"""Evaluation: greedy answers to the held-out prompts, made by one peer for all.

The first peer in the version's order makes it; the others wait for its record and take over, one after the other, when it
does not come. It is written once for a version; what a second peer made meanwhile is thrown away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from controllers.changes import Changes
from controllers.engines import EngineBook
from controllers.material import Material
from controllers.step import Look
from controllers.turns import turn
from gcore.clock import Clock
from gcore.errors import EngineError
from gcore.ledger.job import EvalSample, Evaluation
from gcore.prompts.stream import make_prompt
from gcore.rollout.client import SamplingParams
from gcore.types import Prompt, PromptRef, Sample, Version

log = logging.getLogger(__name__)
T = TypeVar("T")

EVAL_BATCH = 64
"""Evaluation prompts in one request."""
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
            if not self._engines.ready(version):
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
        due_now = version.step in self.material.spec.eval_due and self.material.evaluation is not None
        return version if due_now and str(version) not in mirror.evaluations else None

    async def _evaluate(self, version: Version) -> Evaluation:
        dataset = self.material.evaluation
        assert dataset is not None
        spec = self.material.spec
        greedy = SamplingParams(
            temperature=0.0, top_p=1.0, top_k=None, max_new_tokens=spec.rollout.max_new_tokens, stop=spec.rollout.stop
        )
        count = min(len(dataset), spec.eval.limit)

        async def answer(first: int) -> list[EvalSample]:
            indexes = range(first, min(first + EVAL_BATCH, count))
            prompts = [
                make_prompt(dataset, self.material.renderer, index, PromptRef(0, 0, index), self.material.limit)
                for index in indexes
            ]
            rid = f"{self.material.uid}/eval/{version}/{first}/{self.look().me}"
            token_ids = [prompt.token_ids for prompt in prompts]
            samples = await self._engines.generate(version, token_ids, greedy, [0] * len(prompts), rid)
            return [self._judge(prompt, sample, version) for prompt, sample in zip(prompts, samples, strict=True)]

        batches = await all_or_none(answer(first) for first in range(0, count, EVAL_BATCH))
        answers = [answer for batch in batches for answer in batch]
        return Evaluation(
            version=version,
            accuracy=sum(a.reward for a in answers) / count,
            count=count,
            by=self.look().me,
            samples=tuple(answers[: spec.eval.show]),
        )

    def _judge(self, prompt: Prompt, sample: Sample, version: Version) -> EvalSample:
        """An evaluation answer and what it is worth. Raises EngineError if other weights had a part in it."""
        spec = self.material.spec
        if sample.oldest != version or sample.finish_reason == "abort":
            raise EngineError(
                f"an evaluation answer was made by {sample.oldest}, not {version}", fix="It is made again"
            )
        result = self.material.reward(sample.text, prompt.fields, spec.reward)
        expected = str(prompt.fields.get(spec.reward.answer, ""))
        return EvalSample(prompt=prompt.text, response=sample.text, answer=expected, reward=result.value)


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
