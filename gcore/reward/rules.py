r"""gcore's rule-based rewards: numeric, exact, regex, length, math, and rewards from an environment or agent.

Rules that compare give 1.0 for the expected answer (the entry's field `reward.answer`), else 0.0, without partial
credit. Rules for the form of a response (a pattern, a length) need no expected answer. `environment` and `agent` return
the reward that the response's environment or agent computed. An unknown key in `reward.options` is an error, because a
misspelt option would silently have no effect.

Mathematical answers are compared by value: 1/2, 0.5 and \frac{1}{2} are equal, and so are x+1 and 1+x, {1,2} and {2,1}.
`gcore.reward.mathematics` parses and compares them with the LaTeX parser of math-verify (`gcore[math]`, on SymPy). It
is imported at first use, which takes about a second.

An expected answer keeps its type from the data. A list means several accepted answers. If a rule cannot compare the
type, for example an object, the entry is invalid; the rule's `check` finds that before a job begins.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import threading
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.reward.api import (
    Response,
    RewardError,
    RewardResult,
    accepted_answers,
    answer_field,
    decimal_text,
    number_option,
    refuse_unknown,
    truth_option,
    word_option,
)
from gcore.system.process import ProcessorTimeUsed, limit_processor_time

LONGEST_NUMBER = 400
"""Number of characters searched before the last digit or after a marker. It bounds the time for a long run of digits.
"""

NUMERIC_OPTIONS = ("after", "tolerance")

# A sign belongs to the number that it touches, except after a number, a word or a bracket: there it is an operator.
# Exponents have at most three digits; larger ones would only cost time.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
    r"|(?:(?<![\w)\]])[+-])?(?<![\w.])\.[0-9]+"
)

_CUT = re.compile(r"[0-9]*(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?")
"""The rest of a number whose beginning is outside the searched text."""


def numeric(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the last number in the response equals the expected one exactly.

    Numbers are decimal: digits, optionally with a sign, a fraction, an exponent or English thousands separators
    (1,234.5). 46, 46.0 and +46 are equal; 46.01 differs. Other text and earlier numbers are ignored.

    Options: `after`, a marker such as "####": the first number after its last occurrence counts instead, and a response
    without the marker is wrong; an expected answer with the marker is parsed the same way. `tolerance`: maximum
    absolute difference between equal numbers. Raises RewardError if the expected answer is not a number, or an option
    is invalid.
    """
    after, tolerance = _numeric_options(spec)
    accepted = _expected_numbers(fields, spec, after)
    found = last_number(response) if after is None else number_after(response, after)
    correct = found is not None and any(
        found == expected or (tolerance > 0 and _distance(found, expected) <= tolerance) for expected in accepted
    )
    if after is None:
        return _result(correct)
    return RewardResult(float(correct), (("correct", float(correct)), ("marked", float(after in response))))


