"""What of a growing text may be told. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def settled(text: str, stop: Sequence[str]) -> str:
    """The part of a growing text that stays, whatever comes.

    A character that is not whole yet stands there as a replacement, and the beginning of a stop string may become one.
    """
    text = text.rstrip("\ufffd")
    longest = 0
    for one in stop:
        for length in range(min(len(one) - 1, len(text)), longest, -1):
            if text.endswith(one[:length]):
                longest = length
                break
    return text[: len(text) - longest]
