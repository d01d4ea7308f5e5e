"""Judge templates: render the question for a judge in a sandbox that bounds time and size.

A template is checked when it is compiled, before any response exists: its syntax, that it uses only known names, and
that it shows the response. Later errors concern the entry, such as a missing field. `prompt` is the text that the
policy got, including chat-template tokens; the entry's own text is in `fields`. The judge checks whether a question
fits its context length.

A template runs in the controller, so it must neither take long nor grow without bound. Before compilation every loop is
changed to count its iterations, and every operation that can grow text or lists is changed to check the size first.
Constructs that cannot be counted (macros, recursive loops, capturing blocks) are refused with their line. Only listed
filters and methods are allowed: none that samples (`random`), pads or formats to a width. Values other than text are
rendered as JSON. An unknown name is an error. A list is counted with everything inside it, because a nested list that
contains itself repeatedly is small in memory but takes exponential time to compare or hash. The sizes of arguments of
filters and methods are summed up, because these run in C and block the controller. The sandbox protects against
mistakes and unbounded growth. It is not a security boundary: a hostile template can still take a few seconds per
question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import Undefined, nodes, pass_context
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.utils import missing
from jinja2.visitor import NodeTransformer

from gcore.config.reward import LONGEST_TEMPLATE, JudgeSpec
from gcore.data.templates import FOREIGN_FAILURES, UNCOMPILED, Sandbox, template_problem
from gcore.errors import SpecError, did_you_mean
from gcore.reward.api import Response
from gcore.reward.judges.types import IMAGE_MARK, JudgeError, Unjudgeable
from gcore.types import PictureRef, Prompt

LONGEST_TEXT = 1_000_000
"""Maximum length of a question, and of any intermediate text, in characters."""

MOST_TURNS = 10_000
"""Maximum number of iterations of all loops of one rendering; also the maximum size of a list including nested items.
"""

MOST_WORK = 20_000_000
"""Maximum number of characters and items passed to the filters and methods of one rendering."""

ITEM_WORK = 4
"""Cost of a list item, in characters of `MOST_WORK`."""

LARGEST_BITS = 1024
"""Maximum size in bits of an integer that a template computes."""

SHOWN_NAMES = 8
_TURNS, _COUNTED, _TOGETHER = "turns left", "counted", "put together"  # templates cannot use the first as a variable
_MADE, _LONG, _WHOLE = "made", "as long", "with all in it"

_QUICK_FILTERS = "abs count d default first float int items last length list reverse round"
"""Filters that do not read the items of their input."""

_QUICK = frozenset(_QUICK_FILTERS.split())

_HOLDERS: tuple[type[Any], ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))
"""Container types; their size includes all nested items."""

_LONG_ONES: tuple[type[Any], ...] = (str, *_HOLDERS)

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


class TemplateTooLarge(jinja2.TemplateRuntimeError):
    """A template produces too much text, too large a list or number, or takes too many iterations."""


class RenderBudget:
    """Remaining loop iterations and filter input of one rendering."""

    def __init__(self) -> None:
        self._left = MOST_TURNS
        self._work = MOST_WORK

    def works(self, work: int) -> None:
        """Subtract an input of the size `work` (in characters) from the budget. Raises TemplateTooLarge if it is spent."""
        self._work -= work
        if self._work < 0:
            raise TemplateTooLarge(f"its filters and methods process more than {MOST_WORK} characters")

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items` and subtract an iteration for each. Raises TemplateTooLarge if none is left."""
        for item in items:
            if self._left == 0:
                raise TemplateTooLarge(f"its loops take more than {MOST_TURNS} iterations")
            self._left -= 1
            yield item


