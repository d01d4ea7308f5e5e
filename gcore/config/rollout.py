"""The sections `rollout`, `environment` and `agent` of a job spec: how responses are generated.

`environment`: responses of several turns, with a world that answers. `agent`: foreign agent code makes the responses and asks
the policy through OpenAI's API. A job has at most one of the two.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from gcore.config.base import SPANS, Option, Section, SlotsPerEngine, StopString, Temperature, refuse_torch


class RolloutSpec(Section):
    """Generation."""

    engine: Literal["torch", "sglang"] = Field("torch", description="What serves the rollout pool")
    slots_per_engine: SlotsPerEngine = Field(1, description=SPANS)
    temperature: Temperature = Field(1.0, description="Sampling temperature; the trainer divides its logits by it too")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus; below 1 cannot be trained")
    top_k: int | None = Field(None, ge=1, description="Keep only the k likeliest tokens; cannot be trained")
    min_p: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Drop tokens below this share of the likeliest one's probability; needs `correction`"
    )
    correction: Literal["none", "tis", "icepop", "mis", "decoupled"] = Field(
        "none",
        description="How training corrects for truncated sampling, engine mismatch or stale weights: not at all; tis: each "
        "token weighed by the trainer's probability over the engine's, up to train.tis_cap; icepop: so within "
        "train.correction_band, and not at all outside; mis: what is outside is left out of the count too; decoupled: "
        "weighed without a cap, and clipped around the policy that the step begins with",
    )
    max_new_tokens: PositiveInt = Field(description="Longest response, in tokens")
    min_new_tokens: Annotated[int, Field(ge=0)] = Field(0, description="No response ends before, in tokens")
    stop: tuple[StopString, ...] = Field((), description="Strings that end a response")
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="Tokens that end a response")
    truncated: Literal["keep", "mask", "penalise", "drop_group"] = Field(
        "keep",
        description="Responses cut off at max_new_tokens: trained as they are, left out of the loss (not of the group's "
        "baseline), worth truncated_penalty less, or their whole group filtered",
    )
    truncated_penalty: PositiveFloat = Field(1.0, description="What `penalise` takes off a truncated response's reward")
    overlong_tokens: PositiveInt | None = Field(
        None,
        description="Before the longest length, over so many tokens, a response is worth less and less (DAPO's cache)",
    )
    overlong_penalty: PositiveFloat = Field(
        1.0, description="What a response of the longest length is worth less, with overlong_tokens"
    )
    deterministic: bool = Field(
        False, description="The same tokens whatever else is in an engine's batch; slower (the torch engine only)"
    )
    concurrency: PositiveInt = Field(256, description="Groups in flight per controller, at most")
    batch_slots: PositiveInt = Field(256, description="Sequences an engine decodes at once, at most")
    cache_tokens: PositiveInt | None = Field(
        None, description="Tokens an engine caches at once, at most; default: from the memory that is free"
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Prompt tokens an engine takes in between two tokens of what it is decoding"
    )
    engine_args: tuple[str, ...] = Field((), description="Further arguments of SGLang's server, word by word")
    staleness: Annotated[int, Field(ge=0, le=64)] = Field(
        0,
        description="Steps that may lie between the weights that made a token and those it trains; 0: strictly on-policy. "
        "From 1 on what a step leaves over is carried into the next ones, and needs `correction` or train.old_logprobs: "
        "engine",
    )
    over_provision: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="How many times a step's groups may be offered or in flight at once: the step is closed when as many as it "
        "takes are finished, and the rest goes on into the next ones. 1: off; null: staleness + 1, which is the most",
    )
    order: Literal["stream", "longest_first"] = Field(
        "stream",
        description="Which of the prompts that are due a controller begins first: as they come in the stream, or those whose "
        "responses are expected to be the longest. It changes when a prompt is begun, not what is trained",
    )
    balance: Literal["samples", "tokens"] = Field(
        "samples",
        description="What engines are weighed by when a group goes to the one that owes least: by the responses that they owe, "
        "or by the tokens that these are expected to have still to come",
    )
    timeout_s: Annotated[float, Field(ge=0.1)] = Field(
        120.0, description="Longest wait for one group before it goes to another engine"
    )
    told_every: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="After how many tokens an engine tells what it has of a response: if it is lost, another goes on from "
        "there. Each telling repeats all that there is. null: an eighth of max_new_tokens, at least 64; 0: never",
    )
    silent_s: PositiveFloat = Field(
        30.0,
        description="An engine that owes responses and answers nothing at all for so long, not even how it is, is left: its "
        "groups go to another",
    )
    watchdog_s: PositiveFloat = Field(
        120.0, description="An engine that answers nothing, or gets nowhere, for so long is ended and started again"
    )

    @model_validator(mode="after")
    def _lengths_fit(self) -> RolloutSpec:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens ({self.min_new_tokens}) is above max_new_tokens ({self.max_new_tokens})")
        if self.overlong_tokens is not None and self.overlong_tokens > self.max_new_tokens:
            raise ValueError(
                f"overlong_tokens ({self.overlong_tokens}) is above max_new_tokens ({self.max_new_tokens})"
            )
        if self.over_provision is not None and self.over_provision > self.staleness + 1:
            raise ValueError(_too_many(self.over_provision, self.staleness))
        if self.watchdog_s < self.silent_s:
            raise ValueError(f"watchdog_s ({self.watchdog_s:g}) is below silent_s ({self.silent_s:g})")
        if self.engine == "sglang" and self.deterministic:
            raise ValueError("deterministic is the torch engine's; give SGLang its own flags in engine_args")
        if self.engine == "torch" and self.engine_args:
            raise ValueError("engine_args are SGLang's; set engine: sglang")
        if (why := refuse_torch(self.engine, self.slots_per_engine)) is not None:
            raise ValueError(why)
        return self


def _too_many(over_provision: float, staleness: int) -> str:
    """Why more groups than `staleness` + 1 quotas must not be begun at once."""
    if staleness:
        return (
            f"over_provision ({over_provision:g}) is above staleness + 1 ({staleness + 1}): what is begun beyond that would be "
            "too old before its turn"
        )
    return (
        f"over_provision is {over_provision:g} at staleness 0, where what a step leaves over cannot be kept, and a step that took "
        "what is finished first would train on short answers; set staleness: 1 or more"
    )


MOST_TURNS = 1000


class ToolsSpec(Section):
    """Tools, and the processes that they run in: on each controller's node."""

    names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        max_length=64,
        description="Tools that the environment may call, by their entry-point names in `gcore.tools`",
    )
    workers: PositiveInt = Field(
        4, le=256, description="Processes on each node, started when they are needed; each runs one call at a time"
    )
    timeout_s: PositiveFloat = Field(
        5.0, le=3600, description="Longest time of one call; then the model is told so, and the process is replaced"
    )
    memory_mb: PositiveInt = Field(1024, ge=64, le=1 << 30, description="Most memory that a process may take, in MiB")
    start_timeout_s: PositiveFloat = Field(60.0, le=3600, description="Longest time to load the tools")

    @field_validator("names")
    @classmethod
    def _names_differ(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tool {twice[0]!r} is named twice")
        return names


class EnvironmentSpec(Section):
    """What the model meets between its turns. Without this section a response is one turn."""

    name: str = Field(description="Environment, by its entry-point name in `gcore.environments`")
    options: dict[str, Option] = Field({}, description="Settings of the environment's own, by name")
    tools: ToolsSpec = ToolsSpec()
    max_turns: PositiveInt = Field(
        8, le=MOST_TURNS, description="Turns of the model in one response; one that wants more is cut off there"
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description="Longest response with all that it was shown, in tokens; what the model makes of it is bounded by "
        "max_new_tokens. Default: twice that",
    )
    step_timeout_s: PositiveFloat = Field(
        60.0,
        le=3600,
        description="Longest time that the environment may take to answer; tools included, but not the time in which a call waits for one of "
        "their processes",
    )
    on_error: Literal["fail_group", "retry"] = Field(
        "fail_group",
        description="An environment that raises, or takes too long: its prompt fails; or the response is made anew, up to "
        "three times",
    )

    def room(self, max_new_tokens: int) -> int:
        """Tokens of a response in all, of which the model may make so many."""
        return 2 * max_new_tokens if self.max_tokens is None else max(self.max_tokens, max_new_tokens)


Ignorable = Literal["temperature", "top_p", "max_tokens", "presence_penalty", "frequency_penalty", "logprobs"]
"""What an agent may be let ask for in vain. Not what would make its answer another one than it believes to have: n, a format."""


class AgentSpec(Section):
    """Who makes the responses: an agent for each, that asks the policy over HTTP."""

    name: str = Field(description="Agent, by its entry-point name in `gcore.agents`")
    options: dict[str, Option] = Field({}, description="Settings of the agent's own, by name")
    workers: PositiveInt = Field(
        8, le=1024, description="Processes on each node; each runs one agent at a time, so so many run at once"
    )
    memory_mb: PositiveInt = Field(2048, ge=64, le=1 << 30, description="Most memory that a process may take, in MiB")
    start_timeout_s: PositiveFloat = Field(60.0, le=3600, description="Longest time to load the agent's package")
    time_limit_s: PositiveFloat = Field(
        300.0,
        le=86400,
        description="Longest time that an agent may take by itself, in all; the time in which it waits for the policy does not count",
    )
    max_turns: PositiveInt = Field(
        16, le=MOST_TURNS, description="Answers of the policy in one response; one that asks for more is cut off there"
    )
    max_tokens: PositiveInt | None = Field(
        None,
        description="Longest response with all that it was shown behind the agent's first question, in tokens; what the model "
        "makes of it is bounded by max_new_tokens. Default: twice that",
    )
    history: Literal["refuse", "last"] = Field(
        "refuse",
        description="An agent whose question does not go on with what was said before. refuse: it is told so, with status 409; "
        "last: a new conversation begins, and only the last one is trained",
    )
    ignore: tuple[Annotated[Ignorable, Field()], ...] = Field(
        (),
        description="What agents may ask for without getting it; else a request for other sampling than the job's is refused",
    )
    on_error: Literal["fail_group", "retry"] = Field(
        "fail_group",
        description="An agent that raises, takes too long or never asks: its prompt fails; or the response is made anew, up to "
        "three times",
    )

    def room(self, max_new_tokens: int) -> int:
        """Tokens of a response in all, of which the model may make so many."""
        return 2 * max_new_tokens if self.max_tokens is None else max(self.max_tokens, max_new_tokens)
