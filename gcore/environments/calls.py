"""How a model writes that it wants a tool, and how it is told what came of it. Pure.

    tags    `<<12*34>>`: what stands between two texts is the argument of the one tool; the result is put behind, between two more
    json    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as models of the Qwen and Hermes families write it; the result
            comes as a message of the role `tool`, or where prompts are plain text, within `<tool_response>`

A turn ends at the closing text, which stays in it. So a call is what stands between the last opening text and the closing one at a
turn's end; a closing text without an opening one calls nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gcore.environments.api import EnvironmentFault, Observation, Said

LONGEST_RESULT = 2000
"""Characters of what a tool says that a model is shown."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that a model wants. `problem`: why it cannot be had as it is written; else empty."""

    name: str
    argument: str
    problem: str = ""


class Form(Protocol):
    """One way of writing calls."""

    @property
    def stop(self) -> str:
        """The text that ends a call, and a turn."""
        ...

    def call(self, text: str) -> Call | None:
        """The call that a turn ends in."""
        ...

    def result(self, call: Call, said: Said) -> Observation:
        """What the model is shown of it."""
        ...


@dataclass(frozen=True, slots=True)
class Tags:
    """Calls of one tool between two texts."""

    tool: str
    open: str
    close: str
    before: str = ""
    after: str = ""
    failed: str | None = None
    """What is shown of a tool that failed, for a model whose tokenizer has no letters; None: the reason."""

    @property
    def stop(self) -> str:
        """The text that ends a call."""
        return self.close

    def call(self, text: str) -> Call | None:
        """What stands between the last opening text and the closing one."""
        inner = _between(text, self.open, self.close)
        return None if inner is None else Call(self.tool, inner)

    def result(self, call: Call, said: Said) -> Observation:
        """Behind the call."""
        text = self.failed if said.failed and self.failed is not None else said.text[:LONGEST_RESULT]
        return Observation(f"{self.before}{text}{self.after}")


@dataclass(frozen=True, slots=True)
class Json:
    """Calls of any tool as JSON."""

    tools: tuple[str, ...]
    chat: bool
    open: str = "<tool_call>"
    close: str = "</tool_call>"

    @property
    def stop(self) -> str:
        """The text that ends a call."""
        return self.close

    def call(self, text: str) -> Call | None:
        """The name, and the arguments: of one argument that is a text, that text; else all of them as JSON."""
        inner = _between(text, self.open, self.close)
        if inner is None:
            return None
        try:
            tree = json.loads(inner)
        except (ValueError, RecursionError):
            return Call("", "", "the call is no JSON")
        if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
            return Call("", "", 'the call is no object with a "name"')
        name = tree["name"]
        if name not in self.tools:
            return Call("", "", f"there is no tool {name[:100]!r}; there are {', '.join(self.tools)}")
        return Call(name, _argument(tree.get("arguments", {})))

    def result(self, call: Call, said: Said) -> Observation:
        """As a message of the tool."""
        text = said.text[:LONGEST_RESULT]
        if self.chat:
            return Observation(messages=({"role": "tool", "name": call.name or "tool", "content": text},))
        return Observation(f"\n<tool_response>\n{text}\n</tool_response>\n")


def form_of(options: Mapping[str, Any], tools: tuple[str, ...], *, chat: bool) -> Form:
    """What the options of the environment `tools` say. Raises EnvironmentFault."""
    form = options.get("form", "json")
    known = {"tags": ("open", "close", "before", "after", "failed"), "json": ()}
    if form not in known:
        raise EnvironmentFault(f"form {form!r} is not known", where="environment.options", fix="Use tags or json")
    for name in options:
        if name not in ("form", *known[form]):
            listed = ", ".join(("form", *known[form]))
            raise EnvironmentFault(
                f"environment 'tools' has no option {name!r} with form {form}",
                where="environment.options",
                fix=f"Known: {listed}",
            )
    if not tools:
        raise EnvironmentFault(
            "environment 'tools' has no tool", where="environment.tools", fix="Name one, such as calculator"
        )
    if form == "json":
        return Json(tools, chat)
    texts = {"open": "<<", "close": ">>", "before": "", "after": ""}
    texts |= {name: value for name, value in options.items() if name != "form"}
    for name, value in texts.items():
        if not isinstance(value, str) or (name in ("open", "close") and not value):
            raise EnvironmentFault(f"option {name!r} is {value!r}, no text", where="environment.options")
    if texts["open"] == texts["close"]:
        raise EnvironmentFault(
            f"open and close are both {texts['open']!r}", where="environment.options", fix="Give texts that differ"
        )
    if len(tools) > 1:
        raise EnvironmentFault(
            f"between tags stands the argument of one tool, and {len(tools)} are named",
            where="environment.tools",
            fix="Name one, or use form: json",
        )
    return Tags(tools[0], **texts)


def _between(text: str, opening: str, closing: str) -> str | None:
    """What stands between the first closing text and the last opening one before it."""
    end = text.find(closing, text.find(opening) + len(opening)) if opening in text else -1
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(opening) : end]


def _argument(arguments: Any) -> str:
    if isinstance(arguments, dict) and len(arguments) == 1:
        (only,) = arguments.values()
        if isinstance(only, str):
            return only
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
