r"""gcore's own rewards that follow a rule: numeric, exact, regex, length, mathematics, and values handed on.

Those that compare give 1.0 for the expected answer (the field of the prompt's entry that `reward.answer` names), else 0.0. Nothing is
given for a good try. Those for the form of a response (a pattern, a length) need no answer. `environment` and `agent` hand on what
the response's environment or agent said. A setting in `reward.options` that a rule does not know is an error: misspelt, it would
change nothing in silence.

Mathematical answers are compared by what they mean: 1/2, 0.5 and \frac{1}{2} are equal, so are x+1 and 1+x, {1,2} and {2,1}.
math-verify (`gcore[math]`, on SymPy) reads and compares them. It limits its own time by alarm signals, so it runs in the main thread
of a process of its own; what it gives up on counts as wrong, and a part says so. It is imported with its first use: SymPy takes a
second.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from gcore.config.reward import RewardSpec
from gcore.reward.api import (
    Response,
    RewardError,
    RewardResult,
    answer_field,
    number_option,
    refuse_unknown,
    truth_option,
    word_option,
)

LONGEST_NUMBER = 400
"""Characters looked at before the last digit, or behind a marker: a response that runs on in digits must not take
long."""

NUMERIC_OPTIONS = ("after", "tolerance")

# A sign counts if it touches the number and does not stand behind a number, a word or a bracket, where it subtracts.
# Exponents have at most three digits: what is larger is no answer, and would only cost time.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
    r"|(?:(?<![\w)\]])[+-])?(?<![\w.])\.[0-9]+"
)

_CUT = re.compile(r"[0-9]*(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?")
"""What is left of a number whose beginning is out of sight."""


def numeric(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the last number in the response equals the expected one exactly.

    Numbers are decimal: digits, with a sign, a fraction, an exponent or English thousands (1,234.5) where there is one; 46,
    46.0 and +46 are equal, 46.01 is another number. Text around it does not matter, numbers before it do not count.

    Options: `after`, a marker such as "####": the first number behind its last occurrence counts instead, and a response
    without the marker is wrong; an expected answer that holds the marker is read the same way. `tolerance`: numbers that
    differ by no more are equal. Raises RewardError if the expected answer is no number, or an option is wrong.
    """
    after, tolerance = _numeric_options(spec)
    expected = _expected_number(fields, spec, after)
    found = last_number(response) if after is None else number_after(response, after)
    correct = found is not None and (found == expected or (tolerance > 0 and _distance(found, expected) <= tolerance))
    if after is None:
        return _result(correct)
    return RewardResult(float(correct), (("correct", float(correct)), ("marked", float(after in response))))


