"""The sandbox that templates run in: a model's chat templates, and what judges are shown.

A template is foreign code, so it runs in Jinja's immutable sandbox, sees plain JSON values only, and has no clock: what it
writes must be the same on every node and on every day. Whitespace and extensions are those that transformers gives chat
templates. How much a template may write is not bounded here; `gcore.reward.generative.bounded` does that for those that run
in a controller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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


UNCOMPILED = (jinja2.TemplateSyntaxError, SyntaxError, ValueError, RecursionError, MemoryError)
"""What comes of a template that cannot be compiled: by Jinja, or by Python, which is handed what Jinja makes of it."""


def problem_of(error: BaseException) -> str:
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
