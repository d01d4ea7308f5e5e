"""Errors that users see. Each says what is wrong, with which value, and what to do.

`exit_code` is the exit code of the command line. Any other exception is a bug in gcore and may show a traceback; a
`GcoreError` never does.

Every process imports this module, but few compare names, so `nearest_name` imports difflib itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar


class GcoreError(Exception):
    """An error that users see: `what` is wrong, `where`, and how to `fix` it."""

    exit_code: ClassVar[int] = 1
    refusal: Any = None
    """The structured reason (`gcore.api.rpc.Refusal`), if the job API returned this error."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}{'' if text.endswith('?') else '.'} {self.fix}" if self.fix else text


class TracedError(GcoreError):
    """An error in foreign code, such as a reward function.

    `trace`: traceback of that code, or empty. Events contain it, the error message does not.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, trace: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.trace = trace


@contextlib.contextmanager
def explain_os_errors(
    what: str, kind: type[GcoreError] = GcoreError, *, where: object = None, fix: str | None = None
) -> Iterator[None]:
    """Turn an OSError in the block into the error `kind`. Its message is `what`, followed by the system's reason."""
    try:
        yield
    except OSError as error:
        at = None if where is None else str(where)
        raise kind(f"{what} ({error.strerror or error})", where=at, fix=fix) from error


class JobFailed(GcoreError):
    """The job ended without success."""

    exit_code = 1


class UsageError(GcoreError):
    """The command, the spec, or a file that it names is wrong. Nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """A job spec is not valid."""


class DataError(UsageError):
    """A dataset or model folder cannot be used."""


class CannotListen(GcoreError):
    """An address is in use or not available. A later retry may succeed."""

    exit_code = 1


class NotAllowed(GcoreError):
    """The caller is unknown or lacks the permission."""

    exit_code = 4


class Unreachable(GcoreError):
    """No controller answered, or the store did not answer."""

    exit_code = 3


class StoreUnavailable(Unreachable):
    """The store did not answer in time. A pending write may or may not have happened: read before repeating it."""


class EngineError(GcoreError):
    """An engine rejected a request or failed while serving it."""


class EngineUnreachable(EngineError):
    """An engine did not answer. The request may go to another engine."""


class EngineLate(EngineUnreachable):
    """An engine did not answer in time."""


class EngineMemoryUnknown(EngineError):
    """It is unknown whether an engine's memory is released: a controller began to release or restore it and has not
    finished. Doing so again may crash the engine's server.
    """


class EngineGaveUp(EngineError):
    """An engine aborted a request because it was asked to or was paused. The request may be sent again."""


class LeaseLost(GcoreError):
    """The store has expired a lease that the client considered valid."""


MAX_COMPARED = 80
"""Number of characters of a wrong name that are compared: the comparison takes quadratic time."""


def nearest_name(wrong: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to `wrong`; None if none is similar enough."""
    import difflib

    return next(iter(difflib.get_close_matches(wrong[:MAX_COMPARED], sorted(known), n=1, cutoff=0.5)), None)


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return a suggestion for the end of an error, such as `, did you mean 'grpo'?`; empty if no known name is similar."""
    near = nearest_name(wrong, known)
    return f", did you mean {near!r}?" if near is not None else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 200 characters; the name of its class if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an error's text on one line, at most 300 characters; the name of its class if it has no text."""
    return " ".join(str(error).split())[:300] or type(error).__name__
