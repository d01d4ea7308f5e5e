"""The section `environment` of a job spec: responses of several turns, with a world that answers (`gcore.environments`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from gcore.config.base import Option, Section

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


def refuse_environment(environment: EnvironmentSpec | None, max_new_tokens: int, max_length: int | None) -> str | None:
    """Why responses cannot have several turns like that, if they cannot."""
    if environment is None:
        return None
    if environment.max_tokens is not None and environment.max_tokens < max_new_tokens:
        return (
            f"environment.max_tokens ({environment.max_tokens}) counts what is shown too, and is below "
            f"rollout.max_new_tokens ({max_new_tokens}), what the model alone may make"
        )
    room = environment.room(max_new_tokens)
    if max_length is not None and room >= max_length:
        return (
            f"a response of up to {room} tokens with what it is shown (environment.max_tokens) leaves no room for a prompt "
            f"in model.max_length ({max_length})"
        )
    return None
