"""Common parts of all gRPC calls: the caller's schema versions, status details of rejected calls, handler wrappers, TLS.

Every RPC carries, as metadata, the schema versions that its caller supports: its own and the one before. The server supports two as well. If
they have none in common, the server rejects the call before it reads the request, with one sentence that names both sides. A call without this
metadata counts as the first version. Responses need no version, because messages only gain fields, which older readers ignore. Messages that
contain a stored record (the seal in `Apply`) or samples (a feed) have their own version.

A rejected call has a `google.rpc.Status` in its trailing metadata: an `ErrorInfo` with a constant reason for programs, and a `BadRequest` with
the wrong fields. All metadata together may have 8 KiB, otherwise gRPC drops the whole response with its code. A non-ASCII character takes three
bytes in the sentence, and details grow by a third. So this module shortens both. `controllers.api.edge.errors` maps errors to codes and reasons.

gRPC calls the handler of a unary request only when the request has arrived; until then an unauthenticated call occupies its place. `early_handler`
makes a handler that runs when the call begins and reads the request itself. So `NodesOnlyInterceptor` of the train ranks authenticates the caller
before the request arrives.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from gcore import schema
from gcore.api.tls import SCHEME, PemFiles, ReloadingFiles, parse_cert_name
from gcore.errors import GcoreError, UsageError
from gcore.system.concurrency import limit_time

REQUEST_WITHIN_S = 30.0
"""Longest time from the start of a call to its request; enough for the largest request over a slow network."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def handler_call(handler: Handler) -> Callable[..., Any]:
    """Return the function in `handler` that answers a request.

    It takes the request and the context, and returns an awaitable; for a response stream, an asynchronous iterator.
    """
    either: Any = handler
    found: Callable[..., Any] = {
        (False, False): either.unary_unary,
        (False, True): either.unary_stream,
        (True, False): either.stream_unary,
        (True, True): either.stream_stream,
    }[handler.request_streaming, handler.response_streaming]
    return found


def wrap_handler(handler: Handler, answer: Callable[..., Any], decode: Callable[[bytes], Any] | None = None) -> Handler:
    """Return a handler like `handler` (unary or stream, serializers) that calls `answer`. `decode`: replaces its request deserializer."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(answer, decode or handler.request_deserializer, handler.response_serializer)


def early_handler(handler: Handler, answer: Callable[..., Any]) -> Handler:
    """Return a handler that calls `answer` with an iterator of requests (for `read_request`) and a context as soon as the call begins."""
    make: Callable[..., Handler] = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )
    return make(answer, handler.request_deserializer, handler.response_serializer)


async def read_request(handler: Handler, requests: AsyncIterator[Any], within_s: float = REQUEST_WITHIN_S) -> Any:
    """Return the request of a unary call, waiting for it at most `within_s`; of a request stream, the iterator `requests` itself.

    Raises LateRequest, and UsageError if the call has no request.
    """
    if handler.request_streaming:
        return requests
    try:
        async with limit_time(within_s):
            return await anext(requests)
    except TimeoutError as error:
        raise LateRequest(
            f"the request did not arrive within {within_s:g} s after the start of the call", fix="Repeat the call"
        ) from error
    except StopAsyncIteration as error:
        raise UsageError("the call has no request, or one that is too large", fix="Use a client of this API") from error


class LateRequest(GcoreError):
    """The request of a call did not arrive in time."""


DOMAIN = "gcore"
DETAILS_KEY = "grpc-status-details-bin"

MOST_SAID = 3500
"""Most bytes of a rejection's message on the wire."""

MOST_DETAILS = 2700
"""Most bytes of a rejection's `google.rpc.Status`, which holds the details."""

MOST_AGAIN = 500
"""Most bytes of the message's copy in the `google.rpc.Status`."""

MOST_VIOLATIONS = 16

MOST_OF_A_FIELD, MOST_OF_A_VIOLATION = 80, 300
"""Most bytes of a wrong field's name and of its problem in the details. The message has the full text."""

UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Violation:
    """A wrong field of the request, or of the spec in it (`spec.flow.steps`), and its problem."""

    field: str
    what: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the server rejects a call: status code, message for people, constant reason for programs, wrong fields."""

    code: grpc.StatusCode
    sentence: str
    reason: str = UNKNOWN
    violations: tuple[Violation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the ErrorInfo for programs, such as the job's uid."""


def cut_bytes(text: str, most: int) -> str:
    """Shorten the text to `most` bytes of UTF-8."""
    data = text.encode(errors="replace")
    return text if len(data) <= most else data[: most - 4].decode(errors="ignore") + " ..."


def clip_details(text: str) -> str:
    """Shorten a message so that gRPC's encoding of it (three bytes for each byte that is not plain ASCII) has at most `MOST_SAID` bytes."""
    total = 0
    for place, character in enumerate(text):
        data = character.encode(errors="replace")
        total += 1 if 0x20 <= data[0] < 0x7F and data != b"%" else 3 * len(data)
        if total > MOST_SAID - 4:
            return text[:place] + " ..." if len(text) > place + 4 else text
    return text


