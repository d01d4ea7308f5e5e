"""Why a request is refused that is well-formed: kinds of errors that leave as gRPC statuses of their own.

`reason` is the constant that a program goes by (`ErrorInfo.reason`, docs/api.md lists them); it never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gcore.errors import GcoreError, UsageError
from gcore.rpc_status import Violation


class NotFound(GcoreError):
    """What was asked for is not there."""

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
    """The request does not fit what stands in the store."""

    reason: ClassVar[str] = "CONFLICT"


class JobEnded(Conflict):
    """What was asked for is only done to a job that has not ended."""

    reason: ClassVar[str] = "JOB_HAS_ENDED"


class JobNotEnded(Conflict):
    """What was asked for is only done to a job that has ended."""

    reason: ClassVar[str] = "JOB_HAS_NOT_ENDED"


class Exhausted(GcoreError):
    """There is no room for more of the kind at the moment."""

    reason: ClassVar[str] = "TOO_MANY_STREAMS"


class TooManyCalls(Exhausted):
    """Of calls, whatever they are about."""

    reason: ClassVar[str] = "TOO_MANY_CALLS"


class Forbidden(GcoreError):
    """Whose call it is, is known, and they may not."""

    reason: ClassVar[str] = "PERMISSION_DENIED"


class Unauthenticated(GcoreError):
    """The call says not, or not in a way that holds, whose it is."""

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
