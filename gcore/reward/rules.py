"""Rewards that follow a rule: 1.0 if the response gives the expected answer, else 0.0.

The expected answer is the field of the prompt's entry that `reward.answer` names. Nothing is given for a good try, for
form or for length; that is for other rewards to add.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.registry import RewardError, RewardResult

LONGEST_NUMBER = 400
"""Characters looked at before the last digit: a response that runs on in digits must not take the controller's time."""

# A sign counts if it touches the number and does not stand behind a number, a word or a bracket, where it subtracts.
# Exponents have at most three digits: what is larger is no answer, and would only cost time.
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?"
    r"|(?:(?<![\w)\]])[+-])?(?<![\w.])\.[0-9]+"
)


def numeric(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the last number in the response equals the expected one exactly.

    Numbers are decimal: digits, with a sign, a fraction, an exponent or English thousands (1,234.5) where there is one; 46,
    46.0 and +46 are equal, 46.01 is another number. Text around it does not matter, numbers before it do not count. Raises
    RewardError if the expected answer is no number.
    """
    expected = _expected_number(fields, spec)
    found = last_number(response)
    return _result(found is not None and found == expected)


def exact(response: str, fields: Mapping[str, Any], spec: RewardSpec) -> RewardResult:
    """1.0 if the response is the expected answer, character by character, apart from white space around either.

    An answer that is no string is compared as JSON writes it. Raises RewardError if there is no expected answer.
    """
    answer = _answer(fields, spec)
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return _result(response.strip() == text.strip())


def last_number(text: str) -> Decimal | None:
    """The last number that `text` holds, or None."""
    end = max(map(text.rfind, "0123456789")) + 1  # behind the last digit; 0 if there is none
    tail = text[max(0, end - LONGEST_NUMBER) : end].replace("\u2212", "-")  # the typographic minus sign
    matches = [match.group() for match in _NUMBER.finditer(tail)]
    return Decimal(matches[-1].replace(",", "")) if matches else None


def _result(correct: bool) -> RewardResult:
    value = 1.0 if correct else 0.0
    return RewardResult(value, (("correct", value),))


def _expected_number(fields: Mapping[str, Any], spec: RewardSpec) -> Decimal:
    answer = _answer(fields, spec)
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


def _answer(fields: Mapping[str, Any], spec: RewardSpec) -> Any:
    answer = fields.get(spec.answer)
    if answer is None:
        raise RewardError(
            f"the prompt's entry has no answer in field {spec.answer!r}", fix="Name the field in reward.answer"
        )
    return answer
