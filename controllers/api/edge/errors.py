"""Errors at the edge of the API: which gcore error leaves as which gRPC status, with a `google.rpc.Status`.

A defect is logged and leaves as INTERNAL; it fails its own call, never the daemon. `ErrorInfo.reason` is the constant for programs
(docs/reference/api.md lists them) and never changes its meaning.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, NoReturn, TypeVar

import grpc

from gcore.api.rpc import LateRequest, Refusal, Violation, clip_details, refusal_metadata
from gcore.errors import DataError, GcoreError, SpecError, StoreUnavailable, UsageError
from gcore.schema import UnreadableRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

CallContext = grpc.aio.ServicerContext[Any, Any]

Code = grpc.StatusCode


class NotFound(GcoreError):
    """The thing that a call names does not exist."""

    reason: ClassVar[str] = "NOT_FOUND"


class JobNotFound(NotFound):
    """No job of that name or uid, or none that the caller may see."""

    reason: ClassVar[str] = "JOB_NOT_FOUND"


class NodeNotFound(NotFound):
    """No node of that name."""

    reason: ClassVar[str] = "NODE_NOT_FOUND"


class WorkerNotFound(NotFound):
    """The job has no worker of that name."""

    reason: ClassVar[str] = "WORKER_NOT_FOUND"


class NamespaceNotFound(NotFound):
    """Nothing is of that namespace, or nothing that the caller may see."""

    reason: ClassVar[str] = "NAMESPACE_NOT_FOUND"


class Conflict(GcoreError):
    """The request conflicts with the records in the store."""

    reason: ClassVar[str] = "CONFLICT"


class JobEnded(Conflict):
    """The call is only for jobs that have not ended."""

    reason: ClassVar[str] = "JOB_HAS_ENDED"


class JobNotEnded(Conflict):
    """The call is only for jobs that have ended."""

    reason: ClassVar[str] = "JOB_HAS_NOT_ENDED"


class Exhausted(GcoreError):
    """A limit of the daemon is reached at the moment."""

    reason: ClassVar[str] = "TOO_MANY_STREAMS"


class TooManyCalls(Exhausted):
    """The caller has too many calls at once."""

    reason: ClassVar[str] = "TOO_MANY_CALLS"


class Forbidden(GcoreError):
    """The caller is authenticated, and not allowed to do this."""

    reason: ClassVar[str] = "PERMISSION_DENIED"


class Unauthenticated(GcoreError):
    """The call has no valid credentials."""

    reason: ClassVar[str] = "UNAUTHENTICATED"


class BadFields(UsageError):
    """Fields of the request that are out of range, unknown, or do not go together."""

    reason: ClassVar[str] = "BAD_REQUEST"

    def __init__(self, violations: Sequence[Violation], fix: str | None = None) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{one.field}: {one.what}" for one in violations), fix=fix)


def bad_field(field: str, what: str, fix: str | None = None) -> BadFields:
    """One field is wrong."""
    return BadFields([Violation(field, what)], fix)


CODES: tuple[tuple[type[GcoreError], grpc.StatusCode, str], ...] = (
    (Unauthenticated, Code.UNAUTHENTICATED, Unauthenticated.reason),
    (Forbidden, Code.PERMISSION_DENIED, Forbidden.reason),
    (Exhausted, Code.RESOURCE_EXHAUSTED, Exhausted.reason),
    (LateRequest, Code.DEADLINE_EXCEEDED, "LATE_REQUEST"),
    (NotFound, Code.NOT_FOUND, NotFound.reason),
    (JobEnded, Code.FAILED_PRECONDITION, JobEnded.reason),
    (JobNotEnded, Code.FAILED_PRECONDITION, JobNotEnded.reason),
    (Conflict, Code.FAILED_PRECONDITION, Conflict.reason),
    (StoreUnavailable, Code.UNAVAILABLE, "STORE_UNAVAILABLE"),
    (BadFields, Code.INVALID_ARGUMENT, BadFields.reason),
    (SpecError, Code.INVALID_ARGUMENT, "BAD_SPEC"),
    (DataError, Code.INVALID_ARGUMENT, "BAD_DATA"),
    (UsageError, Code.INVALID_ARGUMENT, "BAD_REQUEST"),
    (UnreadableRecord, Code.FAILED_PRECONDITION, "UNREADABLE_RECORD"),
    (GcoreError, Code.FAILED_PRECONDITION, "REFUSED"),
)
"""The first that fits."""


def status_of(error: GcoreError) -> grpc.StatusCode:
    """The code that an error leaves with."""
    return next(code for kind, code, _ in CODES if isinstance(error, kind))


def make_refusal(error: GcoreError, sentence: str = "") -> Refusal:
    """Make the refusal of a call; `sentence`: in place of the error's own."""
    reason = next(reason for kind, _, reason in CODES if isinstance(error, kind))
    violations: tuple[Violation, ...] = ()
    if isinstance(error, BadFields):
        violations = error.violations
    elif isinstance(error, SpecError):
        violations = tuple(spec_violations(error))
    said = clip_details(sentence or str(error))
    return Refusal(status_of(error), said, getattr(error, "reason", reason), violations)


