"""Formats in which a model calls tools and gets their results. Pure.

    tags    `<<12*34>>`: the text between two tags is the argument of the only tool; the result follows, between two other tags
    json    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of the Qwen and Hermes families; the result is
            a message with the role `tool` or, if prompts are plain text, is enclosed in `<tool_response>`

Pictures of a result follow its text. A turn ends at the closing text, which remains in it. A call is the text between
the last opening text and the closing one at the end of a turn. A closing text without an opening one is not a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, Protocol

from gcore.rollout.environments.api import (
    PICTURE,
    BadArgument,
    Done,
    EnvironmentFault,
    Observation,
    Said,
    Setting,
    Turn,
)

LONGEST_RESULT = 2000
"""Maximum length of a tool's result in characters."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A model's call of the tool `name`. `problem`: why the call is invalid, or empty."""

    name: str
    argument: str
    problem: str = ""


class CallFormat(Protocol):
    """A format in which the model writes tool calls and reads their results."""

    @property
    def stop(self) -> str:
        """The text that ends a call, and a turn."""
        ...

    def call(self, text: str) -> ToolCall | None:
        """Parse the call at the end of a turn with this text; None without a call."""
        ...

    def result(self, call: ToolCall, said: Said) -> Observation:
        """Format the tool's result as the observation that the model sees next."""
        ...


@dataclass(frozen=True, slots=True)
class TagCallFormat:
    """Calls of one tool between two tags."""

    tool: str
    open: str
    close: str
    before: str = ""
    after: str = ""
    failed: str | None = None
    """Text that the model sees if the tool failed, for tokenizers without letters. None: the model sees the reason."""

    @property
    def stop(self) -> str:
        """The text that ends a call."""
        return self.close

    def call(self, text: str) -> ToolCall | None:
        """Return the text between the last opening tag and the closing one as the call's argument; None without a call."""
        inner = _between(text, self.open, self.close)
        return None if inner is None else ToolCall(self.tool, inner)

    def result(self, call: ToolCall, said: Said) -> Observation:
        """Put the result between the texts `before` and `after`."""
        text = self.failed if said.failed and self.failed is not None else said.text[:LONGEST_RESULT]
        return Observation(f"{self.before}{_with_pictures(text, said)}{self.after}", pictures=said.pictures)


@dataclass(frozen=True, slots=True)
class JsonCallFormat:
    """Calls of any of `tools` as JSON. `chat`: results are messages, rendered by the chat template."""

    tools: tuple[str, ...]
    chat: bool
    open: str = "<tool_call>"
    close: str = "</tool_call>"

    @property
    def stop(self) -> str:
        """The text that ends a call."""
        return self.close

    def call(self, text: str) -> ToolCall | None:
        """Parse the JSON of a call. A single text argument is passed to the tool as text, other arguments as JSON."""
        inner = _between(text, self.open, self.close)
        if inner is None:
            return None
        try:
            tree = json.loads(inner)
        except (ValueError, RecursionError):
            return ToolCall("", "", "the call is no JSON")
        if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
            return ToolCall("", "", 'the call is no object with a "name"')
        name = tree["name"]
        if name not in self.tools:
            return ToolCall("", "", f"there is no tool {name[:100]!r}; there are {', '.join(self.tools)}")
        return ToolCall(name, _argument(tree.get("arguments", {})))

    def result(self, call: ToolCall, said: Said) -> Observation:
        """Format the result as a message with the role `tool`, or within `<tool_response>` if prompts are plain text."""
        text = said.text[:LONGEST_RESULT]
        if self.chat:
            content = [{"type": "text", "text": text}, *({"type": "image"} for _ in said.pictures)]
            message = {"role": "tool", "name": call.name or "tool", "content": content if said.pictures else text}
            return Observation(messages=(message,), pictures=said.pictures)
        inner = _with_pictures(text, said)
        return Observation(f"\n<tool_response>\n{inner}\n</tool_response>\n", pictures=said.pictures)


def call_format(options: Mapping[str, Any], tools: tuple[str, ...], *, chat: bool) -> CallFormat:
    """Create the call format from the options of the environment `tools`. Raises EnvironmentFault for invalid ones.

    `tools`: names of the tools. `chat`: whether prompts use a chat template.
    """
    form = options.get("form", "json")
    known = {"tags": ("open", "close", "before", "after", "failed"), "json": ()}
    if form not in known:
        raise EnvironmentFault(f"unknown form {form!r}", where="environment.options", fix="Use tags or json")
    for name in options:
        if name not in ("form", *known[form]):
            listed = ", ".join(("form", *known[form]))
            raise EnvironmentFault(
                f"environment 'tools' has no option {name!r} with form {form}",
                where="environment.options",
                fix=f"Known options: {listed}",
            )
    if not tools:
        raise EnvironmentFault(
            "environment 'tools' has no tool", where="environment.tools", fix="Name one, such as calculator"
        )
    if form == "json":
        return JsonCallFormat(tools, chat)
    texts = {"open": "<<", "close": ">>", "before": "", "after": ""}
    texts |= {name: value for name, value in options.items() if name != "form"}
    for name, value in texts.items():
        if not isinstance(value, str) or (name in ("open", "close") and not value):
            raise EnvironmentFault(f"option {name!r} is {value!r}, not a text", where="environment.options")
    if texts["open"] == texts["close"]:
        raise EnvironmentFault(
            f"open and close are both {texts['open']!r}", where="environment.options", fix="Set them to different texts"
        )
    if len(tools) > 1:
        raise EnvironmentFault(
            f"form: tags supports one tool, but {len(tools)} are named",
            where="environment.tools",
            fix="Name one, or use form: json",
        )
    return TagCallFormat(tools[0], **texts)


