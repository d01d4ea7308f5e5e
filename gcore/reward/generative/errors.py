"""What can be wrong between a response and its verdict.

Names only; whoever catches them says what becomes of the response (`on_error` of the judge).
"""

from __future__ import annotations

from gcore.errors import EngineError, EngineLate, GcoreError


class JudgeError(GcoreError):
    """A response could not be judged, and asking again will not help.

    `trace`: the traceback of a parser of somebody's own, or empty. It is for the event, not for the reason.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, trace: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.trace = trace


class Unjudgeable(JudgeError):
    """Nor could another response to the prompt be judged: its entry is wrong, the verdict's parser, or the spec."""


class JudgeAway(JudgeError):
    """The judge could not be asked; another try may help."""


class JudgeLate(JudgeAway):
    """It gave no answer in time."""


def unanswered(error: EngineError) -> JudgeAway:
    """What an engine's error is that did not answer a question."""
    failure = JudgeLate if isinstance(error, EngineLate) else JudgeAway
    return failure(error.what, where=error.where, fix=error.fix)


class Unreadable(GcoreError):
    """An answer holds no verdict. `what` says why. A parser raises it; the answer then does not count."""
