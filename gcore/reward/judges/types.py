"""Judge errors, and the interfaces of a judge: the calls that send questions, and the observer.

An engine of the cluster or an external server answers; the controller's metrics observe. The judge's `on_error` decides
what happens to a response with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gcore.errors import EngineError, EngineLate, GcoreError, TracedError


class JudgeError(TracedError):
    """A response could not be judged, and a retry will not help.

    `trace`: the traceback of a custom parser, or empty. It is shown in the event, not in the reason.
    """


class Unjudgeable(JudgeError):
    """No response to the prompt can be judged: its entry, the verdict parser or the spec is wrong."""


class JudgeAway(JudgeError):
    """The judge is unavailable; a retry may help."""


class JudgeLate(JudgeAway):
    """A judge did not answer before the timeout."""


def judge_away(error: EngineError) -> JudgeAway:
    """Convert the error of an engine that did not answer a question."""
    failure = JudgeLate if isinstance(error, EngineLate) else JudgeAway
    return failure(error.what, where=error.where, fix=error.fix)


class Unreadable(GcoreError):
    """An answer has no verdict; `what` says why. Parsers raise it, and the answer does not count."""


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
    """Whether it reached its maximum length."""


@dataclass(frozen=True, slots=True)
class ClassifierAnswer:
    """Number that a classifier returned."""

    number: float
    tokens_in: int
    """Tokens of the question."""


class ChatCall(Protocol):
    """Sends a question to a generative judge.

    A client of an external judge measures its own timeouts, because it waits for the rate limit.
    """

    async def __call__(self, question: str, seeds: Sequence[int]) -> tuple[Answer, ...]:
        """One answer per seed. Raises JudgeAway if the judge is unavailable, JudgeError if a retry will not help."""
        ...


class ScoreCall(Protocol):
    """Sends a question to a judge of `kind: classifier`."""

    async def __call__(self, question: str) -> ClassifierAnswer:
        """The number and the token count. Raises JudgeAway or JudgeError, as `ChatCall` does."""
        ...


class JudgeObserver(Protocol):
    """Observes requests by judge name. Its methods neither block nor raise."""

    def asked(self, judge: str, seconds: float, tokens_in: int, tokens_out: int) -> None:
        """A question was answered after `seconds`. `tokens_out`: of all its answers, 0 for a classifier."""
        ...

    def failed(self, judge: str, why: Why) -> None:
        """A try failed."""
        ...

    def verdict(self, judge: str, value: float) -> None:
        """A question was judged. Cached verdicts are not reported again."""
        ...

    def unreadable(self, judge: str, example: str, why: str) -> None:
        """An answer could not be read, and why. `example`: its beginning."""
        ...

    def remembered(self, judge: str) -> None:
        """No request was sent, because the verdict was cached or the same question was already pending."""
        ...

    def disagreed(self, judge: str, share: float) -> None:
        """In this share of a group's pairs the two orders contradicted each other."""
        ...
