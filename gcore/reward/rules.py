"""Rewards that follow a rule: 1.0 if the response gives the expected answer, else 0.0.

The expected answer is the field of the prompt's entry that `reward.answer` names. Nothing is given for a good try, for
form or for length; that is for other rewards to add. A setting in `reward.options` that a rule does not know is an error:
misspelt, it would change nothing in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.options import answer_field, refuse_unknown
from gcore.reward.registry import RewardError, RewardResult

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
