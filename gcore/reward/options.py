"""Reading `reward.options` and the entry's answer, for gcore's own rewards: what is wrong is a sentence with its key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.registry import RewardError


def refuse_unknown(spec: RewardSpec, known: Sequence[str]) -> None:
    """Raises RewardError for an option that the reward does not have."""
    unknown = sorted(set(spec.options) - set(known))
    if unknown:
        raise RewardError(
            f"reward {spec.name!r} has no option {unknown[0]!r}", fix=f"Known: {', '.join(known) or 'none'}"
        )


def word_option(spec: RewardSpec, name: str, default: str, words: Sequence[str]) -> str:
    """An option that is one of some words. Raises RewardError."""
    word = spec.options.get(name, default)
    if word not in words or not isinstance(word, str):
        raise RewardError(f"reward.options.{name} is {word!r}", fix=f"Write one of {', '.join(words)}")
    return word


def number_option(spec: RewardSpec, name: str, default: float, *, least: float, whole: bool = False) -> float:
    """An option that is a finite number, at least `least`. Raises RewardError."""
    number = spec.options.get(name, default)
    good = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
    if not good or float(number) < least or (whole and float(number) != int(number)):
        kind = "a whole number" if whole else "a number"
        raise RewardError(f"reward.options.{name} is {number!r}", fix=f"Write {kind}, at least {least:g}")
    return float(number)


def truth_option(spec: RewardSpec, name: str, default: bool) -> bool:
    """An option that is true or false. Raises RewardError."""
    truth = spec.options.get(name, default)
    if not isinstance(truth, bool):
        raise RewardError(f"reward.options.{name} is {truth!r}", fix="Write true or false")
    return truth


def answer_field(fields: Mapping[str, Any], spec: RewardSpec) -> Any:
    """What the entry says of the answer. Raises RewardError if it says nothing."""
    answer = fields.get(spec.answer)
    if answer is None:
        raise RewardError(
            f"the prompt's entry has no answer in field {spec.answer!r}", fix="Name the field in reward.answer"
        )
    return answer
