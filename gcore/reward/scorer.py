"""Scores responses with function rewards and judges together.

Function rewards run in their own processes (`gcore.reward.pool`). Judges are models that answer over the network
(`gcore.reward.judges`). All parts of a reward run concurrently; `gcore.reward.api` combines their values. If a judge
fails on a response, the fallback reward in `on_error` scores it, if there is one. Otherwise the response is not scored,
and the error says whether to sample its prompt again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gcore.config.reward import Fallback, JudgeSpec, RewardSpec
from gcore.reward.api import (
    PartResults,
    Response,
    RewardError,
    RewardResult,
    Scored,
    blame_part,
    compose_group,
    is_display_only,
)
from gcore.reward.judges.judge import Judge, return_error
from gcore.reward.judges.types import JudgeAway, JudgeError, Unjudgeable
from gcore.reward.pool import FunctionScorer
from gcore.system.concurrency import gather_or_cancel
from gcore.types import Prompt


class ResponseNotJudged(RewardError):
    """A judge could not judge a response.

    `again`: the spec asks to sample the prompt again, and that may help. `away`: the judge was unreachable, so the
    error says nothing about the response.
    """

    def __init__(self, what: str, *, fix: str | None = None, trace: str = "", again: bool, away: bool) -> None:
        super().__init__(what, fix=fix, trace=trace)
        self.again = again
        self.away = away


@dataclass(frozen=True)
class Scorer:
    """Scores responses with all rewards of a job on one controller.

    `rules` scores with function rewards and must know all `reward_functions` of the job. `judges`: by name.
    """

    rules: FunctionScorer
    judges: Mapping[str, Judge]

    @property
    def is_full(self) -> bool:
        """Whether a judge's queue is full, so that further responses would only wait."""
        return any(judge.is_full for judge in self.judges.values())

    async def score(
        self, spec: RewardSpec, prompt: Prompt, responses: Sequence[Response], *, alone: bool = False
    ) -> tuple[Scored, ...]:
        """Score each of the responses to `prompt`, in order. `alone`: as of `compose_group`. Raises SpecError for a reward
        that cannot be loaded."""
        if not is_scored_by_part(spec):
            return await self.rules.score(spec, prompt.fields, responses)
        if spec.judge is not None:
            results = await self._judged(spec.judge, spec, prompt, responses)
            return tuple(_shown_as(spec.judge, result) for result in results)
        work = [self._part(number, spec, prompt, responses) for number in range(len(spec.parts))]
        by_part = await gather_or_cancel(work)
        return tuple(compose_group(spec, [_known(spec, one) for one in zip(*by_part, strict=True)], alone=alone))

    async def judge_early(self, spec: RewardSpec, prompt: Prompt, response: Response) -> None:
        """Judge one finished response before its group is complete, so that `score` finds its verdict in the cache.

        Skips judges that compare responses. Ignores errors of judges.
        """
        judges = [judge for name in spec.judges if (judge := self.judges[name]).spec.mode == "pointwise"]
        await gather_or_cancel([return_error(judge.value(prompt, response)) for judge in judges])

    def forget(self, spec: RewardSpec, prompt: Prompt) -> None:
        """Clear cached failures of the judges for a prompt, before it is sampled again."""
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


def is_scored_by_part(reward: RewardSpec) -> bool:
    """Whether the parts of a reward are scored apart and combined here, because of its judges, or because it is computed from
    the whole group."""
    return bool(reward.judges) or reward.compares_group


def reward_functions(reward: RewardSpec, judges: Mapping[str, JudgeSpec]) -> tuple[RewardSpec, ...]:
    """The function rewards of `reward`: itself, or its parts and the fallbacks of its judges."""
    if not is_scored_by_part(reward):
        return (reward,)
    parts = [reward.of_part(part) for part in reward.parts if part.judge is None]
    for name in reward.judges:
        on_error = judges[name].on_error
        if isinstance(on_error, Fallback):
            parts.append(fallback_reward(on_error, reward))
    return tuple(parts)


def fallback_reward(fallback: Fallback, reward: RewardSpec) -> RewardSpec:
    """The reward that replaces a failed judge of `reward`."""
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


def _known(spec: RewardSpec, results: Sequence[Scored]) -> PartResults | RewardError:
    """The results of a reward's parts for one response, or the first error of a part that counts."""
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
    return known
