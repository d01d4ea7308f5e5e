"""What an environment is written against.

An environment is made anew for each response, from a `Setting`. It is asked in turns: `reset` before the first turn of the
model, `step` after each. What it shows is appended to the response behind the tokens that the model made, and the model goes on
behind that; it is never trained (`Sample.observed`). It runs in the controller, on its event loop, so it must not block: what
takes long, or runs code of the model's, is a tool (`Setting.tools`), in a process of its own with limits.

An environment that raises has failed, and with it the response (`environment.on_error`). It must be a function of its setting and of
what the model says: a response that is made anew meets the same world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.errors import GcoreError
from gcore.types import FinishReason

Message = Mapping[str, Any]
ENVIRONMENT = "environment"
"""The part of a response's reward that its environment gave, and the reward that hands it on."""


class EnvironmentFault(GcoreError):
    """An environment, or what it wants, is not as it should be. `trace`: the traceback of its own code, or empty."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, trace: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.trace = trace


class BadArgument(ValueError):
    """A tool cannot work with what the model gave it: the model is told so, in these words, and nobody else is."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model said in one turn: its text without special tokens, a stop text included, and how it ended."""

    text: str
    tokens: int
    finish_reason: FinishReason
    number: int
    """From 1 on."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown next: a text that is appended as it is, or messages, which the chat template writes.

    Not both. Nothing at all is fine before the first turn only: behind one the model would be asked to go on with its own words.
    """

    text: str = ""
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The response is over. `reward`: what the environment says it is worth, for the reward called `environment`."""

    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool said; `failed`: that it could say nothing, and why."""

    text: str
    failed: bool = False


class Tools(Protocol):
    """The tools that the spec names."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of the spec."""
        ...

    async def call(self, name: str, argument: str) -> Said:
        """What the tool says to `argument`; of one that fails, that it did. Raises KeyError for a name that is not there."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What an environment is made from."""

    options: Mapping[str, Any]
    """`environment.options`."""
    fields: Mapping[str, Any]
    """The prompt's entry."""
    seed: int
    """Of this response; 63 bits."""
    tools: Tools
    chat: bool = False
    """Whether messages can be shown: the prompt went through a chat template."""


class Environment(Protocol):
    """One response's world. It may have `stop`: texts that end a turn of the model, and stay in it."""

    async def reset(self) -> Observation:
        """What is shown before the first turn; mostly nothing: the prompt was shown."""
        ...

    async def step(self, turn: Turn) -> Observation | Done:
        """What comes of a turn of the model."""
        ...

    async def close(self) -> None:
        """It is over, however it ended."""
        ...


EnvironmentMaker = Callable[[Setting], Environment]
"""What an entry point in `gcore.environments` gives: the class itself, mostly. Raises EnvironmentFault for options that are none."""


def stop_of(environment: Environment) -> tuple[str, ...]:
    """The texts that end a turn."""
    found = getattr(environment, "stop", ())
    if isinstance(found, str) or not all(isinstance(one, str) and one for one in found):
        raise EnvironmentFault(
            f"its `stop` is {found!r:.200}, no texts", fix="Give a tuple of texts that are not empty"
        )
    return tuple(found)
