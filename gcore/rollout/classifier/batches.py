"""Which of the questions that wait go through the model together. Pure.

The oldest always goes, so that none waits for ever; with it go those of the first `WINDOW` whose lengths are nearest to its
own, for the shorter of a batch are padded to the longest. A batch holds at most `slots` questions and, padding included, at
most `tokens` tokens; and at most half of it is padding. A question that is longer than `tokens` goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

WINDOW = 1024
"""So many of those that wait are looked at: sorting a queue of a hundred thousand would cost more than a pass."""


def batch(lengths: Sequence[int], *, slots: int, tokens: int) -> list[int]:
    """The places of those that go, the oldest first. `lengths`: of those that wait, in the order of their coming; at least one."""
    first = lengths[0]
    chosen, longest, real = [0], first, first
    for place in sorted(range(1, min(len(lengths), WINDOW)), key=lambda place: abs(lengths[place] - first)):
        if len(chosen) == slots:
            break
        length = lengths[place]
        padded = (len(chosen) + 1) * max(longest, length)
        if padded <= tokens and padded <= 2 * (real + length):
            chosen.append(place)
            longest, real = max(longest, length), real + length
    return chosen
