"""Interface of environment plug-ins: user code that observes the model's turns and answers them.

An environment is created for each response from a `Setting`. gcore calls `reset` before the model's first turn and
`step` after each turn. The observation is appended to the response after the model's tokens, and the model continues
after it. Observed tokens are never trained (`Sample.observed`). An environment runs in the controller's event loop, so
it must not block. Slow operations, and code written by the model, belong into tools (`Setting.tools`), which run in
their own processes with limits.

A tool may return pictures (`ToolResult`). The environment puts them into its observation, and the model sees them there.

If an environment raises, the response fails (`environment.on_error`). Its behavior must depend only on its setting and
the model's turns, so that a repeated response gets the same environment.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gcore.errors import TracedError
from gcore.plugins import (
    RAISED,
    PluginFault,
    PluginKind,
    check_parameters,
    describe_result,
    error_sentence,
    find_plugin,
    plugin_trace,
    shown_name,
)
from gcore.system.concurrency import is_cancelled
from gcore.types import LARGEST_REWARD, FinishReason, PictureRef

Message = Mapping[str, Any]

ENVIRONMENT = "environment"
"""Name of the reward part that an environment returned, and of the built-in reward that uses this part."""


class EnvironmentFault(TracedError):
    """An environment failed: it raised, timed out, or returned an invalid result.

    `trace`: the traceback of its own code, or empty.
    """


class BadArgument(ValueError):
    """A tool cannot process the model's argument. Only the model gets this message."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: its text without special tokens, including a stop text, and its finish reason."""

    text: str
    tokens: int
    finish_reason: FinishReason
    number: int
    """Number of the turn in its response, from 1."""


PICTURE = "\ufffc"
"""Stands for the next picture in the text of an observation that has pictures: Unicode's character for an embedded object."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model sees next: either text, appended unchanged, or messages, rendered by the chat template.

    May be empty only before the first turn. `pictures`: those of tools (`Said.pictures`), in the order of their places: one
    `PICTURE` in the text, or one part of type image in the messages, for each.
    """

    text: str = ""
    messages: Sequence[Message] = ()
    pictures: Sequence[PictureRef] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The response has ended. `reward`: the environment's reward, for the reward called `environment`."""

    reward: float | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns if the model shall see pictures. `pictures`: PNG, JPEG or WebP files, as bytes or as paths.

    The model sees the pictures after the text. They count towards `environment.tools.max_pictures`.
    """

    text: str
    pictures: Sequence[bytes | str | os.PathLike[str]] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """Text that a tool returned. `failed`: the tool failed, and the text says why. `pictures`: that it returned."""

    text: str
    failed: bool = False
    pictures: tuple[PictureRef, ...] = ()


class Tools(Protocol):
    """Calls the tools that the spec names; an environment gets it as `Setting.tools`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in the order of the spec."""
        ...

    async def call(self, name: str, argument: str) -> Said:
        """Call a tool; a failure is returned as a failed result. Raises KeyError for an unknown name."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """Input of an environment when it is created for one response."""

    options: Mapping[str, Any]
    """The options in the spec, `environment.options`."""
    fields: Mapping[str, Any]
    """The prompt's entry (its row of the data)."""
    seed: int
    """Seed of this response; 63 bits."""
    tools: Tools
    chat: bool = False
    """Whether messages can be shown, because the prompt uses a chat template."""


class Environment(Protocol):
    """The environment of one response.

    It may have the attribute `stop`: texts that end a turn of the model. They remain in the turn.
    """

    async def reset(self) -> Observation:
        """Return the observation before the first turn: usually empty, because the model has seen the prompt."""
        ...

    async def step(self, turn: Turn) -> Observation | Done:
        """Return the observation after a turn of the model, or Done at the end of the response."""
        ...

    async def close(self) -> None:
        """Clean up after the response, however it ended."""
        ...


EnvironmentMaker = Callable[[Setting], Environment]
"""Creates an environment: the target of an entry point in `gcore.environments`, usually the class itself.

Raises EnvironmentFault for invalid options."""


def stop_of(environment: Environment) -> tuple[str, ...]:
    """Read the environment's attribute `stop`. Raises EnvironmentFault unless it is a sequence of non-empty texts."""
    found = getattr(environment, "stop", ())
    if isinstance(found, str) or not all(isinstance(one, str) and one for one in found):
        raise EnvironmentFault(
            f"its `stop` is {found!r:.200}, not a tuple of texts", fix="Set it to a tuple of non-empty texts"
        )
    return tuple(found)


ENVIRONMENTS = PluginKind("environment", "gcore.environments", "environment.name")
TOOLS = PluginKind("tool", "gcore.tools", "environment.tools.names")

METHODS = ("reset", "step", "close")
"""Methods that every environment must have."""

Tool = Callable[..., str | ToolResult]
"""A tool: a function from the model's argument (text or JSON) to a text for the model, or to a `ToolResult`.

A tool with a second parameter, `pictures`, also gets the paths of the response's pictures: those of the prompt as they
are in the data, then those that tools returned before.
"""

SEEN_PICTURES = "pictures"
"""Name of a tool's parameter for the pictures of the response."""


def find_environment(name: str) -> EnvironmentMaker:
    """Find an environment among the entry points `gcore.environments`.

    Raises PluginFault, with the nearest name if there is none.
    """
    found: EnvironmentMaker = find_plugin(ENVIRONMENTS, name)
    return found


