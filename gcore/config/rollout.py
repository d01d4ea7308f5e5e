"""The sections `rollout`, `environment` and `agent` of a job spec: how responses are generated.

`environment`: multi-turn responses with an environment that answers. `agent`: external agent code produces the responses and
calls the policy through the OpenAI API. A job has at most one of the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from gcore.config.base import SPANS, Option, Section, SlotsPerEngine, StopString, Temperature, is_unset
from gcore.config.capabilities import ENGINES, PICTURE_ENGINES, having, lacking
from gcore.config.diffusion import DenoisingSpec
from gcore.plugins import short_name

DEFAULT_STEPS: int = DenoisingSpec.model_fields["steps"].default


class RolloutSpec(Section):
    """How responses are generated."""

    engine: Literal["torch", "sglang", "vllm", "hf", "diffusers", "sglang-diffusion"] = Field(
        "torch",
        description="Engine that generates responses. diffusers, sglang-diffusion: the responses are pictures, which a pipeline of diffusers "
        "generates",
    )
    diffusion: DenoisingSpec | None = Field(
        None, exclude_if=is_unset, description="How pictures are generated, with engine: diffusers or sglang-diffusion"
    )
    slots_per_engine: SlotsPerEngine = Field(1, description=SPANS)
    temperature: Temperature = Field(1.0, description="Sampling temperature. The trainer divides its logits by it too")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling. Training requires 1")
    top_k: int | None = Field(
        None, ge=1, description="Sample from the k likeliest tokens only. Training does not support it"
    )
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Drop tokens below this fraction of the likeliest token's probability. Training does not support it",
    )
    correction: Literal["none", "tis", "icepop", "mis", "decoupled"] = Field(
        "none",
        description="Correction for engine mismatch and stale weights. none: no correction. tis: weight each token by the ratio of "
        "the trainer's to the engine's probability, capped at train.tis_cap. icepop: the same weight within "
        "train.correction_band and zero outside. mis: as icepop, and tokens outside do not count in the denominator. decoupled: "
        "weight without a cap, and clip around the policy at the start of the step",
    )
    max_new_tokens: PositiveInt = Field(
        description="Maximum length of a response, in tokens; required. Pictures have none: for them it is the number of steps"
    )
    min_new_tokens: Annotated[int, Field(ge=0)] = Field(0, description="Shortest response, in tokens")
    stop: tuple[StopString, ...] = Field((), description="Strings that end a response")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="Tokens that end a response")
    truncated: Literal["keep", "mask", "penalise", "drop_group"] = Field(
        "keep",
        description="Responses cut off at max_new_tokens. keep: train them unchanged. mask: exclude them from the loss, not from the "
        "group's baseline. penalise: subtract truncated_penalty from their reward. drop_group: filter the whole group",
    )
    truncated_penalty: PositiveFloat = Field(
        1.0, description="What `penalise` subtracts from the reward of a truncated response"
    )
    overlong_tokens: PositiveInt | None = Field(
        None,
        description="Soft length limit (DAPO): over this many tokens before the maximum length, the penalty grows linearly",
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="Penalty of a response of the maximum length, with overlong_tokens"
    )
    deterministic: bool = Field(
        False,
        description="Generate the same tokens regardless of what else is in an engine's batch. Slower; torch engine only",
    )
    concurrency: PositiveInt = Field(256, description="Maximum number of groups in flight per controller")
    batch_slots: PositiveInt = Field(256, description="Maximum number of sequences that an engine decodes at once")
    cache_tokens: PositiveInt | None = Field(
        None, description="Size of an engine's KV cache, in tokens. Default: from the free memory"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Prompt tokens that an engine prefills between two decoding steps"
    )
    engine_args: tuple[str, ...] = Field((), description="Additional command-line arguments of SGLang or vLLM")
    staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="Maximum number of steps between the weights that generated a token and the step that trains it. 0: strictly on-policy. "
        "From 1 on, groups that a step leaves over are carried into the next steps; this needs `correction` or "
        "train.old_logprobs: engine",
    )
    over_provision: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="Maximum number of groups offered or in flight at once, as a multiple of a step's groups. The step closes when enough groups "
        "are finished; the rest carries over into the next steps. 1: off. null: staleness + 1, the maximum",
    )
    order: Literal["stream", "longest_first"] = Field(
        "stream",
        description="Which due prompts a controller starts first: in stream order, or those with the longest expected "
        "responses. Changes when a prompt starts, not what is trained",
    )
    balance: Literal["samples", "tokens"] = Field(
        "samples",
        description="How a controller measures an engine's load when it assigns a group: by outstanding responses, or by "
        "the tokens that these are still expected to need",
    )
    timeout_s: Annotated[float, Field(ge=0.1)] = Field(
        120.0, description="Maximum wait for one group, in seconds. Then the group goes to another engine"
    )
    told_every: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Tokens between two reports of a partial response by an engine. If the engine is lost, another engine continues "
        "from the last report. Each report repeats the whole response so far. null: an eighth of max_new_tokens, at least 64. 0: never",
    )
    silent_s: PositiveFloat = Field(
        30.0,
        description="An engine with outstanding responses that answers no request for this many seconds, not even a health check, "
        "loses its groups to another engine",
    )
    watchdog_s: PositiveFloat = Field(
        120.0,
        description="An engine that does not answer or makes no progress for this many seconds is stopped and restarted",
    )

    @model_validator(mode="before")
    @classmethod
    def _count_steps(cls, tree: Any) -> Any:
        """Give a policy that generates pictures its section, and the number of steps as the maximum length. Raises ValueError."""
        if not isinstance(tree, dict):
            return tree
        engine = tree.get("engine", "torch")
        if engine not in PICTURE_ENGINES:
            if tree.get("diffusion") is not None:
                having_it = having(ENGINES, "generates_pictures")
                raise ValueError(f"diffusion needs engine: {having_it}, not {engine}; set it, or leave diffusion out")
            return tree
        diffusion = tree.get("diffusion")
        if diffusion is None:
            diffusion = {}
        try:
            steps = DenoisingSpec.model_validate(diffusion).steps
        except ValidationError:  # which the field's own validation reports
            steps = DEFAULT_STEPS
        return {"max_new_tokens": steps, **tree, "diffusion": diffusion}

    @model_validator(mode="after")
    def _check_fields(self) -> RolloutSpec:
        if self.diffusion is not None and self.max_new_tokens != self.diffusion.steps:
            raise ValueError("max_new_tokens is for texts, and pictures have no tokens; leave it out")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens}); lower it"
            )
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"overlong_tokens ({self.overlong_tokens}) is above max_new_tokens ({self.max_new_tokens}); lower it"
            )
        if self.over_provision is not None and self.over_provision > self.staleness + 1:
            raise ValueError(_too_many(self.over_provision, self.staleness))
        if self.watchdog_s < self.silent_s:
            raise ValueError(
                f"watchdog_s ({self.watchdog_s:g}) is below silent_s ({self.silent_s:g}); raise watchdog_s"
            )
        settings = {
            "deterministic": ("deterministic", self.deterministic),
            "engine_args": ("arguments", bool(self.engine_args)),
            "slots_per_engine": ("several_slots", self.slots_per_engine > 1),
            "told_every": ("partial", bool(self.told_every)),
        }
        for why in lacking(ENGINES, "engine", self.engine, settings):
            raise ValueError(why)
        return self


def _too_many(over_provision: float, staleness: int) -> str:
    """Return the error for an `over_provision` (a multiple of a step's groups) above `staleness` + 1."""
    if staleness:
        return (
            f"over_provision ({over_provision:g}) is above staleness + 1 ({staleness + 1}): groups beyond that would be too old "
            "when their step comes; lower over_provision or raise staleness"
        )
    return (
        f"over_provision is {over_provision:g} with staleness 0: groups that a step leaves over cannot be kept, and taking the "
        "first finished groups would favor short responses; set staleness: 1 or more"
    )


MOST_TURNS = 1000


def picture_bytes(pixels: int) -> int:
    """Return an upper bound for the bytes of a stored picture of so many pixels: a PNG file of random RGB values has less."""
    return 4 * pixels + (64 << 10)


class ToolsSpec(Section):
    """The tools, and the processes that run them on each controller's node."""

    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=64,
        description="Tools that the environment may call, by entry-point name in `gcore.tools`",
    )
    workers: PositiveInt = Field(
        4, le=256, description="Tool processes on each node, started when needed. Each runs one call at a time"
    )
    timeout_s: PositiveFloat = Field(
        5.0,
        le=3600,
        description="Maximum time of one call, in seconds. Then the model gets an error and the process is replaced",
    )
    memory_mb: PositiveInt = Field(1024, ge=64, le=1 << 30, description="Memory limit of one process, in MiB")
    start_timeout_s: PositiveFloat = Field(60.0, le=3600, description="Maximum time to load the tools, in seconds")
    max_pictures: NonNegativeInt = Field(
        0,
        le=64,
        description="Maximum number of pictures that tools may return in one response. A response that would have more is cut off. "
        "Needs data.images. 0: tools return only text",
    )
    max_pixels: PositiveInt = Field(
        1 << 20,
        le=64 << 20,
        description="Maximum size of a picture of a tool, in pixels (height x width) as the model sees it. The blob store reserves room for "
        "such pictures. A larger one fails the response",
    )

    @field_validator("names")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        called = [short_name(name) for name in names]
        if twice := sorted({name for name in called if called.count(name) > 1}):
            same = [name for name in names if short_name(name) == twice[0]]
            if len({*same}) > 1:
                raise ValueError(f"two tools are called {twice[0]!r} ({' and '.join(same)}); rename one of them")
            raise ValueError(f"tool {twice[0]!r} is listed twice; list it once")
        return names

    @property
    def response_bytes(self) -> int:
        """Upper bound for the bytes of the pictures that tools return in one response."""
        return self.max_pictures * picture_bytes(self.max_pixels)

    @property
    def called(self) -> dict[str, str]:
        """The tools of the spec, by the name that the environment and the model use. A tool in a file has the name of its function."""
        return {short_name(name): name for name in self.names}


