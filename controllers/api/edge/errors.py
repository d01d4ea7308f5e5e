"""Errors of the API: the gRPC status for each gcore error, with a `google.rpc.Status`.

A defect is logged and returned as INTERNAL; it fails its own call, never the daemon. `ErrorInfo.reason` is the constant for programs
(docs/reference/api.md lists them); its meaning never changes.
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
    """The resource that a call names does not exist."""

    reason: ClassVar[str] = "NOT_FOUND"


class JobNotFound(NotFound):
    """No job has that name or uid, or the caller has no access to it."""

    reason: ClassVar[str] = "JOB_NOT_FOUND"


class NodeNotFound(NotFound):
    """No node has that name."""

    reason: ClassVar[str] = "NODE_NOT_FOUND"


class WorkerNotFound(NotFound):
    """The job has no worker of that name."""

    reason: ClassVar[str] = "WORKER_NOT_FOUND"


class NamespaceNotFound(NotFound):
    """The namespace does not exist, or the caller has no access to it."""

    reason: ClassVar[str] = "NAMESPACE_NOT_FOUND"


class Conflict(GcoreError):
    """The request conflicts with the records in the store."""

    reason: ClassVar[str] = "CONFLICT"


class JobEnded(Conflict):
    """The call applies only to jobs that have not ended."""

    reason: ClassVar[str] = "JOB_HAS_ENDED"


class JobNotEnded(Conflict):
    """The call applies only to jobs that have ended."""

    reason: ClassVar[str] = "JOB_HAS_NOT_ENDED"


class Exhausted(GcoreError):
    """The call would exceed a limit of the daemon, such as its number of streams."""

    reason: ClassVar[str] = "TOO_MANY_STREAMS"


class TooManyCalls(Exhausted):
    """Too many calls are active at once."""

    reason: ClassVar[str] = "TOO_MANY_CALLS"


class Forbidden(GcoreError):
    """The caller is authenticated but has no permission."""

    reason: ClassVar[str] = "PERMISSION_DENIED"


class Unauthenticated(GcoreError):
    """The call has no valid credentials."""

    reason: ClassVar[str] = "UNAUTHENTICATED"


class BadFields(UsageError):
    """Fields of the request are out of range, unknown, or inconsistent."""

    reason: ClassVar[str] = "BAD_REQUEST"

    def __init__(self, violations: Sequence[Violation], fix: str | None = None) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{one.field}: {one.what}" for one in violations), fix=fix)


def bad_field(field: str, what: str, fix: str | None = None) -> BadFields:
    """The error for one wrong field."""
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
"""The gRPC status and the reason (`ErrorInfo.reason`) of each class of errors. The first entry of which an error is an
instance applies."""


def status_of(error: GcoreError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return next(code for kind, code, _ in CODES if isinstance(error, kind))


def make_refusal(error: GcoreError, sentence: str = "") -> Refusal:
    """Convert an error to what the client gets: gRPC status, sentence and reason. `sentence` replaces the error's own
    text."""
    reason = next(reason for kind, _, reason in CODES if isinstance(error, kind))
    violations: tuple[Violation, ...] = ()
    if isinstance(error, BadFields):
        violations = error.violations
    elif isinstance(error, SpecError):
        violations = tuple(spec_violations(error))
    said = clip_details(sentence or str(error))
    return Refusal(status_of(error), said, getattr(error, "reason", reason), violations)


def spec_violations(error: SpecError) -> list[Violation]:
    """Parse the text of a spec error into the fields that are wrong, each with what is wrong. The text lists them as
    `section.field: what`, separated by semicolons."""
    found = []
    for problem in error.what.split("; "):
        name, colon, what = problem.partition(": ")
        is_name = colon and name.replace(".", "").replace("_", "").replace("-", "").isalnum()
        found.append(Violation(f"spec.{name}" if is_name else "spec_json", what if is_name else problem))
    return found


async def abort_call(context: CallContext, refusal: Refusal) -> NoReturn:
    """End the call with the status, sentence and reason of a refusal; never returns."""
    await context.abort(refusal.code, refusal.sentence, refusal_metadata(refusal))
    raise AssertionError("abort raises")


def final_status(context: Any, *, done: bool, left: bool = False) -> str:
    """The name of the gRPC status with which a call ended, for metrics and the audit log.

    `done`: whether the whole response was produced; otherwise the client has cancelled the call. `left`: the stream was closed from outside.
    gRPC does that when the client of a waiting stream disconnects, and does not cancel this task then.
    """
    code: Any = context.code()
    if isinstance(code, int):  # grpc.aio returns an integer if no status was set
        code = next((one for one in Code if one.value[0] == code), None)
    if code is None or code is Code.OK:
        if done:
            return Code.OK.name
        task = asyncio.current_task()
        gone = left or (task is not None and task.cancelling() > 0)
        return (Code.CANCELLED if gone else Code.UNKNOWN).name
    return str(code.name)


def handle_errors(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Convert the exceptions of a unary method to gRPC statuses."""

    @functools.wraps(method)
    async def guarded(self: Any, request: Any, context: CallContext) -> T:
        try:
            return await method(self, request, context)
        except Exception as error:  # noqa: BLE001 - the edge of the call
            await abort_call(context, _refused(self, method.__name__, error))

    return guarded


def handle_stream_errors(method: Callable[..., AsyncGenerator[T, None]]) -> Callable[..., AsyncGenerator[T, None]]:
    """Convert the exceptions of a streaming method to gRPC statuses."""

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
    """The refusal for an exception of the method `name`. Raises the exception if it is a refusal already."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, GcoreError):
        log.error("%s failed", name, exc_info=error)
        return Refusal(Code.INTERNAL, clip_details(f"{name} failed: {error!r}"), "DEFECT")
    # If the store is unavailable and the cause is known here, the caller gets the cause.
    return make_refusal(error, service.trouble() if isinstance(error, StoreUnavailable) else "")
