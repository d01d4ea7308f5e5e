"""Rewards for the form of a response: a pattern that it follows, and how long it is. What it says is for other rewards.

They need no expected answer. A setting in `reward.options` that a rule does not know is an error: misspelt, it would change
nothing in silence.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.options import number_option, refuse_unknown, truth_option, word_option
from gcore.reward.registry import RewardError, RewardResult

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
