"""Texts of any length that others wrote (an agent, an environment, a template with a response in it), on their way to tokens.

A megabyte takes seconds, in which an event loop would do nothing else: renew no lease, for one. So it is done in a thread; a tokenizer lets
others work meanwhile. And what has no room anyway is not tokenized to its end to find that out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 4096
"""Characters that take no longer than it takes to ask a thread, or little."""
PER_TOKEN = 16
"""Characters for each token that there is room for, which are looked at first; of most texts, each has four or so."""


class TooLong(Exception):
    """A text has more tokens than there is room for: more than `tokens`."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"more than {tokens} tokens")
        self.tokens = tokens


async def aside(characters: int, work: Callable[[], T]) -> T:
    """What `work` on so many characters gives: in a thread if they are many. It must change nothing."""
    return work() if characters <= AT_ONCE else await asyncio.to_thread(work)


def check_length(text: str, room: int | None, encode: Callable[[str], Sequence[int]]) -> None:
    """Raises TooLong for a text that is far too long, by the tokens of its beginning; other texts are for the caller to count.

    Cut off there, a text may have other tokens than within the whole, but only near the end: twice as many as fit are enough to know.
    """
    if room is None or len(text) <= max(AT_ONCE, PER_TOKEN * room):
        return
    begun = encode(text[: max(AT_ONCE, PER_TOKEN * room)])
    if len(begun) > 2 * max(room, 1):
        raise TooLong(len(begun) // 2)
