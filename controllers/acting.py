"""Responses that agents make: foreign code that asks the policy through OpenAI's API, each at an address of its own.

Each response is one agent in a process of its own (`gcore.agents.pool`), which asks the endpoint of its job on this controller
(`gcore.agents.endpoint`). A question goes to an engine as the tokens that are there so far, to the one that answered the last, which
has them in its cache. If that engine is lost, or serves other weights by then, another takes it from there. At staleness 0 all
answers are of one version; else each begins with the newest.

An agent that failed costs its prompt, or is tried again (`agent.on_error`), each time from another seed. An engine that failed
costs the whole try: the agent is ended, and the prompt is issued again. A production that is given up ends its agents' processes,
and their addresses.
"""

from __future__ import annotations

from dataclasses import replace

from controllers.continuing import remade
from controllers.conversing import Conversation, Conversing, Responding, Told, new_tools
from controllers.engines import EngineBook
from controllers.routing import Seat
from gcore.agents.api import AgentFault, Refused
from gcore.agents.asked import Rules
from gcore.agents.endpoint import Endpoint
from gcore.agents.pool import AgentPool
from gcore.agents.served import Limits, Say, Served
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.config.agent import AgentSpec
from gcore.environments.api import ENVIRONMENT
from gcore.environments.pool import ToolPool
from gcore.errors import EngineError
from gcore.reward.pace import Scoring
from gcore.rollout.client import SamplingParams
from gcore.types import Sample


class Stage:
    """Where the agents of a job run on one controller, and what they ask. Close it."""

    def __init__(self, spec: AgentSpec, clock: Clock, group: str = "") -> None:
        self.pool = AgentPool(spec, clock, group)
        self.endpoint = Endpoint()

    @property
    def waits(self) -> Scoring:
        """Who waits for a process of an agent."""
        return self.pool.waits

    async def close(self) -> None:
        """No agent runs any more, and nothing is answered."""
        await self.pool.close()
        await self.endpoint.close()


Worlds = ToolPool | Stage
"""What responses of several turns are made with, besides engines."""


def new_worlds(spec: JobSpec, clock: Clock, told: Told, group: str = "") -> Worlds | None:
    """Those of a job with an environment, or an agent; None for any other. `group`: the control group of their processes."""
    return new_tools(spec, clock, told, group) if spec.agent is None else Stage(spec.agent, clock, group)


def new_responding(
    spec: JobSpec, engines: EngineBook, worlds: Worlds | None, clock: Clock, told: Told
) -> Responding | None:
    """Who makes the job's responses, if they have several turns. Raises PluginFault."""
    if isinstance(worlds, Stage):
        return Acting(spec, engines, worlds, clock, told)
    return None if worlds is None else Conversing(spec, engines, worlds, clock, told)


class Acting(Responding):
    """Of one job, on one controller."""

    def __init__(self, spec: JobSpec, engines: EngineBook, stage: Stage, clock: Clock, told: Told) -> None:
        assert spec.agent is not None
        super().__init__(told, again=spec.agent.on_error == "retry")
        self._spec = spec.agent
        self._context = spec.model.max_length
        self._usual = spec.rollout
        self._engines = engines
        self._stage = stage
        self._clock = clock

    async def _played(self, what: Conversation, seed: int, rid: str) -> Sample:
        """Raises AgentFault, EngineError."""
        spec, params, endpoint = self._spec, what.params, self._stage.endpoint
        longest = params.max_new_tokens
        context = self._context or what.renderer.max_length
        served = Served(
            what.renderer,
            self._saying(what, seed, rid),
            self._rules(params),
            Limits(spec.max_turns, longest, spec.room(longest), context, spec.time_limit_s),
            self._clock,
            restarts=spec.history == "last",
            stop=params.stop,
            name=f"{seed:x}",
            refused=self._refused,
        )
        token = await endpoint.begin(served)
        try:
            return await self._acted(what, seed, served, token)
        finally:
            await endpoint.end(token)

    async def _acted(self, what: Conversation, seed: int, served: Served, token: str) -> Sample:
        call = {
            "base_url": self._stage.endpoint.base_url(token),
            "api_key": token,
            "fields": what.prompt.fields,
            "options": self._spec.options,
            "seed": seed,
        }
        reward: float | None = None
        try:
            reward = await self._stage.pool.run(call, served.start, served.watch)
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

    def _rules(self, params: SamplingParams) -> Rules:
        """An agent that says what the job draws with is no less right where an evaluation, or a baseline, draws otherwise."""
        usual = self._usual
        return Rules(
            (params.temperature, usual.temperature),
            (params.top_p, usual.top_p),
            params.max_new_tokens,
            frozenset(self._spec.ignore),
        )

    def _saying(self, what: Conversation, seed: int, rid: str) -> Say:
        seat, params, turn = Seat(), what.params, 0

        async def say(tokens: tuple[int, ...], most: int, stop: tuple[str, ...], made: int) -> Sample:
            nonlocal turn
            turn += 1
            least = min(max(params.min_new_tokens - made, 0), most)
            (sample,) = await self._engines.generate(
                what.version,
                [tokens],
                replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop),
                (remade(seed, made),) if params.temperature else (0,),
                f"{rid}/{turn}",
                what.follow,
                what.renderer.decode,
                seat=seat,
            )
            if sample.finish_reason == "abort":
                raise EngineError(f"the engine gave up on prompt {what.prompt.ref}", fix="It is issued again")
            return sample

        return say

    def _refused(self, why: Refused) -> None:
        if why.status < 500:
            self._told(
                f"agent {self._spec.name!r} asked what it does not get ({why.status} {why.code}): {why.what}", ""
            )