def refusal_metadata(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata of a rejected call: one `google.rpc.Status` with the reason and the wrong fields."""
    info = error_details_pb2.ErrorInfo(reason=refusal.reason, domain=DOMAIN)
    for name, value in list(refusal.metadata.items())[:8]:
        info.metadata[cut_bytes(name, 64)] = cut_bytes(value, MOST_OF_A_VIOLATION)
    status = status_pb2.Status(code=refusal.code.value[0], message=cut_bytes(refusal.sentence, MOST_AGAIN))
    status.details.add().Pack(info)
    wrong = error_details_pb2.BadRequest()
    for one in refusal.violations[:MOST_VIOLATIONS]:
        field, what = cut_bytes(one.field, MOST_OF_A_FIELD), cut_bytes(one.what, MOST_OF_A_VIOLATION)
        wrong.field_violations.add(field=field, description=what)
        if status.ByteSize() + wrong.ByteSize() > MOST_DETAILS:
            del wrong.field_violations[-1]
            break
    if wrong.field_violations:
        status.details.add().Pack(wrong)
    return ((DETAILS_KEY, status.SerializeToString()),)


def parse_refusal(error: grpc.RpcError) -> Refusal:
    """Return why a call was rejected, from the error that a client got. The reason is `UNKNOWN` if another program, such as a proxy, rejected it."""
    code, sentence = error.code(), error.details() or ""
    plain = Refusal(code, sentence)
    data = _of(error)
    if data is None:
        return plain
    reason, violations, metadata = UNKNOWN, [], {}
    try:
        for detail in status_pb2.Status.FromString(data).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                wrong = error_details_pb2.BadRequest.FromString(detail.value)
                violations = [Violation(one.field, one.description) for one in wrong.field_violations]
    except DecodeError:
        return plain
    return Refusal(code, sentence, reason, tuple(violations), metadata)


def _of(error: grpc.RpcError) -> bytes | None:
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    return next((value for key, value in metadata if key == DETAILS_KEY and isinstance(value, bytes)), None)


VERSION_KEY = "gcore-schema-version"

UNSERVED = "SCHEMA_VERSION_NOT_SERVED"
"""Reason of calls whose schema version is not supported."""


def version_metadata(versions: Collection[int] | None = None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call whose caller supports `versions` (None: those of this process)."""
    return ((VERSION_KEY, ",".join(str(version) for version in sorted(versions or schema.READABLE))),)


def version_refusal(said: str | None) -> str | None:
    """Return why a call is rejected whose version metadata is `said` (None: it has none); None if this process supports one of its versions."""
    spoken = set((str(schema.FIRST_VERSION) if said is None else said).split(","))
    if spoken & {str(readable) for readable in schema.READABLE}:
        return None
    older = all(one.isascii() and one.isdigit() and len(one) < 9 and int(one) < schema.SCHEMA_VERSION for one in spoken)
    upgrade = "the caller" if older else "the controllers and workers first, or use a gcore with a matching version"
    readable = " and ".join(map(str, sorted(schema.READABLE)))
    return f"the call has schema version {str(said)[:20]!r}, but this process supports {readable}; upgrade {upgrade}"


class VersionedStub:
    """Wraps a gRPC stub: adds the caller's schema versions (`versions`; None: this process's) and the metadata `more` to every call."""

    def __init__(
        self, stub: Any, versions: Collection[int] | None = None, *, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._stub = stub
        self._metadata = version_metadata(versions) + more

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self._stub, name), metadata=self._metadata)


class VersionGate(grpc.aio.ServerInterceptor):
    """Rejects calls to gcore's services whose caller has no schema version in common with this process, with FAILED_PRECONDITION.

    Does not apply to the health service.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/gcore."):
            return handler
        said = next((str(v) for k, v in handler_call_details.invocation_metadata or () if k == VERSION_KEY), None)
        why = version_refusal(said)
        return handler if why is None else _refusing(handler, why)


def _refusing(handler: Handler, why: str) -> Handler:
    """Return a handler of the same kind that rejects every call."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        code = grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, why, refusal_metadata(Refusal(code, why, UNSERVED)))

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await refuse(request, context)
        yield  # makes this a generator, because interceptors iterate over the responses

    return wrap_handler(handler, refuse_stream if handler.response_streaming else refuse)


def server_credentials(watched: ReloadingFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """Return a server's TLS credentials; new connections use the newest certificate files. `mutual`: clients must have a certificate too."""
    given = [watched.pem]
    first = _configuration(given[0], mutual=mutual)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        newest = watched.pem
        if newest is given[0]:
            return None
        given[0] = newest
        return _configuration(newest, mutual=mutual)

    return grpc.dynamic_ssl_server_credentials(first, fetch, mutual)  # type: ignore[arg-type]


def _configuration(pem: PemFiles, *, mutual: bool) -> grpc.ServerCertificateConfiguration:
    if pem.key is None or pem.cert is None:
        raise UsageError("a server needs a certificate and its key", where="tls", fix="Set both cert and key")
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca if mutual else None)


class NodesOnlyInterceptor(grpc.aio.ServerInterceptor):
    """Rejects callers that are not nodes of the cluster, with PERMISSION_DENIED."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        either = handler_call(handler)

        async def answered(requests: AsyncIterator[Any], context: Any) -> Any:
            return await either(await _admitted(handler, requests, context), context)

        async def streamed(requests: AsyncIterator[Any], context: Any) -> Any:
            async with aclosing(either(await _admitted(handler, requests, context), context)) as answers:
                async for one in answers:
                    yield one

        return early_handler(handler, streamed if handler.response_streaming else answered)


async def _admitted(handler: Handler, requests: AsyncIterator[Any], context: Any) -> Any:
    """Return the request if a node of the cluster sent it; otherwise abort the call."""
    names = (value.decode(errors="replace") for value in context.auth_context().get("peer_uri", ()))
    whose = parse_cert_name([name for name in names if name.startswith(f"{SCHEME}://")])
    if whose is None or whose.kind != "node":
        await _refuse(
            context, grpc.StatusCode.PERMISSION_DENIED, "train ranks accept calls from nodes of the cluster only"
        )
    try:
        return await read_request(handler, requests)
    except LateRequest as error:
        await _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except UsageError as error:
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))


async def _refuse(context: Any, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort raises")