class EnvironmentSpec(Section):
    """The environment that answers the model between its turns. Without this section a response is one turn."""

    name: str = Field(description="Environment, by entry-point name in `gcore.environments`")
    options: dict[str, Option] = Field({}, description="Settings of the environment, by name")
    tools: ToolsSpec = ToolsSpec()
    max_turns: PositiveInt = Field(
        8, le=MOST_TURNS, description="Maximum number of model turns in one response. A longer response is cut off"
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description="Maximum length of a response including the environment's text, in tokens. max_new_tokens limits the model's own tokens. "
        "Default: twice max_new_tokens",
    )
    step_timeout_s: PositiveFloat = Field(
        60.0,
        le=3600,
        description="Maximum time for one answer of the environment, in seconds. Includes tool calls, but not the wait for a free tool "
        "process",
    )
    on_error: Literal["fail_group", "retry"] = Field(
        "fail_group",
        description="What happens when the environment raises or times out. fail_group: the prompt fails. retry: the response is "
        "generated again, up to three times",
    )

    def room(self, max_new_tokens: int) -> int:
        """Return the most tokens of a response, of which the model may generate `max_new_tokens`."""
        return 2 * max_new_tokens if self.max_tokens is None else max(self.max_tokens, max_new_tokens)


Ignorable = Literal["temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "logprobs"]
"""Request fields of an agent that gcore may ignore. Not fields that change what the answer means, such as n or a format."""


class AgentSpec(Section):
    """The agent that produces each response and calls the policy over HTTP."""

    name: str = Field(description="Agent, by entry-point name in `gcore.agents`")
    options: dict[str, Option] = Field({}, description="Settings of the agent, by name")
    workers: PositiveInt = Field(8, le=1024, description="Agent processes on each node. Each runs one agent at a time")
    memory_mb: PositiveInt = Field(2048, ge=64, le=1 << 30, description="Memory limit of one process, in MiB")
    start_timeout_s: PositiveFloat = Field(
        60.0, le=3600, description="Maximum time to load the agent's package, in seconds"
    )
    time_limit_s: PositiveFloat = Field(
        300.0,
        le=86400,
        description="Maximum total time of one agent run, in seconds, not counting the time it waits for the policy",
    )
    max_turns: PositiveInt = Field(
        16, le=MOST_TURNS, description="Maximum number of policy calls in one response. One more call ends the response"
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description="Limit on a response, in tokens: the model's tokens and those that the agent adds after its first request, such "
        "as tool results. max_new_tokens limits the model's own tokens. null: twice max_new_tokens",
    )
    history: Literal["refuse", "last"] = Field(
        "refuse",
        description="What happens when an agent's request does not extend the conversation so far. refuse: the request fails with "
        "status 409. last: a new conversation starts, and only the last one is trained",
    )
    ignore: tuple[Annotated[Ignorable, Field()], ...] = Field(
        (),
        description="Sampling settings that agents may send and gcore ignores. Any other setting that differs from the job's is rejected",
    )
    on_error: Literal["fail_group", "retry"] = Field(
        "fail_group",
        description="What happens when an agent raises, times out or never calls the policy. fail_group: the prompt fails. retry: "
        "the response is generated again, up to three times",
    )

    def room(self, max_new_tokens: int) -> int:
        """Return the most tokens of a response, of which the model may generate `max_new_tokens`."""
        return 2 * max_new_tokens if self.max_tokens is None else max(self.max_tokens, max_new_tokens)
