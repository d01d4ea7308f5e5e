"""From the answers to one question to its verdict: the mean of those that can be read.

What cannot be read does not count, and is not worth nothing. An answer that was cut off is read like any other, for a judge
may be asked for a single word; one that thinks first is told by `verdict.after` where its verdict begins. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gcore.reward.generative.asking import Answer
from gcore.reward.generative.errors import JudgeError, Unreadable

LONGEST_EXAMPLE = 200
"""Characters of an answer that are shown: its beginning."""

Read = Callable[[str], float]
"""Reads an answer. Raises Unreadable."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a response is worth. `example`: how the first answer begins that could not be read, or empty."""

    value: float
    votes: int
    """Answers that counted."""
    unreadable: int
    """Answers that could not be read."""
    example: str = ""


@dataclass(frozen=True, slots=True)
class NotRead:
    """An answer without a verdict. `example`: how it begins."""

    example: str
    why: str
    truncated: bool

    @property
    def reason(self) -> str:
        """Why it holds none, without a word of the answer itself: reasons that are alike are counted together."""
        return f"{self.why}{', and it was cut off at max_new_tokens' * self.truncated}"


def read_all(answers: Sequence[Answer], read: Read) -> tuple[float | NotRead, ...]:
    """What each answer says. Raises JudgeError if the parser itself is broken."""
    return tuple(_read(answer, read) for answer in answers)


def judgement(votes: Sequence[float | NotRead]) -> Judgement:
    """The verdict. Raises JudgeError if no answer can be read."""
    values = [vote for vote in votes if not isinstance(vote, NotRead)]
    lost = [vote for vote in votes if isinstance(vote, NotRead)]
    if values:
        example = lost[0].example if lost else ""
        return Judgement(mean(values), len(values), len(lost), example)
    if not lost:
        raise JudgeError("the judge gave no answer")
    first = lost[0]
    many = f"none of {len(lost)} answers" if len(lost) > 1 else "the answer"
    raise JudgeError(
        f"{many} can{'not' if len(lost) == 1 else ''} be read: {first.reason}",
        fix="Change the template or the verdict's parser",
    )


def mean(values: Sequence[float]) -> float:
    """Of at least one; never beyond the smallest and the largest of them, whatever rounding does."""
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def _read(answer: Answer, read: Read) -> float | NotRead:
    try:
        return read(answer.text)
    except Unreadable as error:
        return NotRead(answer.text.strip()[:LONGEST_EXAMPLE], error.what, answer.truncated)
