"""One line of a file of JSON lines, as somebody may have left it: cut off, damaged, or written by another program. Pure.

What is no object, is nested too deep, or has a number that nobody can have measured (`NaN`, an infinite one, one beyond `MOST`) is told
from what can be read; whether an object is the one that was expected is its reader's to check.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MOST = 1e18
"""No time, count or size that is written down comes near it."""


def object_in(line: str) -> dict[str, Any] | None:
    """The object that the line is; None for anything else."""
    try:
        tree = json.loads(line, parse_float=_float, parse_int=_int, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def number(value: Any) -> float:
    """A number of such an object. Raises TypeError for what is none, as text or a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _float(text: str) -> float:
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError("no number that was measured")
    return value


def _int(text: str) -> int:
    value = int(text)
    if not -MOST <= value <= MOST:
        raise ValueError("no number that was counted")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")