def exact(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the response equals the expected answer character by character, ignoring white space around both.

    A number or boolean is compared as in JSON, a number also without an exponent. Each item of a list is accepted, and
    so is the whole list as JSON. Raises RewardError if there is no expected answer, or it is an object.
    """
    refuse_unknown(spec, ())
    answers = accepted_answers(fields, spec, (str, int, float, bool))
    texts = {text for answer in answers for text in _texts(answer)}
    if isinstance(answer_field(fields, spec), list):
        texts.add(json.dumps(answers, ensure_ascii=False))
    return _result(response.strip() in texts)


def _texts(answer: str | float | bool) -> tuple[str, ...]:
    if isinstance(answer, str):
        return (answer.strip(),)
    written = json.dumps(answer)
    return (written,) if isinstance(answer, bool) else (written, decimal_text(answer))


def _check_text(fields: Mapping[str, Any], spec: RewardSpec) -> None:
    accepted_answers(fields, spec, (str, int, float, bool))


def _check_numbers(fields: Mapping[str, Any], spec: RewardSpec) -> None:
    _expected_numbers(fields, spec, _numeric_options(spec)[0])


exact.check = _check_text  # type: ignore[attr-defined]
numeric.check = _check_numbers  # type: ignore[attr-defined]


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or None."""
    end = max(map(text.rfind, "0123456789")) + 1  # after the last digit; 0 if there is none
    begin = max(0, end - LONGEST_NUMBER)
    tail = text[begin:end].replace("\u2212", "-")  # the typographic minus sign
    # The searched text may begin within a number; the rest of this number is skipped.
    cut = _CUT.match(tail) if begin > 0 and text[begin - 1] in "0123456789.," else None
    matches = [match.group() for match in _NUMBER.finditer(tail, cut.end() if cut else 0)]
    return Decimal(matches[-1].replace(",", "")) if matches else None


def number_after(text: str, marker: str) -> Decimal | None:
    """The first number after the last `marker` in `text`, or None."""
    _, found, rest = text.rpartition(marker)
    match = _NUMBER.search(rest[:LONGEST_NUMBER].replace("\u2212", "-")) if found else None
    if match is not None and match.end() == LONGEST_NUMBER and rest[LONGEST_NUMBER:][:1] in tuple("0123456789.,"):
        return None  # the number is longer than the searched text
    return Decimal(match.group().replace(",", "")) if match else None


def _distance(one: Decimal, other: Decimal) -> Decimal:
    """Absolute difference of two numbers; infinite if a Decimal cannot represent it."""
    try:
        return abs(one - other)
    except ArithmeticError:
        return Decimal("Infinity")


def _numeric_options(spec: RewardSpec) -> tuple[str | None, Decimal]:
    """Read the options of `numeric`: `after` (None if not set) and `tolerance`. Raises RewardError."""
    refuse_unknown(spec, NUMERIC_OPTIONS)
    after, tolerance = spec.options.get("after"), spec.options.get("tolerance", 0)
    if after is not None and (not isinstance(after, str) or not after.strip()):
        raise RewardError(
            f"reward.options.after is {after!r}, which is not a marker", fix="Set it to text, such as after: '####'"
        )
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or tolerance < 0:
        raise RewardError(f"reward.options.tolerance is {tolerance!r}", fix="Set it to a number of at least 0")
    return after, Decimal(str(tolerance))


def _result(correct: bool) -> RewardResult:
    value = 1.0 if correct else 0.0
    return RewardResult(value, (("correct", value),))


def _expected_numbers(fields: Mapping[str, Any], spec: RewardSpec, after: str | None) -> list[Decimal]:
    return [_expected_number(answer, spec, after) for answer in accepted_answers(fields, spec, (str, int, float))]


def _expected_number(answer: str | float, spec: RewardSpec, after: str | None) -> Decimal:
    if after is not None and isinstance(answer, str):
        answer = answer.rpartition(after)[2]
    try:
        number = Decimal(str(answer).strip().replace(",", "").replace("\u2212", "-"))
        if not number.is_finite():
            raise InvalidOperation
    except InvalidOperation as error:
        raise RewardError(
            f"the expected answer {answer!r} in field {spec.answer!r} is not a number",
            fix="Use reward.name: exact, or set reward.answer to another field",
        ) from error
    return number


REGEX_OPTIONS = ("pattern", "where", "count", "ignore_case")
LENGTH_OPTIONS = ("limit", "target", "unit", "slope")


def regex(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the response matches the pattern, else 0.0.

    Options: `pattern`, a Python regular expression in which a dot matches any character including newline; `where`:
    "whole" (default, ignoring white space around the response), "start", or "anywhere"; `count`: with "anywhere", the
    exact number of matches required; `ignore_case`. A pattern with excessive backtracking is ended by
    `reward.timeout_s`. Raises RewardError for an invalid option.
    """
    refuse_unknown(spec, REGEX_OPTIONS)
    where = word_option(spec, "where", "whole", ("whole", "start", "anywhere"))
    pattern, ignore_case = spec.options.get("pattern"), truth_option(spec, "ignore_case", False)
    if not isinstance(pattern, str) or not pattern:
        given = "is missing" if pattern is None else f"is {pattern!r}, which is not a pattern"
        raise RewardError(f"reward.options.pattern {given}", fix="Set it to a regular expression")
    compiled = _compiled(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    text = response.strip()
    if "count" in spec.options:
        if where != "anywhere":
            raise RewardError("reward.options.count counts matches anywhere", fix="Set where: anywhere")
        count = number_option(spec, "count", 1, least=0, whole=True)
        matches = sum(1 for _ in compiled.finditer(text))
        return RewardResult(float(matches == count), (("matches", float(matches)),))
    found = {"whole": compiled.fullmatch, "start": compiled.match, "anywhere": compiled.search}[where](text)
    return RewardResult(float(found is not None))


def length(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 for a response of the desired length, less for others, at least 0.0.

    Options: either `limit`, the maximum length, or `target`, the desired length; `unit`: "tokens" (default) or
    "characters"; `slope`: penalty per unit beyond the limit or away from the target. Without `slope` a response beyond
    the limit gets 0.0, and one away from the target loses 1/target per unit. Raises RewardError for an invalid option,
    and if the length in tokens is needed but unknown.
    """
    refuse_unknown(spec, LENGTH_OPTIONS)
    unit = word_option(spec, "unit", "tokens", ("tokens", "characters"))
    if ("limit" in spec.options) == ("target" in spec.options):
        raise RewardError(
            "give one of reward.options.limit and reward.options.target", fix="Set one of them, such as limit: 200"
        )
    tokens = getattr(response, "tokens", None)
    if unit == "tokens" and tokens is None:
        raise RewardError("the response's length in tokens is not known here", fix="Set unit: characters")
    size = len(response) if unit == "characters" else tokens
    assert size is not None
    if "limit" in spec.options:
        beyond = max(0.0, size - number_option(spec, "limit", 1, least=1, whole=True))
        slope = number_option(spec, "slope", 1.0, least=0)
    else:
        target = number_option(spec, "target", 1, least=1, whole=True)
        beyond = abs(size - target)
        slope = number_option(spec, "slope", 1.0 / target, least=0)
    return RewardResult(max(0.0, 1.0 - slope * beyond), (("length", float(size)),))


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise RewardError(
            f"reward.options.pattern {pattern[:100]!r} is not a regular expression ({error})", fix="Correct it"
        ) from error


def environment(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """Reward that the response's environment returned; 0 for a truncated response without one.

    Raises RewardError for any other response without one.
    """
    return _handed(response, spec, "environment", "Let it return Done(reward)")


def agent(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """Reward that the response's agent returned; 0 for a truncated response without one.

    Raises RewardError for any other response without one.
    """
    return _handed(response, spec, "agent", "Let it return a number")


def _handed(response: str, spec: RewardSpec, who: str, fix: str) -> RewardResult:
    if spec.options:
        raise RewardError(f"reward {who!r} has no options", fix="Remove reward.options")
    said = response.environment if isinstance(response, Response) else None
    if said is not None:
        return RewardResult(said)
    if isinstance(response, Response) and response.truncated:
        return RewardResult(0.0)
    raise RewardError(
        f"the {who} returned no reward",
        fix=f"{fix}, or score with another reward than {who!r}",
    )


OPTIONS = ("digits", "longest")

LIMIT_S = 2.0
"""Processor time per response, in seconds."""

EXPECTED_LIMIT_S = 5.0
"""Processor time to parse an expected answer, in seconds."""

LONGEST = 20_000
"""Number of characters at the end of a response that are searched."""


class MathReward:
    """1.0 if the response contains the expected answer, else 0.0.

    The response's answer is the content of its last \\boxed{}, or is found as described in
    `gcore.reward.mathematics.grading`.

    Options: `digits`: number of significant digits to which non-integers must agree (default: exactly, except for
    decimals of at least 6 digits that stand for a number without a finite decimal expansion); `longest`: number of
    characters at the end of the response that are searched (20000).

    Parts: `correct`; `found`: whether there was an answer to compare; `gave_up`: whether it used up its processor time,
    or the number is too large to compute. Raises RewardError if the expected answer cannot be parsed.
    """

    def start(self, spec: RewardSpec) -> None:
        """Import math-verify. Raises RewardError if it is not installed, or outside the main thread (limits need
        signals).
        """
        _mathematics()
        if threading.current_thread() is not threading.main_thread():
            raise RewardError("reward 'math' works only in the main thread", fix="Use RewardPool or RewardTrial")

    def check(self, fields: Mapping[str, Any], spec: RewardSpec) -> None:
        """Raise RewardError if the expected answer cannot be parsed."""
        for answer in accepted_answers(fields, spec, (str, int, float)):
            _expected(_as_mathematics(answer), spec.answer)

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """Score a response; see the class."""
        refuse_unknown(spec, OPTIONS)
        digits = int(number_option(spec, "digits", 6, least=1, whole=True)) if "digits" in spec.options else None
        longest = int(number_option(spec, "longest", LONGEST, least=1, whole=True))
        library = _mathematics()
        answers = accepted_answers(fields, spec, (str, int, float))
        expected = [_expected(_as_mathematics(answer), spec.answer) for answer in answers]
        gave_up, grades = False, []
        try:
            with limit_processor_time(LIMIT_S):
                for one in expected:
                    grades.append(library.grade(one, str(response)[-longest:], digits))
        except ProcessorTimeUsed:
            gave_up = True
        correct, found = any(one.correct for one in grades), gave_up or any(one.found for one in grades)
        gave_up = gave_up or any(one.too_large for one in grades)
        return RewardResult(
            float(correct), (("correct", float(correct)), ("found", float(found)), ("gave_up", float(gave_up)))
        )


math = MathReward()


def _mathematics() -> Any:
    try:
        importlib.import_module("math_verify")
        return importlib.import_module("gcore.reward.mathematics.grading")
    except ImportError as error:
        raise RewardError(
            f"reward 'math' needs the package math-verify, which cannot be imported ({error})",
            fix="Install it on every node: pip install 'gcore[math]'",
        ) from error


def _as_mathematics(answer: str | float) -> str:
    """Text unchanged; a number without an exponent, because its `e` would be parsed as a letter."""
    return answer if isinstance(answer, str) else decimal_text(answer)


@functools.lru_cache(maxsize=4096)
def _expected(answer: str, field: str) -> Any:
    """Parse an expected answer; `field` is the entry's field in messages. Raises RewardError."""
    library = _mathematics()
    try:
        with limit_processor_time(EXPECTED_LIMIT_S):
            return library.ExpectedAnswer.of(answer)
    except (ValueError, ArithmeticError, ProcessorTimeUsed) as error:
        raise RewardError(
            f"the expected answer {answer[:100]!r} in field {field!r} cannot be parsed as mathematics",
            fix="Set reward.answer to another field, or use reward.name: exact",
        ) from error
