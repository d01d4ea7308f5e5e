"""Chat templates: where a model keeps them, and how one becomes text.

A template is foreign code, so it runs in a sandbox (`gcore.prompts.sandbox`), sees plain JSON values only, and has no clock
(`strftime_now` is undefined, and those that ask for the date fall back to the one they were made with): a prompt must be
the same on every node and on every day. Whitespace, filters and extensions are those that transformers gives templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from gcore.errors import DataError
from gcore.prompts.sandbox import UNCOMPILED, Sandbox, problem_of


def compile_template(source: str, where: str) -> jinja2.Template:
    """A chat template, ready to render. Raises DataError with the line of its mistake."""
    try:
        return Sandbox(extensions=[_GenerationBlock]).from_string(source)
    except UNCOMPILED as error:
        raise DataError(
            f"the chat template is not valid ({problem_of(error)})",
            where=where,
            fix="Correct it, or name another in `template`",
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


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not UTF-8 text"
