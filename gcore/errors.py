"""The errors a person meets. Each says what was wrong, with what value, and what to do.

`exit_code` is what the command line ends with. Anything that is not a `GcoreError` is a defect of gcore and may show
a traceback; a `GcoreError` never does.

Every process imports this module, and only one that refuses a name compares it: so `nearest_name` imports difflib.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar


class GcoreError(Exception):
    """A failure that is explained in one sentence: what, where, and what to do about it."""

    exit_code: ClassVar[int] = 1
    refusal: Any = None
    """What the API said of it to programs (`gcore.api.rpc.Refusal`), where it was the API that refused."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}{'' if text.endswith('?') else '.'} {self.fix}" if self.fix else text


class TracedError(GcoreError):
    """An error of foreign code. `trace`: the traceback of that code alone, or empty; for the event, not for the sentence."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, trace: str = "") -> None:
        super().__init__(what, where=where, fix=fix)
        self.trace = trace


@contextlib.contextmanager
def explain_os_errors(
    what: str, kind: type[GcoreError] = GcoreError, *, where: object = None, fix: str | None = None
) -> Iterator[None]:
    """Raise an OSError of the block as `kind`, with what the system said behind `what`."""
    try:
        yield
    except OSError as error:
        at = None if where is None else str(where)
        raise kind(f"{what} ({error.strerror or error})", where=at, fix=fix) from error


class JobFailed(GcoreError):
    """The job ended, and not well."""

    exit_code = 1


class UsageError(GcoreError):
    """The command, the spec or a file it names is wrong; nothing was started."""

    exit_code = 2


class SpecError(UsageError):
    """A job spec does not validate."""


class DataError(UsageError):
    """A dataset or model folder cannot be used."""


class CannotListen(GcoreError):
    """An address cannot be had now. It may be tomorrow: a start that is tried again is no waste."""

    exit_code = 1


class NotAllowed(GcoreError):
    """Whoever calls is not known, or may not do this."""

    exit_code = 4


class Unreachable(GcoreError):
    """No controller, or no store, answered."""

    exit_code = 3


class StoreUnavailable(Unreachable):
    """The store did not answer in time. A write that was under way has an unknown outcome: read before repeating it."""


class EngineError(GcoreError):
    """An engine refused a request, or broke while it served one."""


class EngineUnreachable(EngineError):
    """No answer from an engine; the request may go to another."""


class EngineLate(EngineUnreachable):
    """Nothing came from an engine in time."""


class EngineMemoryUnknown(EngineError):
    """An engine was left on its way to sleep or awake; to release or take its memory again may end its server."""


class EngineGaveUp(EngineError):
    """An engine was told to give up on a request, or was paused; the request may be put again."""


class LeaseLost(GcoreError):
    """The store has ended a lease that was thought to live."""


MAX_COMPARED = 80
"""Characters of a wrong name that are looked at: the comparison takes their square."""


def nearest_name(wrong: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known name that is most like `wrong`; None if none is. `cutoff`: how alike, from 0 to 1 (difflib's ratio)."""
    import difflib

    return next(iter(difflib.get_close_matches(wrong[:MAX_COMPARED], sorted(known), n=1, cutoff=cutoff)), None)


def did_you_mean(wrong: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """`, did you mean 'grpo'?`, or nothing."""
    near = nearest_name(wrong, known, cutoff=cutoff)
    return f", did you mean {near!r}?" if near is not None else ""
