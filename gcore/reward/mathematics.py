"""Mathematical answers, compared by what they mean: 1/2, 0.5 and \\frac{1}{2} are equal, so are x+1 and 1+x, {1,2} and {2,1}.

Reading and comparing is math-verify's (`gcore[math]`), which stands on SymPy. It limits its own time by alarm signals, so it
runs in the main thread of a process of its own; what it gives up on counts as wrong, and a part says so. It is imported with
the first use of this reward: SymPy takes a second.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

from gcore.config.spec import RewardSpec
from gcore.reward.options import answer_field, number_option, refuse_unknown
from gcore.reward.registry import RewardError, RewardResult

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
