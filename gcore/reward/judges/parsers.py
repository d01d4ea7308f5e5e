"""Verdict parsers: convert a judge's answer to a number; found by name under the entry-point group `gcore.verdicts`.

    def stars(answer: str, spec: VerdictSpec) -> float:
        count = answer.count("*")
        if count == 0:
            raise Unreadable("it has no stars")
        return float(count)

A parser gets the part of an answer after the text `verdict.after`, and the section `verdict` of the judge's spec. For
an answer without a verdict it raises `Unreadable` instead of returning 0; the mean of the votes then leaves the answer
out. `CheckedParser` applies the bounds and the scale for every parser. A custom parser is foreign code: other
exceptions, and results that are not numbers, become `Unjudgeable`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from gcore.config.base import shorten_text
from gcore.config.reward import VerdictSpec
from gcore.plugins import RAISED, PluginKind, error_sentence, find_plugin, plugin_trace, shown_name
from gcore.reward.judges.types import JudgeError, Unjudgeable, Unreadable
from gcore.reward.rules import LONGEST_NUMBER, last_number

VERDICTS = PluginKind("verdict parser", "gcore.verdicts", "verdict.parser")

LONGEST_READ = 100_000
"""Number of characters at the end of an answer that the parser `json` searches."""

LONGEST_WORDS = 10_000
"""Number of characters at the end of an answer that the parser `words` searches. Overlapping words make the search slow,
and it blocks the controller."""

_OUT_OF = re.compile(r"(?<=[0-9])\W{0,4}(?:/|(?<!\w)out of(?!\w))\W{0,4}[0-9][0-9,]*(?:\.[0-9]+)?\Z")
"""Text after the 8 in `8/10` and `**8** out of 10`."""

_decode = json.JSONDecoder().raw_decode


class Parser(Protocol):
    """Finds the verdict in a judge's answer."""

    def __call__(self, answer: str, spec: VerdictSpec) -> float:
        """Return the verdict as a number, before bounds and scale. Raises Unreadable if the answer has none."""
        ...


def find_parser(name: str, where: str = VERDICTS.where) -> CheckedParser:
    """Find a parser by entry-point name and wrap it with result checks.

    Raises PluginFault, with the nearest name if there is none.
    """
    parser: Parser = find_plugin(replace(VERDICTS, where=where), name)
    return CheckedParser(name, parser)


class CheckedParser:
    """Wraps a parser: gives it the text after `verdict.after`, checks the number that it returns, and scales it."""

    def __init__(self, name: str, parser: Parser) -> None:
        self._name = shown_name(name)
        self._parser = parser

    def __call__(self, answer: str, spec: VerdictSpec) -> float:
        """Return the verdict: between `least` and `most`, or scaled to 0..1 with `scale`.

        Raises Unreadable if the answer has no verdict within the bounds, Unjudgeable if the parser itself fails.
        """
        if spec.after is not None:
            _, found, answer = answer.rpartition(spec.after)
            if not found:
                raise Unreadable(f"it does not contain {spec.after!r}")
        try:
            number = self._number(self._parser(answer, spec))
        except (Unreadable, JudgeError):
            raise
        except RAISED as error:  # foreign code: one bad answer must not end the process
            raise Unjudgeable(
                f"verdict parser {self._name!r} raised {error_sentence(error)}",
                fix="Correct the parser",
                trace=plugin_trace(error),
            ) from error
        if not spec.least <= number <= spec.most:  # also true for NaN
            raise Unreadable(f"{number:g} is not between {spec.least:g} and {spec.most:g}")
        return scale_number(number, spec) if spec.scale else number

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError) as error:
            shown = shorten_text(repr(value))
            raise Unjudgeable(
                f"verdict parser {self._name!r} returned {shown}, which is not a number", fix="Correct the parser"
            ) from error


def scale_number(number: float, spec: VerdictSpec) -> float:
    """Map `number` linearly from least..most to 0..1."""
    return min(max((number - spec.least) / (spec.most - spec.least), 0.0), 1.0)


def number(answer: str, spec: VerdictSpec) -> float:
    """Verdict parser `number`: the last number in the answer. In `8/10` and `8 out of 10` it is the 8 if `verdict.most`
    is 10; with another `most` the answer is unreadable.
    """
    end = max(map(answer.rfind, "0123456789")) + 1  # after the last digit; 0 if there is none
    begin = max(0, end - LONGEST_NUMBER)
    behind = _OUT_OF.search(answer[begin:end])
    if behind is not None:
        most = last_number(answer[:end])
        if most is None or float(most) != spec.most:
            raise Unreadable(f"its number is out of {most}, but verdict.most is {spec.most:g}")
        answer = answer[: begin + behind.start()]
    found = last_number(answer)
    if found is None:
        raise Unreadable("it contains no number")
    return float(found)


def words(answer: str, spec: VerdictSpec) -> float:
    """Verdict parser `words`: the value of the last word of `verdict.words` in the answer.

    If two of them end at the same position, the longer one counts.

    Only whole words match: `correct` is not found in `incorrect`. Case matters.
    """
    ends = [(end, len(word), worth) for word, worth in spec.words.items() if (end := _last_end(answer, word)) > 0]
    if not ends:
        raise Unreadable(f"it contains none of {', '.join(spec.words)}")
    return max(ends, key=lambda one: one[:2])[2]


def json_field(answer: str, spec: VerdictSpec) -> float:
    """Verdict parser `json`: the value of `verdict.field` in the last JSON object in the answer.

    The value is a number, or a text in `verdict.words`, which gives its number.
    """
    *_, last = (None, *_objects(answer[-LONGEST_READ:]))
    if last is None:
        raise Unreadable("it contains no JSON object")
    if spec.field not in last:
        raise Unreadable(f"its JSON object has no field {spec.field!r}")
    value = last[spec.field]
    if isinstance(value, str) and value.strip() in spec.words:
        return spec.words[value.strip()]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _float(value)
    known = f"neither a number nor one of {', '.join(spec.words)}" if spec.words else "not a number"
    raise Unreadable(f"{spec.field!r} is {shorten_text(json.dumps(value, ensure_ascii=False))}, {known}")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in the text, in order."""
    at = text.find("{")
    while at >= 0:
        try:
            found, end = _decode(text, at)
            yield found
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def _last_end(text: str, word: str) -> int:
    """End of the last whole word `word` in the searched text; 0 if there is none."""
    begin, end = max(0, len(text) - LONGEST_WORDS), len(text)
    while (at := text.rfind(word, begin, end)) >= 0:
        after = at + len(word)
        within = (at > 0 and _belong(text[at - 1], word[0])) or (after < len(text) and _belong(word[-1], text[after]))
        if not within:
            return after
        end = after - 1
    return 0


def _belong(one: str, other: str) -> bool:
    """Whether two adjacent characters belong to one word. Scripts without case are often written without spaces."""
    return all(c.isdigit() or c == "_" or c.lower() != c.upper() for c in (one, other))


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