class BoundedSandbox(Sandbox):
    """Compiles judge templates with bounds. Each rendering needs its own budget from `turns()`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=_Missing)
        self.finalize = render_value
        own = {"join": _joined, "replace": _replaced, "string": render_value, "tojson": _as_json, "round": _rounded}
        own["list"] = _listed
        self.filters = {name: self.filters[name] for name in _FILTERS.split()} | own
        self.filters |= {_COUNTED: _counted, _TOGETHER: _joined, _MADE: _made, _LONG: _long, _WHOLE: _whole}
        self.globals = {name: self.globals[name] for name in ("namespace", "raise_exception")}
        self.globals |= {"dict": _dict, "range": _range}

    def bounded(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template. Raises TemplateSyntaxError for refused constructs."""
        bounded = _Bounds().visit(tree)
        bounded.set_environment(self)
        return self.from_string(bounded)

    @staticmethod
    def turns() -> dict[str, Any]:
        """Return a fresh budget, as the template variable that one rendering needs in addition to its own variables."""
        return {_TURNS: RenderBudget()}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute. Keys of a dict come first: `fields.items` is the entry's field `items`, if it has one."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow only listed methods of plain values."""
        plain = isinstance(obj, str | int | float | list | tuple | dict)
        return super().is_safe_attribute(obj, attr, value) and (not plain or attr in _METHODS)

    def wrap_str_format(self, value: Any) -> None:
        """Disable Jinja's special handling of `str.format`, so that `is_safe_attribute` refuses it as an unlisted
        method.
        """

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run a binary operation, after a check of the size that its result would have. Raises TemplateTooLarge."""
        if operator == "%" and isinstance(left, str):
            raise TemplateTooLarge("it formats with %; join text with ~ instead")
        if operator == "+":
            (items, letters), (more, others) = _size(context, left), _size(context, right)
            _check_size(items + more, letters + others)
        elif operator == "*":
            (items, letters), (more, others) = _size(context, left), _size(context, right)
            _check_size(
                items * _number(right) + more * _number(left), letters * _number(right) + others * _number(left)
            )
            _check_bits(_bits(left) + _bits(right))
        elif operator == "**":
            _check_bits(_bits(left) * abs(_number(right)))
        return super().call_binop(context, operator, left, right)


def render_value(value: Any) -> str:
    """Text of a value: text unchanged, anything else as JSON.

    Raises TemplateTooLarge, TypeError, or an error for a missing value.
    """
    if isinstance(value, str | Undefined):
        return str(value)
    return _as_json(value)


class MissingField(jinja2.UndefinedError):
    """The prompt's entry lacks a field that the template uses."""