def _with_pictures(text: str, said: Said) -> str:
    """The text of a result, followed by the places of its pictures."""
    return text.replace(PICTURE, "") + PICTURE * len(said.pictures) if said.pictures else text


def _between(text: str, opening: str, closing: str) -> str | None:
    """The text between the first closing text and the last opening one before it, or None."""
    end = text.find(closing, text.find(opening) + len(opening)) if opening in text else -1
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(opening) : end]


def _argument(arguments: Any) -> str:
    if isinstance(arguments, dict) and len(arguments) == 1:
        (only,) = arguments.values()
        if isinstance(only, str):
            return only
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class ToolEnvironment:
    """The environment `tools`: a model that may call tools in each turn, until a turn ends without a call.

        environment: {name: tools, tools: {names: [calculator]}, options: {form: tags, open: "<<", close: ">>"}}

    `gcore.rollout.environments.pool` runs the tools. The environment gives no reward; the spec's reward scores the
    answer.
    """

    def __init__(self, setting: Setting) -> None:
        self._tools = setting.tools
        self._form = call_format(setting.options, setting.tools.names, chat=setting.chat)
        self.stop = (self._form.stop,)

    async def reset(self) -> Observation:
        """Return an empty observation, because the model has seen the prompt."""
        return Observation()

    async def step(self, turn: Turn) -> Observation | Done:
        """Run the tool and return its result if the turn ends with a call; otherwise end the response."""
        call = self._form.call(turn.text) if turn.finish_reason == "stop" else None
        if call is None:
            return Done()
        if call.problem:
            return self._form.result(call, Said(f"error: {call.problem}", failed=True))
        return self._form.result(call, await self._tools.call(call.name, call.argument))

    async def close(self) -> None:
        """Do nothing."""


MOST_CHARACTERS, MOST_DIGITS, MOST_DEPTH = 256, 64, 32
PLACES = 12
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|[-+*/()])", re.ASCII)
_LARGEST = 10**MOST_DIGITS


class NoSum(BadArgument):
    """The argument of `calculator` is not a sum that can be computed. The model gets the message, which says why."""


def calculator(argument: str) -> str:
    """The tool `calculator`: sums with + - * / and parentheses of integers and decimals. Raises NoSum.

    It has its own parser, so text written by a model is never evaluated as code. Computation is exact with fractions;
    the result is written as a decimal, rounded to twelve places if it has no finite expansion. The number of
    characters, digits and nested parentheses is limited.
    """
    if len(argument) > MOST_CHARACTERS:
        raise NoSum(f"the sum has {len(argument)} characters; at most {MOST_CHARACTERS} are allowed")
    parser = _Parser(_tokens(argument))
    value = parser.sum(0)
    if parser.rest:
        raise NoSum(f"unexpected {parser.rest[0]!r} after a complete sum")
    return _written(value)


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NoSum(f"{text[at:].strip()[:1]!r} is not allowed in a sum")
        found.append(match.group(1))
        at = match.end()
    return found


class _Parser:
    """Recursive descent parser: sums, products, numbers."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.rest and self.rest[0] in "+-":
            value = _bounded(value + self._product(depth) if self._take() == "+" else value - self._product(depth))
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._number(depth)
        while self.rest and self.rest[0] in "*/":
            if self._take() == "*":
                value = _bounded(value * self._number(depth))
                continue
            divisor = self._number(depth)
            if divisor == 0:
                raise NoSum("nothing can be divided by zero")
            value = _bounded(value / divisor)
        return value

    def _number(self, depth: int) -> Fraction:
        if depth > MOST_DEPTH:
            raise NoSum(f"signs and parentheses are nested more than {MOST_DEPTH} levels deep")
        if not self.rest:
            raise NoSum("the sum is incomplete: a number is missing at its end")
        token = self._take()
        if token in "+-":
            value = self._number(depth + 1)
            return value if token == "+" else -value
        if token == "(":
            value = self.sum(depth + 1)
            if not self.rest or self._take() != ")":
                raise NoSum("a parenthesis is not closed")
            return value
        if token in ("*", "/", ")"):
            raise NoSum(f"unexpected {token!r} where a number should be")
        return _bounded(Fraction(token))

    def _take(self) -> str:
        return self.rest.pop(0)


def _bounded(value: Fraction) -> Fraction:
    if abs(value.numerator) >= _LARGEST * value.denominator or value.denominator >= _LARGEST:
        raise NoSum(f"a number has more than {MOST_DIGITS} digits")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = 2 * MOST_DIGITS + PLACES
        exact = Decimal(value.numerator) / Decimal(value.denominator)
        rounded = exact.quantize(Decimal(1).scaleb(-PLACES))
    text = f"{rounded:f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
