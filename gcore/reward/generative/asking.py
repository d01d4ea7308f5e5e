"""What a judge is asked through, and who is told of it: the edges of `gcore.reward.generative.judge`.

Who asks (an engine of the cluster, an address outside of it) and who counts (the controller's metrics) are somebody else's;
here is only what they must be like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Why = Literal["away", "timeout", "refused"]
"""Why a question was in vain: it could not be asked; nothing came in time; asking again will not help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a judge wrote."""

    text: str
    tokens_in: int
    """Of the question."""
    tokens_out: int
    truncated: bool
    """Whether it was cut off at its longest length."""


@dataclass(frozen=True, slots=True)
class Valued:
    """What a classifier says."""

    number: float
    tokens_in: int
    """Of the question."""


class Ask(Protocol):
    """Asks a judge that writes. One that others serve is not timed by who asks: it waits for its turn, and times its requests itself."""

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """One answer a seed. Raises JudgeAway if it could not be asked, JudgeError if asking again will not help."""
        ...


class Value(Protocol):
    """Asks a judge of `kind: classifier`."""

    async def __call__(self, question: str) -> Valued:
        """The number it gives, and for what. Raises JudgeAway or JudgeError, as `Ask` does."""
        ...


class Seen(Protocol):
    """Is told what happens between a judge and its questions, by the judge's name. It neither waits nor raises."""

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        """A question was answered, after so long; `tokens_out` are those of all its answers, 0 for a classifier."""
        ...

    def failed(self, judge: str, why: Why) -> None:
        """A try was in vain."""
        ...

    def verdict(self, judge: str, value: float) -> None:
        """A question was judged. Those that are remembered are not told again."""
        ...

    def unreadable(self, judge: str, example: str, why: str) -> None:
        """An answer could not be read, and why; `example`: how it begins."""
        ...

    def remembered(self, judge: str) -> None:
        """A question was not asked, for its verdict was known, or somebody was asking it already."""
        ...

    def disagreed(self, judge: str, share: float) -> None:
        """In this share of a group's pairs, the two orders contradicted each other."""
        ...
