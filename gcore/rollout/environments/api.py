"""What an environment is written against.

An environment is made anew for each response, from a `Setting`. It is asked in turns: `reset` before the first turn of the
model, `step` after each. What it shows is appended to the response behind the tokens that the model made, and the model goes on
behind that; it is never trained (`Sample.observed`). It runs in the controller, on its event loop, so it must not block: what
takes long, or runs code of the model's, is a tool (`Setting.tools`), in a process of its own with limits.

An environment that raises has failed, and with it the response (`environment.on_error`). It must be a function of its setting and of
what the model says: a response that is made anew meets the same world.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gcore.errors import TracedError
from gcore.plugins import RAISED, PluginFault, PluginKind, error_sentence, find_plugin, plugin_trace
from gcore.system.concurrency import is_cancelled
from gcore.types import LARGEST_REWARD, FinishReason

Message = Mapping[str, Any]

ENVIRONMENT = "environment"
"""The part of a response's reward that its environment gave, and the reward that hands it on."""


class EnvironmentFault(TracedError):
    """An environment, or what it wants, is not as it should be. `trace`: the traceback of its own code, or empty."""


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
"""What an entry point in `gcore.rollout.environments` gives: the class itself, mostly. Raises EnvironmentFault for options that are none."""


def stop_of(environment: Environment) -> tuple[str, ...]:
    """The texts that end a turn."""
    found = getattr(environment, "stop", ())
    if isinstance(found, str) or not all(isinstance(one, str) and one for one in found):
        raise EnvironmentFault(
            f"its `stop` is {found!r:.200}, no texts", fix="Give a tuple of texts that are not empty"
        )
    return tuple(found)


ENVIRONMENTS = PluginKind("environment", "gcore.environments", "environment.name")
TOOLS = PluginKind("tool", "gcore.tools", "environment.tools.names")

METHODS = ("reset", "step", "close")
"""Of every environment."""

Tool = Callable[[str], str]
"""A text, or JSON, to a text."""


def find_environment(name: str) -> EnvironmentMaker:
    """The environment of that name among the entry points `gcore.environments`. Raises PluginFault, with the nearest name if there is
    none.
    """
    found: EnvironmentMaker = find_plugin(ENVIRONMENTS, name)
    return found


def find_tool(name: str) -> Tool:
    """The tool of that entry-point name. Raises PluginFault."""
    found: Tool = find_plugin(TOOLS, name)
    return found


class CheckedEnvironment:
    """One environment, which is foreign code: an exception, a result of another type or a reward that is no number becomes an
    EnvironmentFault. But for what ends a task and the PluginFault of a tool that cannot be had, nothing else is raised. That
    it must not take for ever is its caller's business (`episode`)."""

    def __init__(self, name: str, maker: EnvironmentMaker, setting: Setting) -> None:
        self._name = name
        try:
            self._environment: Environment = maker(_its_own(setting))
            self.stop = stop_of(self._environment)
            methods = {method: getattr(self._environment, method, None) for method in METHODS}
        except EnvironmentFault:
            raise
        except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
            raise self._raised(error, "while it was made") from error
        for method, found in methods.items():
            if found is None:
                raise self._wrong(f"has no method {method!r}", f"Write `async def {method}`")
            if not _is_asynchronous(found):
                raise self._wrong(f"has a {method!r} that cannot be awaited", f"Write `async def {method}`")

    async def reset(self) -> Observation:
        """What is shown before the first turn."""
        shown = self._observation(await self._asked(lambda: self._environment.reset(), "in reset"), "reset")
        if shown.messages:
            raise self._wrong("showed messages before the first turn", "Show a text there, or put them into the prompt")
        return shown

    async def step(self, turn: Turn, *, chat: bool) -> Observation | Done:
        """What comes of a turn."""
        found = await self._asked(lambda: self._environment.step(turn), f"in step, after turn {turn.number}")
        if isinstance(found, Done):
            return self._done(found)
        shown = self._observation(found, "step")
        if shown.messages and not chat:
            raise self._wrong("showed messages, and prompts are plain text", "Show a text, or set model.chat: true")
        if not shown.text and not shown.messages:
            raise self._wrong("showed nothing behind a turn", "Show something, or give Done()")
        return shown

    async def close(self) -> None:
        """It is over."""
        await self._asked(lambda: self._environment.close(), "in close")

    async def _asked(self, ask: Callable[[], Awaitable[Any]], when: str) -> Any:
        try:
            return await ask()
        except (EnvironmentFault, PluginFault):  # of a tool that is not there: no fault of the environment's
            raise
        except (*RAISED, asyncio.CancelledError) as error:  # the edge to foreign code
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            raise self._raised(error, when) from error

    def _observation(self, found: Any, where: str) -> Observation:
        if not isinstance(found, Observation):
            raise self._wrong(f"gave a {type(found).__name__} from {where}", "Give an Observation, or Done from step")
        text: Any = found.text
        messages: Any = found.messages
        if not isinstance(text, str) or not isinstance(messages, list | tuple):
            raise self._wrong(f"gave an observation from {where} that is no text and no list of messages", "Correct it")
        if not all(isinstance(message, Mapping) for message in messages):
            raise self._wrong(f"gave messages from {where} that are no mappings", "Give each a role and a content")
        if text and messages:
            raise self._wrong("showed a text and messages at once", "Show one of them")
        try:
            return Observation(_spelt(text), tuple(_spelt(message) for message in messages))
        except RecursionError:
            raise self._wrong(f"gave messages from {where} that hold themselves", "Correct it") from None

    def _done(self, found: Done) -> Done:
        reward = found.reward
        if reward is None:
            return found
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(f"gave {reward!r:.100} as its reward", "Give a number") from error
        if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            raise self._wrong(f"gave {number} as its reward, which is not finite in float32", "Correct it")
        return Done(number)

    def _wrong(self, what: str, fix: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self._name!r} {what}", fix=fix)

    def _raised(self, error: BaseException, when: str) -> EnvironmentFault:
        said = f"environment {self._name!r} raised {error_sentence(error)} {when}"
        return EnvironmentFault(said, fix="Correct the environment", trace=plugin_trace(error))


def _its_own(setting: Setting) -> Setting:
    """What the environment does to its options and its fields reaches nobody else: the reward reads the entry too."""
    return replace(setting, options=dict(setting.options), fields=copy.deepcopy(setting.fields))


def _is_asynchronous(method: Any) -> bool:
    """Whether calling it makes a coroutine, as far as can be seen: a decorator may say what it wraps."""
    return inspect.iscoroutinefunction(inspect.unwrap(method))


def _spelt(value: Any) -> Any:
    """Texts, and those within, with half a surrogate pair, which no tokenizer takes, spelt out: a tool may echo what a model wrote."""
    match value:
        case str():
            return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case Mapping():
            return {_spelt(name): _spelt(one) for name, one in value.items()}
        case list() | tuple():
            return [_spelt(one) for one in value]
    return value
