"""Chat templates, their sandbox, and tool definitions.

*Templates.* A template is foreign code. It runs in Jinja's immutable sandbox, gets only plain JSON values, and cannot
read the time, because a prompt must be the same on every node and day. A spec sets its variables
(`template_variables`), which transformers passes as keywords: `enable_thinking: false`. The variable `strftime_now` is
a date, such as `2026-01-01`; the template then has a function of that name that formats this date. Without it the
function is undefined, and many templates use a built-in date. Whitespace control, filters and extensions are as in
transformers. This module does not limit the size of a template's output; `gcore.reward.judges.template` does that for
templates that run in a controller.

*Tools.* A source may name a JSON file with a list of tool definitions. An entry whose field `tools` is not null uses
its own list instead, which may be empty. There the list may also be a JSON string, as in saved datasets, whose columns
cannot hold objects of different types. Definitions are passed to the chat template unchanged.
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
"""Exceptions that rendering a template may raise if the template does not accept its input."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the names that model templates expect."""

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
"""Names that every template can use without a variable of the spec."""

UNCOMPILED = (jinja2.TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError)
"""Exceptions that compiling a template may raise: Jinja's, and Python's for the code that Jinja generates."""


def template_problem(error: BaseException) -> str:
    """Return why a template does not compile, with the line if it is known. `error`: one of `UNCOMPILED`."""
    match error:
        case jinja2.TemplateSyntaxError():
            return f"line {error.lineno}: {error.message}"
        case RecursionError() | MemoryError():
            return "nested too deeply"
        case SyntaxError():  # its line number refers to the code that Jinja generated
            return error.msg
    return str(error)


class _PlainNamespace(Namespace):
    """A namespace that rejects names with a leading underscore, which would allow an escape from the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # positional, because a template may use "self" as an attribute name
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
    """Compile a chat template. `where`: its file, for errors. Raises DataError with the line of a mistake."""
    try:
        return Sandbox(extensions=[_GenerationBlock]).from_string(source)
    except UNCOMPILED as error:
        raise DataError(
            f"the chat template is not valid ({template_problem(error)})",
            where=where,
            fix="Correct it, or name another in `template`",
        ) from error


CLOCK = "strftime_now"
"""Name of the function that templates call to format the present date, and of the variable that sets this date."""


def check_variables(sources: Iterable[str], variables: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a variable that none of the templates reads, because it would have no effect.

    `sources`: texts of templates that compile.
    """
    parse = Sandbox(extensions=[_GenerationBlock]).parse
    reads = {name for source in sources for name in meta.find_undeclared_variables(parse(source))} - _OWN_NAMES
    unread = sorted(variables.keys() - reads)
    if unread:
        raise DataError(
            f"the chat template does not read the variable {unread[0]!r}{did_you_mean(unread[0], reads)}",
            where=where,
            fix=f"Remove it from template_variables (the template reads {', '.join(sorted(reads)) or 'none'})",
        )


def bind_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables as a template gets them: the date `strftime_now` becomes a function that formats it.

    Raises DataError if it is not a date.
    """
    bound = dict(variables)
    if CLOCK in bound:
        try:
            bound[CLOCK] = datetime.fromisoformat(bound[CLOCK]).strftime
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the template variable {CLOCK} is {bound[CLOCK]!r:.50}, which is not a date",
                fix="Write a date such as 2026-01-01",
            ) from error
    return bound


def explain_failure(error: Exception) -> str:
    """Return what a user can do about a template that failed with `error` when it rendered a prompt."""
    if isinstance(error, jinja2.UndefinedError) and CLOCK in str(error):
        return f"The template needs a date: set template_variables: {{{CLOCK}: 2026-01-01}} with a date of your choice"
    return "Change the messages, the template, or template_variables"


def read_template(path: Path) -> str:
    """Read a user's template file. Raises DataError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the chat template ({_reason(error)})", where=str(path), fix="Name a Jinja file in `template`"
        ) from error


def template_of_model(folder: Path, settings: Mapping[str, Any], *, for_tools: bool) -> tuple[str, str]:
    """Return the text of a model's chat template, and the path of its file; found as in transformers.

    `settings`: content of tokenizer_config.json. `for_tools`: prefer the template named `tool_use` to `default`. Raises
    DataError if there is none.
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
            "the job uses chat messages, but the model's tokenizer has no chat template",
            where=str(folder),
            fix="Set model.chat: false, put a chat_template.jinja into the folder, or name one in `template`",
        )
    return found


class _GenerationBlock(Extension):
    """The block `{% generation %}`, with which templates mark the assistant's text for training. Rendered as its
    content.
    """

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
    """Read a JSON file with a list of at least one tool definition. Raises DataError."""
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
    """Return the tool definitions of an entry: those in its field `tools`, or else `default`. Raises DataError."""
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
        return "not a list"
    for number, tool in enumerate(value, 1):
        if not isinstance(tool, dict):
            return f"a list whose item {number} is not an object"
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"a list whose item {number} has no name"
    return None
