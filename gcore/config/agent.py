"""The section `agent` of a job spec: responses that foreign agent code makes, which speaks OpenAI's API (`gcore.agents`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from gcore.config.base import Option, Section
from gcore.config.combinations import rewards_named
from gcore.config.environment import MOST_TURNS
from gcore.config.evaluation import eval_sources
from gcore.config.sources import training_sources

if TYPE_CHECKING:
    from gcore.config.spec import JobSpec

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


def refuse_agent(spec: JobSpec) -> str | None:
    """Why responses cannot be made by an agent like that, if they cannot."""
    named = rewards_named(spec)
    agent, longest, context = spec.agent, spec.rollout.max_new_tokens, spec.model.max_length
    if agent is None:
        return (
            "reward 'agent' hands on what the agent says, and the spec has no section agent" * ("agent" in named)
            or None
        )
    if spec.environment is not None:
        return (
            "a response is made by an agent or with an environment; leave out one of the sections agent and environment"
        )
    if spec.train.loss == "sft":
        return "train.loss: sft shows answers that nobody drew, so there is nothing for an agent to ask; leave one of them out"
    if agent.max_tokens is not None and agent.max_tokens < longest:
        return (
            f"agent.max_tokens ({agent.max_tokens}) counts what is shown too, and is below rollout.max_new_tokens ({longest}), "
            "what the model alone may make"
        )
    if context is not None and agent.room(longest) >= context:
        return (
            f"a response of up to {agent.room(longest)} tokens with what it is shown (agent.max_tokens) leaves no room for a "
            f"question in model.max_length ({context})"
        )
    for source in (*training_sources(spec), *eval_sources(spec)):
        if not source.chat:
            return (
                f"an agent speaks in messages, and source {source.name!r} is plain text; set model.chat: true, with a template of "
                "your own in the source's `template` where the model has none"
            )
    return None
