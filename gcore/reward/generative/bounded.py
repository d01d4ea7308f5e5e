"""The sandbox of what judges are shown: a template runs in the controller, so it may neither take long nor grow.

Before it is compiled, every loop in it is made to count its turns, and every text or list that could double is looked at
before it does. What cannot be counted is refused with its line: macros, recursive loops, blocks that collect what they
write. Filters and methods are those of a list: none that draws (`random`), none that pads or formats to a width. What is
shown is text; anything else is written as JSON. A name that is not there is an error, never nothing.

It bounds what goes wrong by mistake, and what grows without end. It is no jail: whoever sets out to can still make a controller
spend a long time on one question, with thousands of costly filters. Who may submit jobs may do worse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jinja2
from jinja2 import Undefined, nodes, pass_context
from jinja2.runtime import Context
from jinja2.utils import missing
from jinja2.visitor import NodeTransformer

from gcore.prompts.sandbox import Sandbox

LONGEST_TEXT = 1_000_000
"""Characters of a question, and of any text on the way to it."""
MOST_TURNS = 10_000
"""Of all loops of one template together; also the longest list."""
LARGEST_BITS = 1024
"""Of a whole number that a template works out."""
SHOWN_NAMES = 8

_TURNS, _COUNTED, _TOGETHER = "turns left", "counted", "put together"  # the first is no name that a template can write
_FILTERS = """
    abs capitalize count d default dictsort e escape first float int items last length list lower map max min reject
    rejectattr reverse select selectattr sort title trim truncate unique upper wordcount
"""
_PLAIN_METHODS = """
    capitalize count endswith find get index isalnum isalpha isdigit islower isnumeric isspace istitle isupper items keys
    lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper values
"""
_METHODS = frozenset(_PLAIN_METHODS.split())
_REFUSED: dict[type[nodes.Node], str] = {
    nodes.Macro: "a macro",
    nodes.CallBlock: "a call block",
    nodes.AssignBlock: "a set block; write {% set name = ... %}",
    nodes.FilterBlock: "a filter block; write {{ ...|filter }}",
    nodes.Block: "a block",
    nodes.Extends: "extends",
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "import",
}


class TooMuch(jinja2.TemplateRuntimeError):
    """A template writes too much, or takes too many turns."""


class Turns:
    """How many turns the loops of one rendering may still take."""

    def __init__(self) -> None:
        self._left = MOST_TURNS

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, each of them a turn. Raises TooMuch."""
        for item in items:
            if self._left == 0:
                raise TooMuch(f"its loops take more than {MOST_TURNS} turns")
            self._left -= 1
            yield item


class BoundedSandbox(Sandbox):
    """Compiles what a judge is shown. `turns()` is given to each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=_Missing)
        self.finalize = text_of
        own = {"join": _joined, "replace": _replaced, "string": text_of, "tojson": _as_json, "round": _rounded}
        self.filters = {name: self.filters[name] for name in _FILTERS.split()} | own
        self.filters |= {_COUNTED: _counted, _TOGETHER: _together}
        self.globals = {name: self.globals[name] for name in ("dict", "namespace", "raise_exception")}
        self.globals["range"] = _range

    def bounded(self, tree: nodes.Template) -> jinja2.Template:
        """The template of a parsed source. Raises TemplateSyntaxError for what is refused."""
        bounded = _Bounds().visit(tree)
        bounded.set_environment(self)
        return self.from_string(bounded)

    @staticmethod
    def turns() -> dict[str, Any]:
        """What a rendering is given beside its own variables."""
        return {_TURNS: Turns()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`fields.items` is the entry's field of that name, if it has one."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of plain values, only the methods that neither grow nor draw."""
        plain = isinstance(obj, str | int | float | list | tuple | dict)
        return super().is_safe_attribute(obj, attr, value) and (not plain or attr in _METHODS)

    def wrap_str_format(self, value: Any) -> None:
        """`format` is a method like any other, and none of those above."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What can grow, looked at before it does."""
        if operator == "%" and isinstance(left, str):
            raise TooMuch("it formats with %; write text with ~")
        if operator == "+":
            _check_length(_length(left) + _length(right), left, right)
        elif operator == "*":
            _check_length(_length(left) * _number(right) + _length(right) * _number(left), left, right)
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * abs(_number(right)))
        return super().call_binop(context, operator, left, right)


def text_of(value: Any) -> str:
    """How a value is shown: text as it is, anything else as JSON. Raises TooMuch, TypeError, or for what is not there."""
    if isinstance(value, str | Undefined):
        return str(value)
    return _as_json(value)


class NoField(jinja2.UndefinedError):
    """The entry lacks a field."""


class _Missing(jinja2.StrictUndefined):
    """What is not there. It names the field that an entry lacks."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: type[jinja2.TemplateRuntimeError] = jinja2.UndefinedError,
    ) -> None:
        super().__init__(hint, obj, name, NoField if hint is None and isinstance(obj, dict) else exc)

    @property
    def _undefined_message(self) -> str:
        there = self._undefined_obj
        if self._undefined_hint or not isinstance(there, dict):
            return str(super()._undefined_message)
        names = ", ".join(repr(name) for name in list(there)[:SHOWN_NAMES]) or "none"
        more = len(there) - SHOWN_NAMES
        return f"there is no field {self._undefined_name!r}, only {names}{f' and {more} more' if more > 0 else ''}"


class _Bounds(NodeTransformer):
    """Makes loops count, and looks at what `~` puts together."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        refused = _REFUSED.get(type(node))
        if refused is not None:
            raise jinja2.TemplateSyntaxError(f"what a judge is shown cannot have {refused}", node.lineno)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("what a judge is shown cannot have a recursive loop", node.lineno)
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        if node.attr.startswith("_"):
            raise jinja2.TemplateSyntaxError(f"{node.attr!r} is out of bounds", node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, _TOGETHER, [], [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    turns: Turns = context[_TURNS]
    return turns.each(items)


def _together(pieces: Sequence[Any]) -> str:
    return _joined(pieces)


def _joined(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = (value[attribute] for value in values)
    texts, length = [], 0
    for value in values:
        texts.append(text_of(value))
        length += len(texts[-1]) + len(separator)
        _check_length(length)
    return separator.join(texts)


def _replaced(value: Any, old: str, new: str) -> str:
    text = text_of(value)
    _check_length(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new)


def _as_json(value: Any, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= 8:
        raise TooMuch(f"it indents by {indent}; at most 8")
    pieces, length = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value):
        pieces.append(piece)
        length += len(piece)
        _check_length(length)
    return "".join(pieces)


def _rounded(value: float, precision: int = 0) -> float:
    if abs(precision) > 15:
        raise TooMuch(f"it rounds to {precision} places; at most 15")
    return round(value, precision)


def _range(*bounds: int) -> range:
    made = range(*bounds)
    if made[MOST_TURNS:]:
        raise TooMuch(f"it takes a range of more than {MOST_TURNS} numbers")
    return made


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_length(length: int, *made_of: Any) -> None:
    if any(isinstance(value, list | tuple) for value in made_of):
        if length > MOST_TURNS:
            raise TooMuch(f"it makes a list of more than {MOST_TURNS} items")
    elif length > LONGEST_TEXT:
        raise TooMuch(f"it makes more than {LONGEST_TEXT} characters")


def _check_bits(bits: int) -> None:
    if bits > LARGEST_BITS:
        raise TooMuch(f"it works out a whole number of more than {LARGEST_BITS} bits")
