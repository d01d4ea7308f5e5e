"""Responses of several turns: an environment for each, and its turns on one engine for as long as that serves.

Each response goes its own way (`gcore.environments.episode`): its next turn is asked for as soon as its environment has answered,
whatever the others of its group are at. A turn is a request of its own, with all that is before it as the prompt, tokens as they
are; the engine that made the turn before has that in its cache. If that engine is lost, or serves other weights by then, another takes
it from there. At staleness 0 all turns are of one version; else each begins with the newest.

An environment that failed costs its prompt, or is tried again (`environment.on_error`), each time from another seed: it may
be the model's words that it cannot take.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controllers.continuing import remade
from controllers.engines import EngineBook
from controllers.eval_marks import Answered
from controllers.routing import Following, Seat
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.environments.api import EnvironmentFault, Setting
from gcore.environments.episode import Limits, Scene, played
from gcore.environments.pool import ToolPool
from gcore.environments.registry import CheckedEnvironment, find_environment
from gcore.errors import EngineError
from gcore.prompts.render import PromptRenderer
from gcore.reward.registry import RewardError
from gcore.rollout.client import SamplingParams
from gcore.together import Hold, all_or_none
from gcore.types import Prompt, Sample, Version

TRIES = 3
"""Of a response whose environment fails, with `on_error: retry`."""
Told = Callable[[str, str], None]
"""Of what failed, with the traceback of its own code, or nothing: for an event."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a response is made for, and how. `follow`: where some staleness is allowed."""

    version: Version
    prompt: Prompt
    renderer: PromptRenderer
    params: SamplingParams
    follow: Following | None = None


def new_tools(spec: JobSpec, clock: Clock, told: Told, group: str) -> ToolPool | None:
    """The tools of a job with an environment, which may be none. `group`: the control group of their processes."""
    return None if spec.environment is None else ToolPool(spec.environment.tools, clock, told, group)


class Responding(ABC):
    """Who makes responses of several turns, of one job, on one controller: with an environment, or by an agent."""

    def __init__(self, told: Told, *, again: bool) -> None:
        """`again`: whether one that failed is tried again."""
        self._told = told
        self._again = again

    async def side_by_side(
        self,
        what: Conversation,
        seeds: Sequence[int],
        rid: str,
        ended: Callable[[int, Sample], None] | None = None,
    ) -> tuple[Sample, ...]:
        """Responses to one prompt, one a seed. `ended` is told of each as soon as it is finished.

        Raises EngineError; RewardError if the environment of one failed.
        """

        async def one(number: int, seed: int) -> Sample:
            sample = await self._respond(what, seed, f"{rid}/{number}")
            if ended is not None:
                ended(number, sample)
            return sample

        return tuple(await all_or_none(one(number, seed) for number, seed in enumerate(seeds)))

    async def each(self, conversations: Sequence[Conversation], seeds: Sequence[int], rid: str) -> list[Answered]:
        """A response for each; or, in its place, that its environment failed. Raises EngineError."""

        async def one(number: int, what: Conversation, seed: int) -> Answered:
            try:
                return await self._respond(what, seed, f"{rid}/{number}")
            except RewardError as error:
                return error

        pairs = zip(conversations, seeds, strict=True)
        return await all_or_none(one(number, what, seed) for number, (what, seed) in enumerate(pairs))

    async def _respond(self, what: Conversation, seed: int, rid: str) -> Sample:
        tries = TRIES if self._again else 1
        for number in range(tries):
            try:
                made = await self._played(what, remade(seed, number), f"{rid}.{number}" if number else rid)
            except EnvironmentFault as error:
                if number + 1 == tries:
                    raise RewardError(error.what, where=error.where, fix=error.fix, trace=error.trace) from error
                self._told(str(error), error.trace)
                continue
            if made.finish_reason == "abort":
                raise EngineError(f"the engine gave up on prompt {what.prompt.ref}", fix="It is issued again")
            return made
        raise AssertionError("the last try raises")

    @abstractmethod
    async def _played(self, what: Conversation, seed: int, rid: str) -> Sample:
        """One response. Raises EnvironmentFault, EngineError."""


class Conversing(Responding):
    """Of a job with an environment."""

    def __init__(self, spec: JobSpec, engines: EngineBook, tools: ToolPool, clock: Clock, told: Told) -> None:
        """Raises PluginFault for an environment that cannot be had."""
        assert spec.environment is not None
        super().__init__(told, again=spec.environment.on_error == "retry")
        self._spec = spec.environment
        self._maker = find_environment(self._spec.name)
        self._engines = engines
        self._tools = tools
        self._clock = clock

    async def _played(self, what: Conversation, seed: int, rid: str) -> Sample:
        spec, params, renderer = self._spec, what.params, what.renderer
        hold = Hold(self._clock)
        setting = Setting(spec.options, what.prompt.fields, seed, self._tools.within(hold.held), renderer.chat)
        environment = CheckedEnvironment(spec.name, self._maker, setting)
        stop = tuple(dict.fromkeys((*params.stop, *environment.stop)))
        seat, made = Seat(), 0

        async def say(before: tuple[int, ...], most: int, turn: int) -> Sample:
            nonlocal made
            least = min(max(params.min_new_tokens - made, 0), most)
            (sample,) = await self._engines.generate(
                what.version,
                [what.prompt.token_ids + before],
                replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop),
                (remade(seed, len(before)),) if params.temperature else (0,),
                f"{rid}/{turn}",
                what.follow,
                renderer.decode,
                seat=seat,
            )
            made += len(sample.token_ids)
            return sample

        longest = params.max_new_tokens
        limits = Limits(spec.max_turns, longest, spec.room(longest), spec.step_timeout_s)
        scene = Scene(what.prompt.token_ids, what.prompt.fields, renderer, limits, self._clock, hold)
        return await played(environment, say, scene)
