"""Responses that agents make: foreign code that asks the policy through OpenAI's API, each at an address of its own.

Each response is one agent in a process of its own (`gcore.rollout.agents.server`), which asks the endpoint of its job on this controller
(`gcore.rollout.agents.server`). A question goes to an engine as the tokens that are there so far, to the one that answered the last, which
has them in its cache. If that engine is lost, or serves other weights by then, another takes it from there. At staleness 0 all
answers are of one version; else each begins with the newest.

An agent that failed costs its prompt, or is tried again (`agent.on_error`), each time from another seed. An engine that failed
costs the whole try: the agent is ended, and the prompt is issued again. A production that is given up ends its agents' processes,
and their addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controllers.inference.continuation import derive_seed
from controllers.inference.pool import EnginePool
from controllers.inference.rules import Affinity, VersionFollower
from gcore.config.rollout import AgentSpec
from gcore.config.spec import JobSpec
from gcore.data.renderer import PromptRenderer
from gcore.errors import EngineError
from gcore.reward.api import RewardError
from gcore.rollout.agents.api import AgentFault, AgentRequestRefused
from gcore.rollout.agents.chat_protocol import SamplingRules
from gcore.rollout.agents.server import AgentHttpServer, AgentPool
from gcore.rollout.agents.session import AgentSession, DialogueLimits, Say
from gcore.rollout.client import SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT, CheckedEnvironment, EnvironmentFault, Setting, find_environment
from gcore.rollout.environments.episode import EpisodeLimits, EpisodeSetting, play_episode
from gcore.rollout.environments.pool import ToolPool
from gcore.system.clock import Clock
from gcore.system.concurrency import Pausable, gather_or_cancel
from gcore.types import Prompt, Sample, Version
from gcore.worker.sandbox.pool import PoolStatus

EvalAnswer = Sample | RewardError
"""A response; or why there is none, for its environment failed."""


# -------------------- conversing
# Responses of several turns: an environment for each, and its turns on one engine for as long as that serves.
#
# Each response goes its own way (`gcore.rollout.environments.episode`): its next turn is asked for as soon as its environment has answered,
# whatever the others of its group are at. A turn is a request of its own, with all that is before it as the prompt, tokens as they
# are; the engine that made the turn before has that in its cache. If that engine is lost, or serves other weights by then, another takes
# it from there. At staleness 0 all turns are of one version; else each begins with the newest.
#
# An environment that failed costs its prompt, or is tried again (`environment.on_error`), each time from another seed: it may
# be the model's words that it cannot take.

TRIES = 3
"""Of a response whose environment fails, with `on_error: retry`."""

Told = Callable[[str, str], None]
"""Of what failed, with the traceback of its own code, or nothing: for an event."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """What a response is made for, and how. `follow`: where some staleness is allowed."""

    version: Version
    prompt: Prompt
    renderer: PromptRenderer
    params: SamplingParams
    follow: VersionFollower | None = None


def new_tool_pool(spec: JobSpec, clock: Clock, told: Told, group: str) -> ToolPool | None:
    """The tools of a job with an environment, which may be none. `group`: the control group of their processes."""
    return None if spec.environment is None else ToolPool(spec.environment.tools, clock, told, group)


class EpisodeRunner(ABC):
    """Who makes responses of several turns, of one job, on one controller: with an environment, or by an agent."""

    def __init__(self, told: Told, *, again: bool) -> None:
        """`again`: whether one that failed is tried again."""
        self._told = told
        self._again = again

    async def side_by_side(
        self,
        request: EpisodeRequest,
        seeds: Sequence[int],
        rid: str,
        ended: Callable[[int, Sample], None] | None = None,
    ) -> tuple[Sample, ...]:
        """Responses to one prompt, one a seed. `ended` is told of each as soon as it is finished.

        Raises EngineError; RewardError if the environment of one failed.
        """

        async def one(number: int, seed: int) -> Sample:
            sample = await self._respond(request, seed, f"{rid}/{number}")
            if ended is not None:
                ended(number, sample)
            return sample

        return tuple(await gather_or_cancel(one(number, seed) for number, seed in enumerate(seeds)))

    async def each(self, conversations: Sequence[EpisodeRequest], seeds: Sequence[int], rid: str) -> list[EvalAnswer]:
        """A response for each; or, in its place, that its environment failed. Raises EngineError."""

        async def one(number: int, request: EpisodeRequest, seed: int) -> EvalAnswer:
            try:
                return await self._respond(request, seed, f"{rid}/{number}")
            except RewardError as error:
                return error

        pairs = zip(conversations, seeds, strict=True)
        return await gather_or_cancel(one(number, request, seed) for number, (request, seed) in enumerate(pairs))

    async def _respond(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        tries = TRIES if self._again else 1
        for number in range(tries):
            try:
                made = await self._played(request, derive_seed(seed, number), f"{rid}.{number}" if number else rid)
            except EnvironmentFault as error:
                if number + 1 == tries:
                    raise RewardError(error.what, where=error.where, fix=error.fix, trace=error.trace) from error
                self._told(str(error), error.trace)
                continue
            if made.finish_reason == "abort":
                raise EngineError(f"the engine gave up on prompt {request.prompt.ref}", fix="It is issued again")
            return made
        raise AssertionError("the last try raises")

    @abstractmethod
    async def _played(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        """One response. Raises EnvironmentFault, EngineError."""


class EnvironmentEpisodes(EpisodeRunner):
    """Of a job with an environment."""

    def __init__(self, spec: JobSpec, engines: EnginePool, tools: ToolPool, clock: Clock, told: Told) -> None:
        """Raises PluginFault for an environment that cannot be had."""
        assert spec.environment is not None
        super().__init__(told, again=spec.environment.on_error == "retry")
        self._spec = spec.environment
        self._maker = find_environment(self._spec.name)
        self._engines = engines
        self._tools = tools
        self._clock = clock

    async def _played(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        spec, params, renderer = self._spec, request.params, request.renderer
        hold = Pausable(self._clock)
        setting = Setting(spec.options, request.prompt.fields, seed, self._tools.within(hold.held), renderer.chat)
        environment = CheckedEnvironment(spec.name, self._maker, setting)
        stop = tuple(dict.fromkeys((*params.stop, *environment.stop)))
        seat, made = Affinity(), 0

        async def say(before: tuple[int, ...], most: int, turn: int) -> Sample:
            nonlocal made
            least = min(max(params.min_new_tokens - made, 0), most)
            (sample,) = await self._engines.generate(
                request.version,
                [request.prompt.token_ids + before],
                replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop),
                (derive_seed(seed, len(before)),) if params.temperature else (0,),
                f"{rid}/{turn}",
                request.follow,
                renderer.decode,
                seat=seat,
            )
            made += len(sample.token_ids)
            return sample

        longest = params.max_new_tokens
        limits = EpisodeLimits(spec.max_turns, longest, spec.room(longest), spec.step_timeout_s)
        episode = EpisodeSetting(request.prompt.token_ids, request.prompt.fields, renderer, limits, self._clock, hold)
        return await play_episode(environment, say, episode)


class AgentEndpoint:
    """Where the agents of a job run on one controller, and what they ask. Close it."""

    def __init__(self, spec: AgentSpec, clock: Clock, group: str = "") -> None:
        self.pool = AgentPool(spec, clock, group)
        self.endpoint = AgentHttpServer()

    @property
    def waits(self) -> PoolStatus:
        """Who waits for a process of an agent."""
        return self.pool.waits

    async def close(self) -> None:
        """No agent runs any more, and nothing is answered."""
        await self.pool.close()
        await self.endpoint.close()


EpisodePool = ToolPool | AgentEndpoint
"""What responses of several turns are made with, besides engines."""


def new_episode_pool(spec: JobSpec, clock: Clock, told: Told, group: str = "") -> EpisodePool | None:
    """Those of a job with an environment, or an agent; None for any other. `group`: the control group of their processes."""
    return new_tool_pool(spec, clock, told, group) if spec.agent is None else AgentEndpoint(spec.agent, clock, group)


def new_episode_runner(
    spec: JobSpec, engines: EnginePool, pool: EpisodePool | None, clock: Clock, told: Told
) -> EpisodeRunner | None:
    """Who makes the job's responses, if they have several turns. Raises PluginFault."""
    if isinstance(pool, AgentEndpoint):
        return AgentEpisodes(spec, engines, pool, clock, told)
    return None if pool is None else EnvironmentEpisodes(spec, engines, pool, clock, told)


