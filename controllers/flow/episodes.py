"""Multi-turn responses (episodes): the policy alternates with an environment, or an agent program calls the policy
through OpenAI's API.

Each response is an episode of its own: its next turn is requested as soon as its environment or agent is ready, independent of the other
responses of its group. A turn is one request with all earlier tokens as the prompt; the engine of the previous turn has
them in its KV cache. If that engine is lost or serves other weights by then, another one continues. At staleness 0 all
turns use one weight version; otherwise each turn starts with the newest.

With an environment (`EnvironmentEpisodes`), `gcore.rollout.environments.episode` plays the turns. An agent (`AgentEpisodes`) runs in a
separate process and sends its requests to an HTTP server of this controller, to a URL of its own
(`gcore.rollout.agents.server`).

If an environment or agent fails, its prompt fails or is retried (`on_error`), each time with another seed, because the
generated text may be the cause. If an engine fails, the whole attempt fails: the agent is ended, and the prompt is
sampled again. If a prompt is given up, its agents' processes end too.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from controllers.inference.continuation import derive_seed
from controllers.inference.pool import EnginePool
from controllers.inference.rules import Affinity, VersionFollower
from controllers.workers.job_media import JobMedia
from gcore.config.rollout import AgentSpec
from gcore.config.spec import JobSpec
from gcore.data.renderer import PromptRenderer
from gcore.data.stream import PromptSource
from gcore.errors import EngineError
from gcore.media.pictures import PictureError
from gcore.media.protocol import blob_path
from gcore.plugins import shown_name
from gcore.reward.api import RewardError
from gcore.rollout.agents.api import AgentFault, AgentRequestRefused
from gcore.rollout.agents.chat_protocol import SamplingRules
from gcore.rollout.agents.server import AgentHttpServer, AgentPool
from gcore.rollout.agents.session import AgentSession, DialogueLimits, Say
from gcore.rollout.api import RequestPictures, SamplingParams
from gcore.rollout.environments.api import ENVIRONMENT, CheckedEnvironment, EnvironmentFault, Setting, find_environment
from gcore.rollout.environments.episode import (
    EpisodeLimits,
    EpisodePictures,
    EpisodeSetting,
    Transcript,
    play_episode,
)
from gcore.rollout.environments.pool import ToolPool
from gcore.system.clock import Clock
from gcore.system.concurrency import Pausable, gather_or_cancel
from gcore.types import Medium, PictureRef, Prompt, Sample, Version
from gcore.worker.sandbox.pool import PoolStatus

TRIES = 3
"""Maximum number of attempts of a response whose environment or agent fails, with `on_error: retry`."""

FailureReport = Callable[[str, str], None]
"""Called with a sentence about a failure, for an event, and the traceback of the plug-in's code (empty if there is
none)."""

EvalAnswer = Sample | RewardError
"""A response to an evaluation prompt, or the error of its environment or agent."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """A request for multi-turn responses to one prompt. `opened`: its source. `version`: the weights to use. `follow`:
    supplies newer weights for later turns, if staleness is allowed. `trained`: whether the responses may be trained, so
    that their pictures stay pinned as long as this controller holds the prompt."""

    version: Version
    prompt: Prompt
    opened: PromptSource
    params: SamplingParams
    follow: VersionFollower | None = None
    trained: bool = False

    @property
    def renderer(self) -> PromptRenderer:
        """The renderer of the prompt's source."""
        return self.opened.renderer