def exact(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the response is the expected answer, character by character, apart from white space around either.

    An answer that is no string is compared as JSON writes it. Raises RewardError if there is no expected answer.
    """
    refuse_unknown(spec, ())
    answer = answer_field(fields, spec)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return _result(response.strip() == text.strip())


def last_number(text: str) -> Decimal | None:
    """The last number that `text` holds, or None."""
    end = max(map(text.rfind, "0123456789")) + 1  # behind the last digit; 0 if there is none
    begin = max(0, end - LONGEST_NUMBER)
    tail = text[begin:end].replace("\u2212", "-")  # the typographic minus sign
    # What begins before is another number than the end of it that is in sight.
    cut = _CUT.match(tail) if begin > 0 and text[begin - 1] in "0123456789.," else None
    matches = [match.group() for match in _NUMBER.finditer(tail, cut.end() if cut else 0)]
    return Decimal(matches[-1].replace(",", "")) if matches else None


def number_after(text: str, marker: str) -> Decimal | None:
    """The first number behind the last `marker` in `text`, or None."""
    _, found, rest = text.rpartition(marker)
    match = _NUMBER.search(rest[:LONGEST_NUMBER].replace("\u2212", "-")) if found else None
    if match is not None and match.end() == LONGEST_NUMBER and rest[LONGEST_NUMBER:][:1] in tuple("0123456789.,"):
        return None  # it goes on
    return Decimal(match.group().replace(",", "")) if match else None


def _distance(one: Decimal, other: Decimal) -> Decimal:
    """Infinite where it is beyond what a Decimal holds."""
    try:
        return abs(one - other)
    except ArithmeticError:
        return Decimal("Infinity")


def _numeric_options(spec: RewardSpec) -> tuple[str | None, Decimal]:
    """The marker, if there is one, and the tolerance."""
    refuse_unknown(spec, NUMERIC_OPTIONS)
    after, tolerance = spec.options.get("after"), spec.options.get("tolerance", 0)
    if after is not None and (not isinstance(after, str) or not after.strip()):
        raise RewardError(f"reward.options.after is {after!r}, no marker", fix="Write, for example, after: '####'")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or tolerance < 0:
        raise RewardError(f"reward.options.tolerance is {tolerance!r}", fix="Write a number that is not negative")
    return after, Decimal(str(tolerance))


def _result(correct: bool) -> RewardResult:
    value = 1.0 if correct else 0.0
    return RewardResult(value, (("correct", value),))


def _expected_number(fields: Mapping[str, Any], spec: RewardSpec, after: str | None) -> Decimal:
    answer = answer_field(fields, spec)
    if after is not None and isinstance(answer, str):
        answer = answer.rpartition(after)[2]
    try:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise InvalidOperation
        number = Decimal(str(answer).strip().replace(",", "").replace("\u2212", "-"))
        if not number.is_finite():
            raise InvalidOperation
    except InvalidOperation as error:
        raise RewardError(
            f"the expected answer {answer!r} in field {spec.answer!r} is no number",
            fix="Use reward.name: exact, or name another field in reward.answer",
        ) from error
    return number


REGEX_OPTIONS = ("pattern", "where", "count", "ignore_case")
LENGTH_OPTIONS = ("limit", "target", "unit", "slope")


def regex(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the response follows the pattern, else 0.0.

    Options: `pattern`, a regular expression of Python's, in which a dot is any character, line breaks too; `where`: "whole"
    (default, apart from white space around the response), "start", or "anywhere"; `count`: with "anywhere", how many times it
    should be found, no more and no less; `ignore_case`. A pattern that takes for ever on some text meets the reward's time
    limit (`reward.timeout_s`). Raises RewardError for an option that is wrong.
    """
    refuse_unknown(spec, REGEX_OPTIONS)
    where = word_option(spec, "where", "whole", ("whole", "start", "anywhere"))
    pattern, ignore_case = spec.options.get("pattern"), truth_option(spec, "ignore_case", False)
    if not isinstance(pattern, str) or not pattern:
        given = "is missing" if pattern is None else f"is {pattern!r}, no pattern"
        raise RewardError(f"reward.options.pattern {given}", fix="Write a regular expression")
    compiled = _compiled(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    text = response.strip()
    if "count" in spec.options:
        if where != "anywhere":
            raise RewardError("reward.options.count counts matches anywhere", fix="Write where: anywhere")
        count = number_option(spec, "count", 1, least=0, whole=True)
        matches = sum(1 for _ in compiled.finditer(text))
        return RewardResult(float(matches == count), (("matches", float(matches)),))
    found = {"whole": compiled.fullmatch, "start": compiled.match, "anywhere": compiled.search}[where](text)
    return RewardResult(float(found is not None))


def length(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 for a response of the wished length, less for another: 0.0 at the least.

    Options: `limit`, how long it may be, or `target`, how long it should be (one of the two); `unit`: "tokens" (default) or
    "characters"; `slope`: what is taken off for each unit beyond the limit, or away from the target; without one a response
    beyond the limit is worth 0.0 at once, and one away from the target loses 1/target a unit. Raises RewardError for an option
    that is wrong, and where tokens are wanted and not known.
    """
    refuse_unknown(spec, LENGTH_OPTIONS)
    unit = word_option(spec, "unit", "tokens", ("tokens", "characters"))
    if ("limit" in spec.options) == ("target" in spec.options):
        raise RewardError(
            "give one of reward.options.limit and reward.options.target", fix="Write, for example, limit: 200"
        )
    tokens = getattr(response, "tokens", None)
    if unit == "tokens" and tokens is None:
        raise RewardError("how many tokens the response has is not known here", fix="Write unit: characters")
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
            f"reward.options.pattern {pattern[:100]!r} is no regular expression ({error})", fix="Correct it"
        ) from error


def environment(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """As the environment said when it was done; a response that was cut off before is worth 0. Raises RewardError."""
    return _handed(response, spec, "environment", "Let it give Done(reward)")


def agent(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """As the agent returned it; a response that was cut off, and of which it said nothing, is worth 0. Raises RewardError."""
    return _handed(response, spec, "agent", "Let it return a number")


def _handed(response: str, spec: RewardSpec, who: str, fix: str) -> RewardResult:
    if spec.options:
        raise RewardError(f"reward {who!r} has no options", fix="Leave reward.options out")
    said = response.environment if isinstance(response, Response) else None
    if said is not None:
        return RewardResult(said)
    if isinstance(response, Response) and response.truncated:
        return RewardResult(0.0)
    raise RewardError(
        f"the {who} gave no reward",
        fix=f"{fix}, or score with another reward than {who!r}",
    )


log = logging.getLogger(__name__)
OPTIONS = ("digits", "longest")

LIMIT_S = 2
"""Seconds for reading a text, and for comparing two."""

LONGEST = 20_000
"""Characters of a response's end that are looked at."""


class MathReward:
    """1.0 if the response gives the expected answer, else 0.0.

    The response's answer is what stands in its last \\boxed{}, or else the last that looks like an answer, in LaTeX or plain.
    Options: `digits`: decimal places to which numbers are compared (6); `longest`: only so many characters of the response's end
    are looked at (20000). Parts: `correct`; `found`: whether there was any answer to compare; `gave_up`: whether comparing
    took too long. Raises RewardError if the expected answer cannot be read.
    """

    def start(self, spec: RewardSpec) -> None:
        """Import the library. Raises RewardError if it is not installed."""
        _library()

    def __call__(self, response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
        """As the class says."""
        refuse_unknown(spec, OPTIONS)
        digits = int(number_option(spec, "digits", 6, least=0, whole=True))
        longest = int(number_option(spec, "longest", LONGEST, least=1, whole=True))
        library = _library()
        expected = _expected(str(answer_field(fields, spec)), spec.answer)
        gave_up, found, correct = 0.0, [], False
        try:
            found = library.parse(str(response)[-longest:], parsing_timeout=LIMIT_S, raise_on_error=True)
            correct = bool(found) and bool(
                library.verify(
                    list(expected), found, float_rounding=digits, timeout_seconds=LIMIT_S, raise_on_error=True
                )
            )
        except library.errors.TimeoutException:
            gave_up = 1.0
        except Exception as error:  # noqa: BLE001  as the library itself says: what SymPy chokes on is no answer
            log.debug("not comparable: %s", error)
        parts = (("correct", float(correct)), ("found", float(bool(found))), ("gave_up", gave_up))
        return RewardResult(float(correct), parts)


math = MathReward()


def _library() -> Any:
    try:
        library = importlib.import_module("math_verify")
    except ImportError as error:
        raise RewardError(
            f"reward 'math' needs the package math-verify, which cannot be imported ({error})",
            fix="Install it where controllers run: pip install 'gcore[math]'",
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each text that it gives up on
    return library


@functools.lru_cache(maxsize=4096)
def _expected(answer: str, field: str) -> tuple[Any, ...]:
    """The expected answer as the library reads it: as LaTeX if it does not look like it, as in `x+1`. Raises RewardError."""
    library = _library()
    marked = any(mark in answer for mark in ("$", "\\boxed", "\\[", "\\("))
    for text in (answer,) if marked else (f"${answer}$", answer):
        expected = library.parse(text, parsing_timeout=LIMIT_S)
        if expected:
            return tuple(expected)
    raise RewardError(
        f"the expected answer {answer[:100]!r} in field {field!r} cannot be read as mathematics",
        fix="Name another field in reward.answer, or use reward.name: exact",
    )
