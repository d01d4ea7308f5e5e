"""Chat templates: where a model keeps them, and how one becomes text.

A template is foreign code, so it runs in Jinja's immutable sandbox, sees plain JSON values only, and has no clock
(`strftime_now` is undefined, and those that ask for the date fall back to the one they were made with): a prompt must be
the same on every node and on every day. Whitespace, filters and extensions are those that transformers gives templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gcore.errors import DataError

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
"""What a template raises that does not take its prompt."""


def compile_template(source: str, where: str) -> jinja2.Template:
    """A chat template, ready to render. Raises DataError with the line of its mistake."""
    try:
        return _environment().from_string(source)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        reason = f"line {error.lineno}: {error.message}" if isinstance(error, jinja2.TemplateSyntaxError) else "nested"
        raise DataError(
            f"the chat template is not valid ({reason})", where=where, fix="Correct it, or name another in `template`"
        ) from error


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


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"