class EpisodeRunner(ABC):
    """Makes multi-turn responses for one job on one controller."""

    def __init__(self, report: FailureReport, *, again: bool) -> None:
        """`again`: whether a response whose environment or agent failed is retried."""
        self._report = report
        self._again = again

    async def side_by_side(
        self,
        request: EpisodeRequest,
        seeds: Sequence[int],
        rid: str,
        ended: Callable[[int, Sample], None] | None = None,
    ) -> tuple[Sample, ...]:
        """Make responses to one prompt concurrently, one per seed. `rid`: prefix of the request names. `ended`: called
        with the number and the sample of each response as soon as it is finished.

        Raises EngineError; RewardError if an environment or agent failed.
        """

        async def one(number: int, seed: int) -> Sample:
            sample = await self._respond(request, seed, f"{rid}/{number}")
            if ended is not None:
                ended(number, sample)
            return sample

        return tuple(await gather_or_cancel(one(number, seed) for number, seed in enumerate(seeds)))

    async def each(self, conversations: Sequence[EpisodeRequest], seeds: Sequence[int], rid: str) -> list[EvalAnswer]:
        """Make one response for each request, concurrently. The result has the error of the environment in the place of
        a response that failed. Raises EngineError."""

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
                made = await self._play(request, derive_seed(seed, number), f"{rid}.{number}" if number else rid)
            except EnvironmentFault as error:
                if number + 1 == tries:
                    raise RewardError(error.what, where=error.where, fix=error.fix, trace=error.trace) from error
                self._report(str(error), error.trace)
                continue
            if made.finish_reason == "abort":
                raise EngineError(f"the engine aborted prompt {request.prompt.ref}", fix="The prompt is sampled again")
            return made
        raise AssertionError("the last try raises")

    @abstractmethod
    async def _play(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        """Make one response. `rid`: prefix of its request names. Raises EnvironmentFault, EngineError."""


class EnvironmentEpisodes(EpisodeRunner):
    """Makes responses in which the policy alternates with the job's environment."""

    def __init__(
        self,
        spec: JobSpec,
        engines: EnginePool,
        tools: ToolPool,
        clock: Clock,
        report: FailureReport,
        media: JobMedia | None = None,
    ) -> None:
        """`media`: provides the pictures of prompts, and stores those of tools; None: there are none. Raises PluginFault if
        the environment cannot be loaded."""
        assert spec.environment is not None
        super().__init__(report, again=spec.environment.on_error == "retry")
        self._spec = spec.environment
        self._maker = find_environment(self._spec.name)
        self._engines = engines
        self._tools = tools
        self._clock = clock
        self._media = media

    async def _play(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        spec, params, renderer, prompt = self._spec, request.params, request.renderer, request.prompt
        hold, seen = Pausable(self._clock), ResponsePictures(request, self._media)
        tools = self._tools.within(hold.held, seen.paths)
        setting = Setting(spec.options, prompt.fields, seed, tools, renderer.chat)
        environment = CheckedEnvironment(spec.name, self._maker, setting)
        stop = tuple(dict.fromkeys((*params.stop, *environment.stop)))
        seat, made = Affinity(), 0

        async def say(whole: Transcript, most: int) -> Sample:
            nonlocal made
            least = min(max(params.min_new_tokens - made, 0), most)
            asked = replace(params, max_new_tokens=most, min_new_tokens=least, stop=stop, pictures=seen.named(whole))
            (sample,) = await self._engines.generate(
                request.version,
                [seen.prompt_ids + whole.request_ids],
                asked,
                (derive_seed(seed, len(whole.token_ids)),) if params.temperature else (0,),
                f"{rid}/{whole.turns + 1}",
                request.follow,
                renderer.decode,
                seat=seat,
            )
            made += len(sample.token_ids)
            return sample

        longest = params.max_new_tokens
        limits = EpisodeLimits(spec.max_turns, longest, spec.room(longest), spec.step_timeout_s)
        rule = None if self._media is None else request.opened.rule
        pictures = (
            None if rule is None else EpisodePictures(rule, spec.tools.max_pictures, spec.tools.max_pixels, seen.store)
        )
        episode = EpisodeSetting(seen.prompt_ids, prompt.fields, renderer, limits, self._clock, hold, pictures)
        try:
            async with seen:
                return await play_episode(environment, say, episode)
        finally:
            tools.discard_pictures()


class ResponsePictures:
    """The pictures of a response and of its prompt, as an async context manager that keeps their blobs pinned. `media`: None
    for a job without pictures."""

    def __init__(self, request: EpisodeRequest, media: JobMedia | None) -> None:
        self._request = request
        self._media = media
        self._of_prompt: tuple[Medium, ...] = ()
        self._of_tools: list[Medium] = []
        self._held = contextlib.AsyncExitStack()
        self.prompt_ids = request.prompt.request_ids or request.prompt.token_ids
        """The prompt's tokens with one image token for each picture."""

    async def __aenter__(self) -> None:
        """Make the blobs of the prompt's pictures. Raises EngineError, and RewardError if a picture has changed or is
        damaged."""
        prompt = self._request.prompt
        if self._media is None or not prompt.pictures:
            return
        if self._request.trained:
            self._media.keep(prompt.ref, prompt.pictures)
        try:
            self._of_prompt = await self._held.enter_async_context(self._media.in_use(prompt.pictures))
        except PictureError as error:
            raise RewardError(error.what, where=error.where, fix=error.fix) from error

    async def __aexit__(self, *raised: object) -> None:
        """End the pins of pictures that are not trained."""
        await self._held.aclose()

    def paths(self) -> list[str]:
        """The files of all pictures so far: those of the prompt in the data, then the blobs of those of tools."""
        folder = None if self._media is None else self._media.folder
        of_tools = [str(folder / blob_path(one.sha256)) for one in self._of_tools] if folder is not None else []
        return [*(one.path for one in self._request.prompt.pictures), *of_tools]

    async def store(self, picture: PictureRef) -> Medium:
        """Make the blob of a picture that a tool returned. Raises PictureError, EngineError."""
        assert self._media is not None
        if self._request.trained:
            medium = await self._media.store_for(self._request.prompt.ref, picture)
        else:
            (medium,) = await self._held.enter_async_context(self._media.in_use((picture,)))
        self._of_tools.append(medium)
        return medium

    def named(self, whole: Transcript) -> RequestPictures | None:
        """The pictures of a request that continues the response `whole`; None if there are none."""
        prompt, media = self._request.prompt, (*self._of_prompt, *whole.media)
        if self._media is None or not media:
            return None
        short = len(self.prompt_ids) + len(whole.request_ids)
        return self._media.name_pictures(prompt.pictures, media, short, prompt.token_ids + whole.token_ids)


class AgentEndpoint:
    """The agent processes of a job on one controller, and the HTTP server that they call. Must be closed."""

    def __init__(self, spec: AgentSpec, clock: Clock, group: str = "") -> None:
        self.pool = AgentPool(spec, clock, group)
        self.endpoint = AgentHttpServer()

    @property
    def waits(self) -> PoolStatus:
        """Load of the agent processes: how many responses wait for one."""
        return self.pool.waits

    async def close(self) -> None:
        """End all agents and stop the server."""
        await self.pool.close()
        await self.endpoint.close()


class AgentEpisodes(EpisodeRunner):
    """Makes responses by running the job's agent program, which calls the policy itself."""

    def __init__(
        self, spec: JobSpec, engines: EnginePool, agents: AgentEndpoint, clock: Clock, report: FailureReport
    ) -> None:
        assert spec.agent is not None
        super().__init__(report, again=spec.agent.on_error == "retry")
        self._spec = spec.agent
        self._context = spec.model.max_length
        self._usual = spec.rollout
        self._engines = engines
        self._agents = agents
        self._clock = clock

    async def _play(self, request: EpisodeRequest, seed: int, rid: str) -> Sample:
        """Make one response. Raises AgentFault, EngineError."""
        spec, params, endpoint = self._spec, request.params, self._agents.endpoint
        longest = params.max_new_tokens
        context = self._context or request.renderer.max_length
        served = AgentSession(
            request.renderer,
            self._make_say(request, seed, rid),
            self._rules(params),
            DialogueLimits(spec.max_turns, longest, spec.room(longest), context, spec.time_limit_s),
            self._clock,
            restarts=spec.history == "last",
            stop=params.stop,
            name=f"{seed:x}",
            refused=self._report_refusal,
        )
        token = await endpoint.begin(served)
        try:
            return await self._run_agent(request, seed, served, token)
        finally:
            await endpoint.end(token)

    async def _run_agent(self, request: EpisodeRequest, seed: int, served: AgentSession, token: str) -> Sample:
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
                said = f"agent {shown_name(self._spec.name)!r} {error.what}"
                raise AgentFault(said, where=error.where, fix=error.fix, trace=error.trace) from error
        if served.failed is not None:
            failed = served.failed
            raise failed if isinstance(failed, EngineError) else EngineError(failed.what, fix=failed.fix)
        if not served.asked:
            raise AgentFault(
                f"agent {shown_name(self._spec.name)!r} received no response from the policy, so there is nothing to train",
                where="agent.name",
                fix="Make it request a chat completion from rollout.base_url",
            )
        sample = served.sample()
        return sample if reward is None else replace(sample, reward_parts=((ENVIRONMENT, reward),))

    def _rules(self, params: SamplingParams) -> SamplingRules:
        """The sampling values that the agent's requests may contain: those of this request, or those of the spec, which
        evaluations and greedy baselines replace."""
        usual = self._usual
        return SamplingRules(
            (params.temperature, usual.temperature),
            (params.top_p, usual.top_p),
            params.max_new_tokens,
            frozenset(self._spec.ignore),
        )

    def _make_say(self, request: EpisodeRequest, seed: int, rid: str) -> Say:
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
                raise EngineError(f"the engine aborted prompt {request.prompt.ref}", fix="The prompt is sampled again")
            return sample

        return say

    def _report_refusal(self, why: AgentRequestRefused) -> None:
        if why.status < 500:
            self._report(
                f"agent {shown_name(self._spec.name)!r} sent a request that was refused ({why.status} {why.code}): {why.what}",
                "",
            )


EpisodePool = ToolPool | AgentEndpoint
"""The processes that multi-turn responses need besides engines: tools of an environment, or agents with their HTTP
server."""


def new_tool_pool(spec: JobSpec, clock: Clock, report: FailureReport, group: str) -> ToolPool | None:
    """Create the tool processes of a job with an environment; None without one. `group`: their control group
    (cgroup)."""
    return None if spec.environment is None else ToolPool(spec.environment.tools, clock, report, group)


def new_episode_pool(spec: JobSpec, clock: Clock, report: FailureReport, group: str = "") -> EpisodePool | None:
    """Create the processes for multi-turn responses; None for a job without environment and agent. `group`: their
    control group (cgroup)."""
    return new_tool_pool(spec, clock, report, group) if spec.agent is None else AgentEndpoint(spec.agent, clock, group)


def new_episode_runner(
    spec: JobSpec,
    engines: EnginePool,
    pool: EpisodePool | None,
    clock: Clock,
    report: FailureReport,
    media: JobMedia | None = None,
) -> EpisodeRunner | None:
    """Create the runner of a job's multi-turn responses; None if its responses have one turn. `media`: as in
    `EnvironmentEpisodes`. Raises PluginFault."""
    if isinstance(pool, AgentEndpoint):
        return AgentEpisodes(spec, engines, pool, clock, report)
    return None if pool is None else EnvironmentEpisodes(spec, engines, pool, clock, report, media)
