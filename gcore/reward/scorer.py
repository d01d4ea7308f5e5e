"""Rewards of functions and of judges together: what a controller scores the responses to a prompt with.

Functions run in their own processes (`gcore.reward.pool`), judges are asked (`gcore.reward.judges`), all of them at the same time;
what the parts come to is said by `gcore.reward.api`. A response that a judge cannot judge is never worth nothing in silence:
another reward scores it, if the judge's `on_error` names one, else it cannot be scored, and the error says whether its prompt is
to be issued again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore.config.reward import Fallback, JudgeSpec, RewardSpec
from gcore.reward.api import Response, RewardError, RewardResult, Scored, blame_part, compose_reward, is_display_only
from gcore.reward.judges.judge import Judge, return_error
from gcore.reward.judges.types import JudgeAway, JudgeError, Unjudgeable
from gcore.reward.pool import FunctionScorer
from gcore.system.concurrency import gather_or_cancel
from gcore.types import Prompt


class ResponseNotJudged(RewardError):
    """A judge could not judge a response.

    `again`: the spec wants its prompt issued again, and that may help; `away`: the judge could not be asked, so that nothing is said of the response.
    """

    def __init__(self, what: str, *, fix: str | None = None, trace: str = "", again: bool, away: bool) -> None:
        super().__init__(what, fix=fix, trace=trace)
        self.again = again
        self.away = away


@dataclass(frozen=True)
class Scorer:
    """The rewards of a job on one controller. `rules` knows what `reward_functions` gives; `judges`: by their names."""

    rules: FunctionScorer
    judges: Mapping[str, Judge]

    @property
    def is_full(self) -> bool:
        """Whether some judge has as many questions as it may: whoever makes more responses now only makes them wait."""
        return any(judge.is_full for judge in self.judges.values())

    async def score(self, spec: RewardSpec, prompt: Prompt, responses: Sequence[Response]) -> tuple[Scored, ...]:
        """What each of the responses to `prompt` is worth, in their order. Raises SpecError for a reward that cannot be had."""
        if not spec.judges:
            return await self.rules.score(spec, prompt.fields, responses)
        if spec.judge is not None:
            results = await self._judged(spec.judge, spec, prompt, responses)
            return tuple(_shown_as(spec.judge, result) for result in results)
        work = [self._part(number, spec, prompt, responses) for number in range(len(spec.parts))]
        by_part = await gather_or_cancel(work)
        return tuple(_whole(spec, of_response) for of_response in zip(*by_part, strict=True))

    async def judge_early(self, spec: RewardSpec, prompt: Prompt, response: Response) -> None:
        """Have one response judged that is finished before the others of its group: its verdict is remembered.

        Judges that compare responses, and what fails, wait for the group.
        """
        judges = [judge for name in spec.judges if (judge := self.judges[name]).spec.mode == "pointwise"]
        await gather_or_cancel([return_error(judge.value(prompt, response)) for judge in judges])

    def forget(self, spec: RewardSpec, prompt: Prompt) -> None:
        """What judges could not judge of a prompt is asked again from now on: by whoever issues it again."""
        for name in spec.judges:
            self.judges[name].forget(prompt.ref)

    async def _part(
        self, number: int, spec: RewardSpec, prompt: Prompt, responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        part = spec.parts[number]
        if part.judge is not None:
            return await self._judged(part.judge, spec, prompt, responses)
        return await self.rules.score(spec.of_part(part), prompt.fields, responses)

    async def _judged(
        self, name: str, spec: RewardSpec, prompt: Prompt, responses: Sequence[Response]
    ) -> tuple[Scored, ...]:
        judge = self.judges[name]
        judgements = await judge.values(prompt, responses)
        on_error = judge.spec.on_error
        failed = [number for number, one in enumerate(judgements) if isinstance(one, JudgeError)]
        instead: dict[int, Scored] = {}
        if failed and isinstance(on_error, Fallback):
            scored = await self.rules.score(
                fallback_reward(on_error, spec), prompt.fields, [responses[number] for number in failed]
            )
            instead = dict(zip(failed, scored, strict=True))
        results: list[Scored] = []
        for number, one in enumerate(judgements):
            if isinstance(one, JudgeError):
                results.append(instead.get(number) or _unjudged(name, one, retry=on_error == "retry"))
            else:
                results.append(RewardResult(one.value))
        return tuple(results)


def reward_functions(reward: RewardSpec, judges: Mapping[str, JudgeSpec]) -> tuple[RewardSpec, ...]:
    """The rewards that are functions, of which `reward` is made: itself, or its parts and what scores instead of a judge."""
    if not reward.judges:
        return (reward,)
    parts = [reward.of_part(part) for part in reward.parts if part.judge is None]
    for name in reward.judges:
        on_error = judges[name].on_error
        if isinstance(on_error, Fallback):
            parts.append(fallback_reward(on_error, reward))
    return tuple(parts)


def fallback_reward(fallback: Fallback, reward: RewardSpec) -> RewardSpec:
    """What scores in place of a judge of `reward`."""
    return RewardSpec(
        name=fallback.fallback, options=fallback.options, answer=reward.answer, timeout_s=reward.timeout_s
    )


def _unjudged(name: str, error: JudgeError, *, retry: bool) -> ResponseNotJudged:
    return ResponseNotJudged(
        f"judge {name!r}: {error.what}",
        fix=error.fix,
        trace=error.trace,
        again=retry and not isinstance(error, Unjudgeable),
        away=isinstance(error, JudgeAway),
    )


def _shown_as(name: str, result: Scored) -> Scored:
    return result if isinstance(result, RewardError) else RewardResult(result.value, ((name, result.value),))


def _whole(spec: RewardSpec, results: Sequence[Scored]) -> Scored:
    """What one response is worth, from what its parts are."""
    known: list[RewardResult | None] = []
    for part, result in zip(spec.parts, results, strict=True):
        if isinstance(result, RewardError) and is_display_only(spec, part):
            known.append(None)
            continue
        if isinstance(result, ResponseNotJudged):
            return result
        if isinstance(result, RewardError):
            return blame_part(part, result)
        known.append(result)
    try:
        return compose_reward(spec, known)
    except RewardError as error:
        return error