def spec_violations(error: SpecError) -> list[Violation]:
    """The fields that a spec's error is about: it tells each as `section.field: what`, one after the other."""
    found = []
    for problem in error.what.split("; "):
        name, colon, what = problem.partition(": ")
        is_name = colon and name.replace(".", "").replace("_", "").replace("-", "").isalnum()
        found.append(Violation(f"spec.{name}" if is_name else "spec_json", what if is_name else problem))
    return found


async def abort_call(context: CallContext, refusal: Refusal) -> NoReturn:
    """End the call."""
    await context.abort(refusal.code, refusal.sentence, refusal_metadata(refusal))
    raise AssertionError("abort raises")


def final_status(context: Any, *, done: bool, left: bool = False) -> str:
    """The status that a call ends with, for those who count calls or write them down. `done`: whether all of its answer was given.
    Whoever went away before that has cancelled it. `left`: a stream was closed from outside, for nobody takes more of it: gRPC ends one
    so that waits for its client when that goes, and it is not this task that is cancelled then."""
    code: Any = context.code()
    if isinstance(code, int):  # as grpc.aio tells one that was not set
        code = next((one for one in Code if one.value[0] == code), None)
    if code is None or code is Code.OK:
        if done:
            return Code.OK.name
        task = asyncio.current_task()
        gone = left or (task is not None and task.cancelling() > 0)
        return (Code.CANCELLED if gone else Code.UNKNOWN).name
    return str(code.name)


def handle_errors(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Around a method that answers once."""

    @functools.wraps(method)
    async def guarded(self: Any, request: Any, context: CallContext) -> T:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the edge of the call
            await abort_call(context, _refused(self, method.__name__, error))

    return guarded


def handle_stream_errors(method: Callable[..., AsyncGenerator[T, None]]) -> Callable[..., AsyncGenerator[T, None]]:
    """Around a method that answers with a stream."""

    @functools.wraps(method)
    async def guarded(self: Any, request: Any, context: CallContext) -> AsyncGenerator[T, None]:
        try:
            async with aclosing(method(self, request, context)) as answers:
                async for one in answers:
                    yield one
        except Exception as error:  # noqa: BLE001 - the edge of the call
            await abort_call(context, _refused(self, method.__name__, error))

    return guarded


def _refused(service: Any, name: str, error: Exception) -> Refusal:
    """What `error` is to whoever called `name`. Raises it if it is a refusal already."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, GcoreError):
        log.error("%s failed", name, exc_info=error)
        return Refusal(Code.INTERNAL, clip_details(f"{name} failed: {error!r}"), "DEFECT")
    # Whoever asks in vain because the store is away is told why it does not come back.
    return make_refusal(error, service.trouble() if isinstance(error, StoreUnavailable) else "")
