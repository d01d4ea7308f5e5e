"""Judge errors, and the interfaces that a judge uses: the calls that send questions, and the observer.

An engine of the cluster or an external server answers the questions. The observer is the controller's metrics. The
spec's `on_error` of a judge decides what happens to a response that could not be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import EngineError, EngineLate, GcoreError, TracedError
from gcore.types import PictureRef

IMAGE_MARK = "\ufdd0"
"""Stands for a picture in a question: a code point that Unicode reserves for the internal use of programs."""


class JudgeError(TracedError):
    """A response could not be judged. A retry does not help, except after the subclass JudgeAway.

    `trace`: the traceback of a custom parser, or empty. The job's event shows it; the prompt's failure reason
    does not.
    """


class Unjudgeable(JudgeError):
    """No response to the prompt can be judged: its entry, the verdict parser or the spec is wrong."""


class JudgeAway(JudgeError):
    """The judge is unavailable; a retry may help."""


class JudgeLate(JudgeAway):
    """A judge did not answer before the timeout."""


def judge_away(error: EngineError) -> JudgeAway:
    """Convert the error of an engine that did not answer a question: a timeout becomes JudgeLate, others JudgeAway."""
    failure = JudgeLate if isinstance(error, EngineLate) else JudgeAway
    return failure(error.what, where=error.where, fix=error.fix)


class Unreadable(GcoreError):
    """An answer has no verdict; `what` says why. Parsers raise it, and the mean of the votes leaves the answer out."""


Why = Literal["away", "timeout", "refused"]
"""Why a request failed: the judge was unavailable; it timed out; a retry will not help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text that a judge generated."""

    text: str
    tokens_in: int
    """Tokens of the question."""
    tokens_out: int
    truncated: bool
    """Whether the answer reached its maximum length."""


@dataclass(frozen=True, slots=True)
class ClassifierAnswer:
    """Number that a classifier returned."""

    number: float
    tokens_in: int
    """Tokens of the question."""


class ChatCall(Protocol):
    """Sends a question to a generative judge.

    An external judge's client measures `timeout_s` itself, because the wait for the rate limit does not count.
    """

    async def __call__(
        self, question: str, seeds: Sequence[int], pictures: tuple[PictureRef, ...] = ()
    ) -> tuple[Answer, ...]:
        """Send the question; return one answer per seed. Raises JudgeAway if the judge is unavailable, JudgeError if a
        retry will not help.

        `pictures`: those that the question shows, one for each `IMAGE_MARK` in it.
        """
        ...


class ScoreCall(Protocol):
    """Sends a question to a judge of `kind: classifier`."""

    async def __call__(self, question: str, pictures: tuple[PictureRef, ...] = ()) -> ClassifierAnswer:
        """Send the question; return the score and the token count. Raises JudgeAway or JudgeError, as `ChatCall` does.

        `pictures`: those that the question shows, one for each `IMAGE_MARK` in it.
        """
        ...


class JudgeObserver(Protocol):
    """Gets a call for each event of a judge; `judge` is its name. Its methods neither block nor raise."""

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        """A question was answered after `seconds`. `tokens_out`: tokens of all its answers; 0 for a classifier."""
        ...

    def failed(self, judge: str, why: Why) -> None:
        """One attempt to send a question failed."""
        ...

    def verdict(self, judge: str, value: float) -> None:
        """A question was judged with the score `value`. A verdict from the cache is not reported again."""
        ...

    def unreadable(self, judge: str, example: str, why: str) -> None:
        """An answer contains no verdict; `why` says what is wrong. `example`: beginning of the answer."""
        ...

    def remembered(self, judge: str) -> None:
        """No request was sent, because the verdict was cached or the same question was already pending."""
        ...

    def disagreed(self, judge: str, share: float) -> None:
        """In a share of a group's pairs (0 to 1) the judge's verdicts for the two orders contradicted each other."""
        ...