class AgentEpisodes(EpisodeRunner):
    """Responses that foreign agent programs make."""

    def __init__(self, spec: JobSpec, engines: EnginePool, agents: AgentEndpoint, clock: Clock, told: Told) -> None:
        assert spec.agent is not None
        super().__init__(told, again=spec.agent.on_error == "retry")
        self._spec = spec.agent
        self._context = spec.model.max_length
        self._usual = spec.rollout
        self._engines = engines
        self._agents = agents
        self._clock = clock

    async def _played(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        """Raises AgentFault, EngineError."""
        spec, params, endpoint = self._spec, request.params, self._agents.endpoint
        longest = params.max_new_tokens
        context = self._context or request.renderer.max_length
        served = AgentSession(
            request.renderer,
            self._saying(request, seed, rid),
            self._rules(params),
            DialogueLimits(spec.max_turns, longest, spec.room(longest), context, spec.time_limit_s),
            self._clock,
            restarts=spec.history == "last",
            stop=params.stop,
            name=f"{seed:x}",
            refused=self._refused,
        )
        token = await endpoint.begin(served)
        try:
            return await self._acted(request, seed, served, token)
        finally:
            await endpoint.end(token)

    async def _acted(self, request: EpisodeRequest, seed: int, served: AgentSession, token: str) -> Sample:
        call = {
            "base_url": self._agents.endpoint.base_url(token),
            "api_key": token,
            "fields": request.prompt.fields,
            "options": self._spec.options,
            "seed": seed,
        }
        reward: float | None = None
        try:
            reward = await self._agents.pool.run(call, served.start, served.watch)
        except AgentFault as error:
            if served.failed is None and not served.cut:
                said = f"agent {self._spec.name!r} {error.what}"
                raise AgentFault(said, where=error.where, fix=error.fix, trace=error.trace) from error
        if served.failed is not None:
            failed = served.failed
            raise failed if isinstance(failed, EngineError) else EngineError(failed.what, fix=failed.fix)
        if not served.asked:
            raise AgentFault(
                f"agent {self._spec.name!r} never got an answer of the policy, so there is nothing to train",
                where="agent.name",
                fix="Let it ask rollout.base_url for a chat completion",
            )
        sample = served.sample()
        return sample if reward is None else replace(sample, reward_parts=((ENVIRONMENT, reward),))

    def _rules(self, params: SamplingParams) -> SamplingRules:
        """An agent that says what the job draws with is no less right where an evaluation, or a baseline, draws otherwise."""
        usual = self._usual
        return SamplingRules(
            (params.temperature, usual.temperature),
            (params.top_p, usual.top_p),
            params.max_new_tokens,
            frozenset(self._spec.ignore),
        )

    def _saying(self, request: EpisodeRequest, seed: int, rid: str) -> Say:
        seat, params, turn = Affinity(), request.params, 0

        async def say(tokens: tuple[int, ...], most: int, stop: tuple[str, ...], made: int) -> Sample:
            nonlocal turn
            turn += 1
            least = min(max(params.min_new_tokens - made, 0), most)
            (sample,) = await self._engines.generate(
                request.version,
                [tokens],
                replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop),
                (derive_seed(seed, made),) if params.temperature else (0,),
                f"{rid}/{turn}",
                request.follow,
                request.renderer.decode,
                seat=seat,
            )
            if sample.finish_reason == "abort":
                raise EngineError(f"the engine gave up on prompt {request.prompt.ref}", fix="It is issued again")
            return sample

        return say

    def _refused(self, why: AgentRequestRefused) -> None:
        if why.status < 500:
            self._told(
                f"agent {self._spec.name!r} asked what it does not get ({why.status} {why.code}): {why.what}", ""
            )
