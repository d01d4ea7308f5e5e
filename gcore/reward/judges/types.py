"""The errors between a response and its verdict, and the two edges of a judge: what it asks through, and who counts.

An engine of the cluster or an address outside of it answers; the controller's metrics count. `on_error` of the judge says what
becomes of a response that has an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import EngineError, EngineLate, GcoreError, TracedError


class JudgeError(TracedError):
    """A response could not be judged, and asking again will not help.

    `trace`: the traceback of a parser of somebody's own, or empty. It is for the event, not for the reason.
    """


class Unjudgeable(JudgeError):
    """Nor could another response to the prompt be judged: its entry is wrong, the verdict's parser, or the spec."""


class JudgeAway(JudgeError):
    """The judge could not be asked; another try may help."""


class JudgeLate(JudgeAway):
    """A judge gave no answer in time."""


def judge_away(error: EngineError) -> JudgeAway:
    """What an engine's error is that did not answer a question."""
    failure = JudgeLate if isinstance(error, EngineLate) else JudgeAway
    return failure(error.what, where=error.where, fix=error.fix)


class Unreadable(GcoreError):
    """An answer holds no verdict. `what` says why. A parser raises it; the answer then does not count."""


Why = Literal["away", "timeout", "refused"]
"""Why a question was in vain: it could not be asked; nothing came in time; asking again will not help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The text that a judge wrote."""

    text: str
    tokens_in: int
    """Of the question."""
    tokens_out: int
    truncated: bool
    """Whether it was cut off at its longest length."""


@dataclass(frozen=True, slots=True)
class ClassifierAnswer:
    """The number that a classifier gave."""

    number: float
    tokens_in: int
    """Of the question."""


class ChatCall(Protocol):
    """Asks a judge that writes. One that others serve is not timed by who asks: it waits for its turn, and times its requests itself."""

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """One answer a seed. Raises JudgeAway if it could not be asked, JudgeError if asking again will not help."""
        ...


class ScoreCall(Protocol):
    """Asks a judge of `kind: classifier`."""

    async def __call__(self, question: str) -> ClassifierAnswer:
        """The number it gives, and for what. Raises JudgeAway or JudgeError, as `ChatCall` does."""
        ...


class JudgeObserver(Protocol):
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
