"""The nearest known name to one that is not known, as the end of a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_COMPARED = 80
"""Characters of a wrong name that are looked at: the comparison takes their square."""


def nearest(wrong: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known name that is most like `wrong`; None if none is. `cutoff`: how alike, from 0 to 1 (difflib's ratio)."""
    return next(iter(difflib.get_close_matches(wrong[:MAX_COMPARED], sorted(known), n=1, cutoff=cutoff)), None)


def did_you_mean(wrong: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """`, did you mean 'grpo'?`, or nothing."""
    near = nearest(wrong, known, cutoff=cutoff)
    return f", did you mean {near!r}?" if near is not None else ""
