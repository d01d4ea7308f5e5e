"""How a judge's answer becomes a number: parsers, found by name under the entry-point group `gcore.verdicts`.

    def stars(answer: str, spec: VerdictSpec) -> float:
        count = answer.count("*")
        if count == 0:
            raise Unreadable("it has no stars")
        return float(count)

A parser sees what of an answer follows `verdict.after`, and the section `verdict`. An answer without a verdict is no verdict
of 0: the parser raises `Unreadable`, and the answer does not count. Bounds and scale are applied here, to every parser's
numbers alike. One of somebody else's is foreign code: what it raises besides, and what is no number, is `Unjudgeable`.
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
from gcore.plugins import RAISED, PluginKind, error_sentence, find_plugin, plugin_trace
from gcore.reward.judges.types import JudgeError, Unjudgeable, Unreadable
from gcore.reward.rules import LONGEST_NUMBER, last_number

VERDICTS = PluginKind("verdict parser", "gcore.verdicts", "verdict.parser")

LONGEST_READ = 100_000
"""Characters of an answer's end that `json` looks at."""

LONGEST_WORDS = 10_000
"""Those that `words` looks at: each word may be within another at each of them, and everybody waits meanwhile."""

_OUT_OF = re.compile(r"(?<=[0-9])\W{0,4}(?:/|(?<!\w)out of(?!\w))\W{0,4}[0-9][0-9,]*(?:\.[0-9]+)?\Z")
"""What stands behind the 8 in `8/10` and `**8** out of 10`."""

_decode = json.JSONDecoder().raw_decode


class Parser(Protocol):
    """Reads the verdict of an answer."""

    def __call__(self, answer: str, spec: VerdictSpec) -> float:
        """Raises Unreadable."""
        ...


def find_parser(name: str, where: str = VERDICTS.where) -> CheckedParser:
    """The parser of that entry-point name, its results checked. Raises PluginFault, with the nearest name if there is none."""
    parser: Parser = find_plugin(replace(VERDICTS, where=where), name)
    return CheckedParser(name, parser)


class CheckedParser:
    """A parser that sees only what it should, and whose every result is checked."""

    def __init__(self, name: str, parser: Parser) -> None:
        self._name = name
        self._parser = parser

    def __call__(self, answer: str, spec: VerdictSpec) -> float:
        """The verdict, within its bounds, scaled. Raises Unreadable, or Unjudgeable if the parser is broken."""
        if spec.after is not None:
            _, found, answer = answer.rpartition(spec.after)
            if not found:
                raise Unreadable(f"it does not hold {spec.after!r}")
        try:
            number = self._number(self._parser(answer, spec))
        except (Unreadable, JudgeError):
            raise
        except RAISED as error:  # the edge to foreign code: one odd answer must not end the process
            raise Unjudgeable(
                f"verdict parser {self._name!r} raised {error_sentence(error)}",
                fix="Correct the parser",
                trace=plugin_trace(error),
            ) from error
        if not spec.least <= number <= spec.most:  # NaN is not either
            raise Unreadable(f"{number:g} is not from {spec.least:g} to {spec.most:g}")
        return scale_number(number, spec) if spec.scale else number

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except OverflowError:
            return math.inf
        except (TypeError, ValueError) as error:
            shown = shorten_text(repr(value))
            raise Unjudgeable(
                f"verdict parser {self._name!r} gave {shown}, no number", fix="Correct the parser"
            ) from error


def scale_number(number: float, spec: VerdictSpec) -> float:
    """`number` moved from least..most to 0..1."""
    return min(max((number - spec.least) / (spec.most - spec.least), 0.0), 1.0)


def number(answer: str, spec: VerdictSpec) -> float:
    """The last number. Of `8/10` and `8 out of 10` it is the 8, if 10 is `most`; otherwise it cannot be read."""
    end = max(map(answer.rfind, "0123456789")) + 1  # behind the last digit; 0 if there is none
    begin = max(0, end - LONGEST_NUMBER)
    behind = _OUT_OF.search(answer[begin:end])
    if behind is not None:
        most = last_number(answer[:end])
        if most is None or float(most) != spec.most:
            raise Unreadable(f"its number is out of {most}, and verdict.most is {spec.most:g}")
        answer = answer[: begin + behind.start()]
    found = last_number(answer)
    if found is None:
        raise Unreadable("it holds no number")
    return float(found)


def words(answer: str, spec: VerdictSpec) -> float:
    """What the last of `words` in it is worth; where two end at the same place, the longer.

    A word stands for itself: `correct` is not found in `incorrect`. Small and capital letters differ.
    """
    ends = [(end, len(word), worth) for word, worth in spec.words.items() if (end := _last_end(answer, word)) > 0]
    if not ends:
        raise Unreadable(f"it holds none of {', '.join(spec.words)}")
    return max(ends, key=lambda one: one[:2])[2]


def json_field(answer: str, spec: VerdictSpec) -> float:
    """The field `field` of the last JSON object in it: a number, or one of `words`."""
    *_, last = (None, *_objects(answer[-LONGEST_READ:]))
    if last is None:
        raise Unreadable("it holds no JSON object")
    if spec.field not in last:
        raise Unreadable(f"its JSON object has no field {spec.field!r}")
    value = last[spec.field]
    if isinstance(value, str) and value.strip() in spec.words:
        return spec.words[value.strip()]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _float(value)
    known = f"no number and none of {', '.join(spec.words)}" if spec.words else "no number"
    raise Unreadable(f"{spec.field!r} is {shorten_text(json.dumps(value, ensure_ascii=False))}, {known}")


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in it, one after the other; what stands within one belongs to it."""
    at = text.find("{")
    while at >= 0:
        try:
            found, end = _decode(text, at)
            yield found
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)


def _last_end(text: str, word: str) -> int:
    """Where the last `word` that stands for itself ends; 0 if there is none at the end of the text."""
    begin, end = max(0, len(text) - LONGEST_WORDS), len(text)
    while (at := text.rfind(word, begin, end)) >= 0:
        after = at + len(word)
        within = (at > 0 and _belong(text[at - 1], word[0])) or (after < len(text) and _belong(word[-1], text[after]))
        if not within:
            return after
        end = after - 1
    return 0


def _belong(one: str, other: str) -> bool:
    """Whether two neighbouring characters are of the same word. Scripts without capitals often write without spaces."""
    return all(c.isdigit() or c == "_" or c.lower() != c.upper() for c in (one, other))


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
