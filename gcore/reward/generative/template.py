"""What a judge is shown: its template, and the questions that come of it.

A template is checked when it is compiled, before any response is there: its syntax, that it asks only for what it will be
given, and that it shows the response. What can be wrong later is the entry's: a field that one of them lacks. The text of
the prompt is what the policy was shown, with its chat template's marks if it has one; the entry's own words are in `fields`.

A template runs in the controller, in a sandbox that bounds what it takes and what it writes
(`gcore.reward.generative.bounded`). Whether a question suits the judge's context is the judge's to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

from gcore.config.judges import LONGEST_TEMPLATE, JudgeSpec
from gcore.errors import SpecError
from gcore.nearest import did_you_mean
from gcore.prompts.sandbox import FOREIGN_FAILURES, UNCOMPILED, problem_of
from gcore.reward.generative.bounded import LONGEST_TEXT, BoundedSandbox, NoField, TooMuch
from gcore.reward.generative.errors import JudgeError, Unjudgeable
from gcore.types import Prompt

RESPONSES = {"pointwise": ("response",), "pairwise": ("first", "second")}
"""What the responses are called, by the judge's mode."""


class Question:
    """The questions that one judge is asked. `Question.compile` makes it. Stateless."""

    def __init__(self, template: jinja2.Template, judge: str) -> None:
        self._template = template
        self._judge = judge

    @classmethod
    def compile(cls, spec: JudgeSpec, where: str) -> Question:
        """The judge's template, ready to render; `where`: how messages name the judge's section. Raises SpecError."""
        source, where = _source(spec, where)
        sandbox = BoundedSandbox()
        try:
            tree = sandbox.parse(source)
            asked = find_undeclared_variables(tree) - set(sandbox.globals)
            _check_names(tree, asked, RESPONSES[spec.mode], where)
            return cls(sandbox.bounded(tree), spec.name)
        except UNCOMPILED as error:
            raise SpecError(
                f"the template is not valid ({problem_of(error)})", where=where, fix="Correct it"
            ) from error

    def about(self, prompt: Prompt, response: str) -> str:
        """What a pointwise judge is asked about a response. Raises JudgeError."""
        return self._rendered(prompt, {"response": str(response)})

    def between(self, prompt: Prompt, first: str, second: str) -> str:
        """What a pairwise judge is asked about two responses, in this order. Raises JudgeError."""
        return self._rendered(prompt, {"first": str(first), "second": str(second)})

    def _rendered(self, prompt: Prompt, responses: dict[str, str]) -> str:
        given = {"prompt": prompt.text, "fields": prompt.fields, **responses, **BoundedSandbox.turns()}
        pieces, length = [], 0
        try:
            for piece in self._template.generate(given):
                pieces.append(piece)
                length += len(piece)
                if length > LONGEST_TEXT:
                    raise TooMuch(f"it makes more than {LONGEST_TEXT} characters")
        except FOREIGN_FAILURES as error:
            said = f"{error}" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            failure = Unjudgeable if isinstance(error, NoField) else JudgeError
            raise failure(
                f"the template of judge {self._judge!r} does not take the entry ({said})",
                fix="Change the template, or the data",
            ) from error
        return "".join(pieces)


def _source(spec: JudgeSpec, where: str) -> tuple[str, str]:
    """The template's text, and where it stands."""
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


def _check_names(tree: nodes.Template, asked: set[str], responses: tuple[str, ...], where: str) -> None:
    """Raises SpecError unless the template asks for what it will be given, and shows what it should."""
    known = ("prompt", *responses, "fields")
    for name in sorted(asked - set(known)):
        line = next((node.lineno for node in tree.find_all(nodes.Name) if node.name == name), 1)
        raise SpecError(
            f"line {line} of the template asks for {name!r}, which it is not given{did_you_mean(name, known)}",
            where=where,
            fix=f"Known: {', '.join(known)}; fields of the entry are fields.NAME",
        )
    shown = {node.name for node in _shown(tree) if isinstance(node, nodes.Name)} & asked
    for name in responses:
        if name not in shown:
            raise SpecError(f"the template never shows {name!r}", where=where, fix=f"Write {{{{ {name} }}}} into it")


def _shown(node: nodes.Node) -> Iterator[nodes.Node]:
    """The node and what is in it, but for what is only a condition."""
    yield node
    conditions: tuple[Any, ...] = (node.test,) if isinstance(node, nodes.If | nodes.CondExpr | nodes.For) else ()
    for child in node.iter_child_nodes():
        if not any(child is condition for condition in conditions):
            yield from _shown(child)
