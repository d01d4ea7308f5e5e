"""Why a request is refused that is well-formed: kinds of errors that leave as gRPC statuses of their own."""

from __future__ import annotations

from gcore.errors import GcoreError


class NotFound(GcoreError):
    """No job of that name or uid."""


class Conflict(GcoreError):
    """The request does not fit what stands in the store."""
