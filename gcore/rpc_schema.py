"""Every RPC carries the schema versions that its caller speaks, as metadata: its own and the one before. Whoever serves it also
speaks two; if they have none in common, the call is refused in one sentence that names both sides, before anything of it is
read. So a command line of this version works with daemons of the version before, and with such of the next.

A call without the metadata is one of version 1, which did not carry it there; so is that of a person with a tool of their
own. Answers need no version: messages only ever grow by fields that an older reader passes over. What a message holds as a
stored record (the seal in `Apply`), or as samples (a feed), says its own version.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from gcore.rpc_handlers import Handler, like
from gcore.rpc_status import Refusal, trailing
from gcore.schema import READABLE, SCHEMA_VERSION

KEY = "gcore-schema-version"
UNSERVED = "SCHEMA_VERSION_NOT_SERVED"
"""For programs: why such a call is refused."""


def carried(versions: Collection[int] = READABLE) -> tuple[tuple[str, str], ...]:
    """The metadata of a call whose caller speaks `versions`."""
    return ((KEY, ",".join(str(version) for version in sorted(versions))),)


def refusal(said: str | None) -> str | None:
    """Why a call whose metadata say this is not served, or None."""
    spoken = set(("1" if said is None else said).split(","))
    if spoken & {str(readable) for readable in READABLE}:
        return None
    older = all(one.isascii() and one.isdigit() and len(one) < 9 and int(one) < SCHEMA_VERSION for one in spoken)
    upgrade = "the caller" if older else "the controllers and workers first, or use the gcore that fits them"
    readable = " and ".join(map(str, sorted(READABLE)))
    return f"the call is of schema version {str(said)[:20]!r}, and this process serves {readable}; upgrade {upgrade}"


class VersionedStub:
    """A stub whose every call carries the versions that this process speaks, and `more` besides."""

    def __init__(
        self, stub: Any, versions: Collection[int] = READABLE, *, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._stub = stub
        self._metadata = carried(versions) + more

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._stub, name), metadata=self._metadata)


class VersionGate(grpc.aio.ServerInterceptor):
    """Refuses calls of gcore's services whose version is not served, with FAILED_PRECONDITION. Health answers everybody."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/gcore."):
            return handler
        said = next((str(v) for k, v in handler_call_details.invocation_metadata or () if k == KEY), None)
        why = refusal(said)
        return handler if why is None else _refusing(handler, why)


def _refusing(handler: Handler, why: str) -> Handler:
    """A handler of the same kind that only refuses."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        code = grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, why, trailing(Refusal(code, why, UNSERVED)))

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await refuse(request, context)
        yield  # whoever stands before this goes through its answers

    return like(handler, refuse_stream if handler.response_streaming else refuse)
