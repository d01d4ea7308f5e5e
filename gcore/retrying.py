"""How long to wait before what was in vain is tried again: a prompt that no engine could take, a question to a judge."""

from __future__ import annotations

FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
"""Twice as long each time."""


def retry_delay(tries: int) -> float:
    """Seconds to wait after `tries` (from 1) in vain."""
    return min(FIRST_DELAY_S * 2.0 ** min(tries - 1, 16), LONGEST_DELAY_S)