def find_tool(name: str) -> Tool:
    """Find a tool by entry-point name. Raises PluginFault."""
    found: Tool = find_plugin(TOOLS, name)
    check_parameters(TOOLS, name, found, *(("argument", SEEN_PICTURES) if sees_pictures(found) else ("argument",)))
    if inspect.iscoroutinefunction(found):
        raise PluginFault(f"tool {name!r} is asynchronous", where=TOOLS.where, fix="Write `def`, not `async def`")
    return found


def sees_pictures(tool: Tool) -> bool:
    """Whether a tool has the parameter for the pictures of the response."""
    try:
        return SEEN_PICTURES in inspect.signature(tool).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False


class CheckedEnvironment:
    """Wraps an environment and checks its results, because it is foreign code.

    An exception, a result of another type or a reward that is not a number becomes an EnvironmentFault. Otherwise only
    cancellation and the PluginFault of a missing tool are raised. The caller (`episode`) enforces timeouts.
    """

    def __init__(self, name: str, maker: EnvironmentMaker, setting: Setting) -> None:
        self._name = shown_name(name)
        try:
            self._environment: Environment = maker(_its_own(setting))
            self.stop = stop_of(self._environment)
            methods = {method: getattr(self._environment, method, None) for method in METHODS}
        except EnvironmentFault:
            raise
        except (*RAISED, asyncio.CancelledError) as error:  # foreign code
            raise self._raised(error, "when it was created") from error
        for method, found in methods.items():
            if found is None:
                raise self._wrong(f"has no method {method!r}", f"Write `async def {method}`")
            if not _is_asynchronous(found):
                raise self._wrong(f"has a {method!r} that is not async", f"Write `async def {method}`")

    async def reset(self) -> Observation:
        """Call the environment's `reset`, and check its observation."""
        shown = self._observation(await self._asked(lambda: self._environment.reset(), "in reset"), "reset")
        if shown.messages:
            raise self._wrong(
                "returned messages before the first turn", "Return a text, or put the messages into the prompt instead"
            )
        return shown

    async def step(self, turn: Turn, *, chat: bool) -> Observation | Done:
        """Call the environment's `step` after a turn, and check its result. `chat`: whether it may return messages."""
        found = await self._asked(lambda: self._environment.step(turn), f"in step, after turn {turn.number}")
        if isinstance(found, Done):
            return self._done(found)
        shown = self._observation(found, "step")
        if shown.messages and not chat:
            raise self._wrong("returned messages, but prompts are plain text", "Return a text, or set model.chat: true")
        if not shown.text and not shown.messages:
            raise self._wrong("returned an empty observation from step", "Return a text or messages, or Done()")
        return shown

    async def close(self) -> None:
        """Call the environment's `close` after the response."""
        await self._asked(lambda: self._environment.close(), "in close")

    async def _asked(self, ask: Callable[[], Awaitable[Any]], when: str) -> Any:
        try:
            return await ask()
        except (EnvironmentFault, PluginFault):  # PluginFault: a missing tool is not the environment's fault
            raise
        except (*RAISED, asyncio.CancelledError) as error:  # foreign code
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            raise self._raised(error, when) from error

    def _observation(self, found: Any, where: str) -> Observation:
        if not isinstance(found, Observation):
            raise self._wrong(
                f"returned {describe_result(found)} from {where}", "Return an Observation, or Done from step"
            )
        text: Any = found.text
        messages: Any = found.messages
        pictures: Any = found.pictures
        if not isinstance(text, str) or not isinstance(messages, list | tuple):
            raise self._wrong(
                f"returned an observation from {where} without a valid text or list of messages", "Correct it"
            )
        if not all(isinstance(message, Mapping) for message in messages):
            raise self._wrong(
                f"returned messages from {where} that are not mappings", "Give each message a role and a content"
            )
        if text and messages:
            raise self._wrong("returned both text and messages", "Return one of them")
        if not isinstance(pictures, list | tuple) or not all(isinstance(one, PictureRef) for one in pictures):
            raise self._wrong(
                f"returned pictures from {where} that are not those of a tool",
                "Return the `pictures` of a tool's result",
            )
        try:
            return Observation(_spelt(text), tuple(_spelt(message) for message in messages), tuple(pictures))
        except RecursionError:
            raise self._wrong(f"returned messages from {where} that contain themselves", "Correct it") from None

    def _done(self, found: Done) -> Done:
        reward = found.reward
        if reward is None:
            return found
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(f"returned the reward {reward!r:.100}", "Return a number") from error
        if not math.isfinite(number) or abs(number) > LARGEST_REWARD:
            raise self._wrong(f"returned the reward {number}, which is not finite in float32", "Correct it")
        return Done(number)

    def _wrong(self, what: str, fix: str) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self._name!r} {what}", fix=fix)

    def _raised(self, error: BaseException, when: str) -> EnvironmentFault:
        said = f"environment {self._name!r} raised {error_sentence(error)} {when}"
        return EnvironmentFault(said, fix="Correct the environment", trace=plugin_trace(error))


def _its_own(setting: Setting) -> Setting:
    """Copy options and fields, so that the environment cannot change them for the reward or other responses."""
    return replace(setting, options=dict(setting.options), fields=copy.deepcopy(setting.fields))


def _is_asynchronous(method: Any) -> bool:
    """Whether the method is a coroutine function, also behind decorators with `functools.wraps`."""
    return inspect.iscoroutinefunction(inspect.unwrap(method))


def _spelt(value: Any) -> Any:
    """Escape lone surrogates in texts and nested texts, because tokenizers refuse them and a tool may echo a model's
    output.
    """
    match value:
        case str():
            return value.encode("utf-8", errors="backslashreplace").decode("utf-8")
        case Mapping():
            return {_spelt(name): _spelt(one) for name, one in value.items()}
        case list() | tuple():
            return [_spelt(one) for one in value]
    return value
