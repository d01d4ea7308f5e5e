"""Chat templates, the sandbox that templates run in, and tool definitions.

A template is foreign code: it runs in Jinja's immutable sandbox, sees plain JSON values only, and has no clock, because a prompt must
be the same on every node and on every day. A spec gives it variables (`template_variables`), which transformers takes
as keywords: `enable_thinking: false`. The variable `strftime_now` is a date, such as `2026-01-01`: the template then has a function
of that name, which formats this date. Without it the function is undefined, and many templates fall back to the date they were made
with. Whitespace, filters and extensions are those that transformers gives templates. How much a template
may write is not bounded here; `gcore.reward.judges.template` does that for templates that run in a controller.

A source names a JSON file with a list of tool definitions. An entry with a field `tools` that is not null has its own in their
place, none if the list is empty; there the list may also be a JSON string, as in saved datasets, whose columns cannot hold
objects of different forms. Definitions go to the chat template as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gcore.errors import DataError, did_you_mean

FOREIGN_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What a template raises that does not take what it is given."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with what templates for models expect to find in it."""

    def __init__(
        self, *, extensions: Sequence[type[Extension]] = (), undefined: type[jinja2.Undefined] = jinja2.Undefined
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[*extensions, "jinja2.ext.loopcontrols"],
            undefined=undefined,
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["namespace"] = _PlainNamespace


_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", "raise_exception", "namespace", "range", "dict"))
"""What a template has without being given it."""

UNCOMPILED = (jinja2.TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError)
"""What comes of a template that cannot be compiled: by Jinja, or by Python, which is handed what Jinja makes of it."""


def template_problem(error: BaseException) -> str:
    """What is wrong with a template that does not compile, with its line if that is known; for messages."""
    match error:
        case jinja2.TemplateSyntaxError():
            return f"line {error.lineno}: {error.message}"
        case RecursionError() | MemoryError():
            return "nested too deep"
        case SyntaxError():  # its line is one of the code that Jinja wrote
            return error.msg
    return str(error)


class _PlainNamespace(Namespace):
    """A namespace whose names are plain: what begins with an underscore would lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so written because a template may name an attribute "self"
        Namespace.__init__(self, {_plain_name(name): value for name, value in dict(*rest, **kwargs).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_plain_name(name), value)


def _plain_name(name: Any) -> Any:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"unsafe name {name!r} in a namespace")
    return name


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str, where: str) -> jinja2.Template:
    """A chat template, ready to render. Raises DataError with the line of its mistake."""
    try:
        return Sandbox(extensions=[_GenerationBlock]).from_string(source)
    except UNCOMPILED as error:
        raise DataError(
            f"the chat template is not valid ({template_problem(error)})",
            where=where,
            fix="Correct it, or name another in `template`",
        ) from error


CLOCK = "strftime_now"
"""The function with which templates ask for the date."""


def check_variables(sources: Iterable[str], variables: Mapping[str, Any], where: str) -> None:
    """Raises DataError for a variable that none of a model's templates, which compile, reads: it would change nothing."""
    parse = Sandbox(extensions=[_GenerationBlock]).parse
    reads = {name for source in sources for name in meta.find_undeclared_variables(parse(source))} - _OWN_NAMES
    unread = sorted(variables.keys() - reads)
    if unread:
        raise DataError(
            f"the chat template reads no variable {unread[0]!r}{did_you_mean(unread[0], reads)}",
            where=where,
            fix=f"Remove it from template_variables (the template reads {', '.join(sorted(reads)) or 'none'})",
        )


def bind_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables as a template reads them: the date `strftime_now` is the function that formats it. Raises DataError if it is no date."""
    bound = dict(variables)
    if CLOCK in bound:
        try:
            bound[CLOCK] = datetime.fromisoformat(bound[CLOCK]).strftime
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the template variable {CLOCK} is {bound[CLOCK]!r:.50}, which is no date",
                fix="Write one such as 2026-01-01",
            ) from error
    return bound


def explain_failure(error: Exception) -> str:
    """What to do about a template that failed while it rendered."""
    if isinstance(error, jinja2.UndefinedError) and CLOCK in str(error):
        return f"The template asks for the date: set template_variables: {{{CLOCK}: 2026-01-01}} with a date of your choice"
    return "Change the messages, the template, or template_variables"


def read_template(path: Path) -> str:
    """The text of a template of the user's own. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the chat template ({_reason(error)})", where=str(path), fix="Name a Jinja file in `template`"
        ) from error


def template_of_model(folder: Path, settings: Mapping[str, Any], *, for_tools: bool) -> tuple[str, str]:
    """A model's chat template and where it stands, as transformers finds it. Raises DataError if it has none.

    A model may have several, by name: `tool_use`, if there is one, counts where tools are given, else `default`.
    """
    named: dict[str, tuple[str, str]] = {}
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if file.is_file():
            named[name] = (read_template(file), str(file))
    if not named:
        where = str(folder / "tokenizer_config.json")
        written = settings.get("chat_template")
        several = written if isinstance(written, list) else [{"name": "default", "template": written}]
        for item in several:
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                named[str(item.get("name"))] = (item["template"], where)
    found = (named.get("tool_use") if for_tools else None) or named.get("default")
    if found is None:
        raise DataError(
            "the job shows prompts as chat messages, and the model's tokenizer has no chat template",
            where=str(folder),
            fix="Set model.chat: false, put a chat_template.jinja into the folder, or name one in `template`",
        )
    return found


class _GenerationBlock(Extension):
    """`{% generation %}`, with which templates mark the assistant's part for training: shown as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"


TOOLS_FIELD = "tools"
ToolDefinitions = tuple[dict[str, Any], ...]
_FIX = 'Write a list of objects such as [{"type": "function", "function": {"name": ..., "parameters": ...}}]'


def read_tools(path: Path) -> ToolDefinitions:
    """The definitions in a file; at least one. Raises DataError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(
            f"cannot read the tool definitions ({reason})", where=str(path), fix="Name a JSON file in `tools`"
        ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"the tool definitions are not JSON ({reason})", where=where, fix=_FIX) from error
    problem = _problem(value) or (None if value else "an empty list")
    if problem is not None:
        raise DataError(f"the tool definitions are {problem}", where=str(path), fix=_FIX)
    return tuple(value)


def tools_of_entry(fields: Mapping[str, Any], default: ToolDefinitions) -> ToolDefinitions:
    """The tools of one prompt: its entry's own, else `default`. Raises DataError."""
    value = fields.get(TOOLS_FIELD)
    if value is None:
        return default
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"field {TOOLS_FIELD!r} is a string that is not JSON", fix=_FIX) from error
        if value is None:
            return default
    problem = _problem(value)
    if problem is not None:
        raise DataError(f"field {TOOLS_FIELD!r} is {problem}", fix=_FIX)
    return tuple(value)


def _problem(value: Any) -> str | None:
    if not isinstance(value, list):
        return "no list"
    for number, tool in enumerate(value, 1):
        if not isinstance(tool, dict):
            return f"a list whose item {number} is no object"
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"a list whose item {number} has no name"
    return None