class _Missing(jinja2.StrictUndefined):
    """Jinja's undefined value. Its error message names the missing field and the existing ones."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: type[jinja2.TemplateRuntimeError] = jinja2.UndefinedError,
    ) -> None:
        super().__init__(hint, obj, name, MissingField if hint is None and isinstance(obj, dict) else exc)

    @property
    def _undefined_message(self) -> str:
        there = self._undefined_obj
        if self._undefined_hint or not isinstance(there, dict):
            return str(super()._undefined_message)
        names = ", ".join(repr(name) for name in list(there)[:SHOWN_NAMES]) or "none"
        more = len(there) - SHOWN_NAMES
        return f"there is no field {self._undefined_name!r}; the fields are {names}{f' and {more} more' if more > 0 else ''}"


class _Bounds(NodeTransformer):
    """Rewrites a template so that loops count iterations, and created values and filter or method inputs are checked."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        refused = _REFUSED.get(type(node))
        if refused is not None:
            raise jinja2.TemplateSyntaxError(f"a judge template cannot contain {refused}", node.lineno)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("a judge template cannot contain a recursive loop", node.lineno)
        self.generic_visit(node)
        node.iter = _through(_COUNTED, node.iter)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _through(_MADE, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        # Another context than "load" is the target of a loop, such as `for a, b in ...`.
        return _through(_MADE, node) if node.ctx == "load" else node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            node.node = _through(_LONG if node.name in _QUICK else _WHOLE, node.node)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.node, nodes.Getattr | nodes.Getitem):
            node.node.node = _through(_LONG, node.node.node)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:
        if node.attr.startswith("_"):
            raise jinja2.TemplateSyntaxError(f"attribute {node.attr!r} is not allowed", node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _through(_TOGETHER, nodes.List(node.nodes, lineno=node.lineno))


def _through(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    return _turns(context).each(items)


@pass_context
def _made(context: Context, value: Any) -> Any:
    _size(context, value)
    return value


@pass_context
def _long(context: Context, value: Any) -> Any:
    _turns(context).works(len(value) if isinstance(value, _LONG_ONES) else 0)
    return value


@pass_context
def _whole(context: Context, value: Any) -> Any:
    turns, left = _turns(context), [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            turns.works(len(one))
        elif isinstance(one, _HOLDERS):
            turns.works(ITEM_WORK * len(one))
            left.extend(_within(one))
    return value


def _turns(context: Context) -> RenderBudget:
    turns: RenderBudget = context[_TURNS]
    return turns


@pass_context
def _dict(context: Context, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    made = dict(*args, **kwargs)
    _size(context, made)
    return made


@pass_context
def _listed(context: Context, values: Iterable[Any]) -> list[Any]:
    made, items, letters = list[Any](), 0, 0
    for value in values:
        made.append(value)
        more, others = _size(context, value)
        items, letters = items + 1 + more, letters + others
        _check_size(items, letters)
    return made


def _joined(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = (value[attribute] for value in values)
    texts, length = [], 0
    for value in values:
        texts.append(render_value(value))
        length += len(texts[-1]) + len(separator)
        _check_length(length)
    return separator.join(texts)


def _replaced(value: Any, old: str, new: str) -> str:
    text = render_value(value)
    _check_length(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new)


def _as_json(value: Any, indent: int | None = None) -> str:
    if indent is not None and not 0 <= indent <= 8:
        raise TemplateTooLarge(f"it indents by {indent}; the maximum is 8")
    pieces, length = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, indent=indent).iterencode(value):
        pieces.append(piece)
        length += len(piece)
        _check_length(length)
    return "".join(pieces)


def _rounded(value: float, precision: int = 0) -> float:
    if abs(precision) > 15:
        raise TemplateTooLarge(f"it rounds to {precision} places; the maximum is 15")
    return round(value, precision)


def _range(*bounds: int) -> range:
    made = range(*bounds)
    if made[MOST_TURNS:]:
        raise TemplateTooLarge(f"it uses a range of more than {MOST_TURNS} numbers")
    return made


def _size(context: Context, value: Any) -> tuple[int, int]:
    """Count the items and characters of a value, including nested ones. Raises TemplateTooLarge."""
    if isinstance(value, str):
        return 0, len(value)
    items, letters, left = 0, 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            letters += len(one)
        elif isinstance(one, _HOLDERS):
            items += len(one)
            _check_size(items, letters)  # before the items are read
            left.extend(_within(one))
    _check_size(items, letters)
    _turns(context).works(ITEM_WORK * items)
    return items, letters


def _within(value: Any) -> Iterable[Any]:
    return chain(value, value.values()) if isinstance(value, dict) else value


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_size(items: int, letters: int) -> None:
    if items > MOST_TURNS:
        raise TemplateTooLarge(f"it creates a list of more than {MOST_TURNS} items, including nested ones")
    _check_length(letters)


def _check_length(letters: int) -> None:
    if letters > LONGEST_TEXT:
        raise TemplateTooLarge(f"it produces more than {LONGEST_TEXT} characters")


def _check_bits(bits: int) -> None:
    if bits > LARGEST_BITS:
        raise TemplateTooLarge(f"it computes an integer of more than {LARGEST_BITS} bits")


RESPONSES = {"pointwise": ("response",), "pairwise": ("first", "second")}
"""Variable names of the responses, by the judge's mode."""


def images_of(response: str) -> str:
    """Name of the variable with the pictures of the response of this name (`response_pictures`)."""
    return f"{response}_images"


_MARKS = (IMAGE_MARK, "\ufdd1", "\ufdd2")
"""Stand for the pictures while a question is rendered: those of the prompt, of the first and of the second response."""

_ANY_MARK = re.compile(f"[{''.join(_MARKS)}]")


class AskedQuestion(NamedTuple):
    """A rendered question. `pictures`: those that it shows, one for each `IMAGE_MARK` in `text`."""

    text: str
    pictures: tuple[PictureRef, ...] = ()


def response_pictures(response: str) -> tuple[PictureRef, ...]:
    """The pictures of a response, as a judge gets them: those that tools returned in it, or the one that the policy
    generated."""
    if not isinstance(response, Response):
        return ()
    files = response.tool_files if response.picture_file is None else (response.picture_file,)
    return tuple(PictureRef(one.path, one.sha256, one.height, one.width, one.height, one.width) for one in files)


class Question:
    """Renders one judge's questions from its template. Create it with `Question.compile`. Stateless."""

    def __init__(
        self, template: jinja2.Template, judge: str, images: bool, picture_text: str, apart: frozenset[str]
    ) -> None:
        """`apart`: the responses whose pictures the template shows by a variable of their own."""
        self._template = template
        self._judge = judge
        self._images = images
        self._picture_text = picture_text
        self._apart = apart

    @classmethod
    def compile(cls, spec: JudgeSpec, where: str, picture_text: str = "", *, generates: bool = False) -> Question:
        """Compile the judge's template. `where`: name of the judge's section in messages. `picture_text`: text of a
        picture in the prompts of the policy, in the place of which a judge with `images` sees it. `generates`: whether the
        policy generates pictures. Raises SpecError."""
        source, where = _source(spec, where)
        sandbox = BoundedSandbox()
        try:
            tree = sandbox.parse(source)
            asked = find_undeclared_variables(tree) - set(sandbox.globals)
            _check_names(tree, asked, spec, where, generates=generates)
            apart = frozenset(name for name in RESPONSES[spec.mode] if images_of(name) in asked)
            return cls(sandbox.bounded(tree), spec.name, spec.images, picture_text, apart)
        except UNCOMPILED as error:
            raise SpecError(
                f"the template is not valid ({template_problem(error)})", where=where, fix="Correct it"
            ) from error

    def about(self, prompt: Prompt, response: str) -> AskedQuestion:
        """Render the question about one response, for a pointwise judge. Raises JudgeError."""
        return self._rendered(prompt, {"response": response})

    def between(self, prompt: Prompt, first: str, second: str) -> AskedQuestion:
        """Render the question that compares two responses in this order, for a pairwise judge. Raises JudgeError."""
        return self._rendered(prompt, {"first": first, "second": second})

    def _rendered(self, prompt: Prompt, responses: Mapping[str, str]) -> AskedQuestion:
        texts = {name: str(response) for name, response in responses.items()}
        given: dict[str, Any] = {"prompt": prompt.text, "fields": prompt.fields, **texts, **BoundedSandbox.turns()}
        if self._images:
            given |= self._seen(prompt, responses)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST_TEXT:
                    raise TemplateTooLarge(f"it produces more than {LONGEST_TEXT} characters")
        except FOREIGN_FAILURES as error:
            said = f"{error}" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            failure = Unjudgeable if isinstance(error, MissingField) else JudgeError
            raise failure(
                f"the template of judge {self._judge!r} cannot be rendered for the entry ({said})",
                fix="Change the template, or the data",
            ) from error
        question = "".join(pieces)
        if not self._images:
            return AskedQuestion(question)
        left = {}
        seen = {"prompt": prompt.pictures} | {name: response_pictures(response) for name, response in responses.items()}
        for mark, (name, pictures) in zip(_MARKS, [*seen.items(), ("", ())], strict=False):
            if (count := question.count(mark)) != len(pictures):
                raise self._miscounted(count, len(pictures), name)
            left[mark] = iter(pictures)
        shown = tuple(next(left[mark]) for mark in _ANY_MARK.findall(question))
        return AskedQuestion(_ANY_MARK.sub(IMAGE_MARK, question), shown)

    def _miscounted(self, shown: int, count: int, name: str) -> JudgeError:
        """The error about pictures that are not shown once each. `name`: of the variable with them; empty: a mark that only
        the entry's fields can have."""
        if not name:
            what, fix = (
                "the entry's fields have characters that stand for pictures",
                "Remove U+FDD0 to U+FDD2 from the data",
            )
            return JudgeError(what, fix=fix)
        places = (
            "{{ images }}, or by {{ prompt }}, which has them in their places"
            if name == "prompt"
            else f"{{{{ {name} }}}}, which has them at its end, or by {{{{ {images_of(name)} }}}}"
        )
        owner = "the prompt" if name == "prompt" else repr(name)
        return JudgeError(
            f"the template of judge {self._judge!r} shows {shown} pictures, but {owner} has {count}",
            fix=f"Show each picture once: by {places}",
        )

    def _seen(self, prompt: Prompt, responses: Mapping[str, str]) -> dict[str, str]:
        """The template's variables for a judge that sees pictures. `images` and `prompt` have a mark for each picture of
        the prompt. A response has one for each of its pictures at its end, or its variable for pictures (`images_of`) has
        them if the template uses it. A generated picture has no text, so its mark is the whole response. Nothing else has
        marks."""
        given = {
            name: _ANY_MARK.sub("\ufffd", str(text)) for name, text in (("prompt", prompt.text), *responses.items())
        }
        if self._picture_text:
            given["prompt"] = given["prompt"].replace(self._picture_text, IMAGE_MARK)
        for mark, (name, response) in zip(_MARKS[1:], responses.items(), strict=False):
            marks = mark * len(response_pictures(response))
            given[images_of(name)] = marks
            given[name] += "" if name in self._apart else marks
        return given | {"images": IMAGE_MARK * len(prompt.pictures)}


def _source(spec: JudgeSpec, where: str) -> tuple[str, str]:
    """Read the template; return its text, and its spec key or file for messages. Raises SpecError."""
    if spec.template is not None:
        return spec.template, f"{where}.template"
    path = Path(spec.template_file or "")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SpecError(
            f"cannot read the template ({reason})", where=str(path), fix=f"Name a Jinja file in {where}.template_file"
        ) from error
    if len(text) > LONGEST_TEMPLATE:
        raise SpecError(f"the template has more than {LONGEST_TEMPLATE} characters", where=str(path), fix="Shorten it")
    return text, str(path)


def _check_names(tree: nodes.Template, asked: set[str], spec: JudgeSpec, where: str, *, generates: bool) -> None:
    """Raise SpecError unless the template uses only known names and outputs the responses, and the pictures if the judge
    sees them. `asked`: names that the template uses. `generates`: whether the responses are pictures."""
    responses = RESPONSES[spec.mode]
    seen = ("images", *map(images_of, responses)) if spec.images else ()
    known = ("prompt", *responses, "fields", *seen)
    for name in sorted(asked - set(known)):
        line = next((node.lineno for node in tree.find_all(nodes.Name) if node.name == name), 1)
        raise SpecError(
            f"line {line} of the template uses the unknown name {name!r}{did_you_mean(name, known)}",
            where=where,
            fix=f"Known names: {', '.join(known)}; fields of the entry are fields.NAME",
        )
    shown = {node.name for node in _shown(tree) if isinstance(node, nodes.Name)} & asked
    for name in responses:
        if name not in shown and not (generates and images_of(name) in shown):
            raise SpecError(f"the template does not show {name!r}", where=where, fix=f"Add {{{{ {name} }}}} to it")
    if spec.images and not generates and shown.isdisjoint({"images", "prompt"}):
        raise SpecError(
            "the judge has images: true, but its template does not show the pictures",
            where=where,
            fix="Add {{ images }}, or {{ prompt }}, which has them in their places",
        )


def _shown(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the node and its descendants, except conditions: a name in a condition is not output."""
    yield node
    conditions: tuple[Any, ...] = (node.test,) if isinstance(node, nodes.If | nodes.CondExpr | nodes.For) else ()
    for child in node.iter_child_nodes():
        if not any(child is condition for condition in conditions):
            yield from _shown(child)
