"""What every gRPC call of gcore has: the schema versions of its caller, status details of a refused call, handler wrappers, TLS.

Every RPC carries the schema versions that its caller speaks, as metadata: its own and the one before. The server speaks two
as well; if they have none in common, it refuses the call in one sentence that names both sides, before it reads the request.
A call without the metadata is one of the first version. Answers need no version: messages only grow by fields that an older reader
ignores. A message that holds a stored record (the seal in `Apply`) or samples (a feed) says its own version.

A refused call has a `google.rpc.Status` in its trailing metadata: an `ErrorInfo` with a constant reason for programs, and a
`BadRequest` that names the wrong fields. Metadata have 8 KiB in all, beyond which gRPC drops the whole answer with its code; a
character that is not ASCII takes three bytes in the sentence, and the details take four for three. So both are cut here.
`controllers.api.edge.errors` maps errors to codes and reasons.

gRPC calls the handler of a unary request when the request has come, however long that takes; until then the call holds its
place unauthenticated. `early_handler` makes a handler that is called as soon as the call begins and reads the request itself.
So `NodesOnlyInterceptor`, of the train ranks, checks the caller before the request has come.
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
"""From the beginning of a call to its request, of whoever may call: the largest, over a slow line."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def handler_call(handler: Handler) -> Callable[..., Any]:
    """What it does with a request and a context: an awaitable answer, or an asynchronous iterator where it answers with a stream."""
    either: Any = handler
    found: Callable[..., Any] = {
        (False, False): either.unary_unary,
        (False, True): either.unary_stream,
        (True, False): either.stream_unary,
        (True, True): either.stream_stream,
    }[handler.request_streaming, handler.response_streaming]
    return found


def wrap_handler(handler: Handler, answer: Callable[..., Any], decode: Callable[[bytes], Any] | None = None) -> Handler:
    """One of the same kind that answers by `answer`, and reads requests by `decode` if that is given."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(answer, decode or handler.request_deserializer, handler.response_serializer)


def early_handler(handler: Handler, answer: Callable[..., Any]) -> Handler:
    """One that answers by `answer`, which is given an iterator of requests (for `read_request`) and a context as soon as a call has begun."""
    make: Callable[..., Handler] = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )
    return make(answer, handler.request_deserializer, handler.response_serializer)


async def read_request(handler: Handler, requests: AsyncIterator[Any], within_s: float = REQUEST_WITHIN_S) -> Any:
    """What `handler` takes: the one request, or, where it takes a stream, all of it. Raises LateRequest, UsageError."""
    if handler.request_streaming:
        return requests
    try:
        async with limit_time(within_s):
            return await anext(requests)
    except TimeoutError as error:
        raise LateRequest(
            f"the call has begun, and its request has not come within {within_s:g} s", fix="Call again"
        ) from error
    except StopAsyncIteration as error:
        raise UsageError(
            "the call brought no request, or one that is too large", fix="Use a client of this API"
        ) from error


class LateRequest(GcoreError):
    """A call without the request that it is about."""


DOMAIN = "gcore"
DETAILS_KEY = "grpc-status-details-bin"

MOST_SAID = 3500
"""Bytes of a refusal's sentence, as it goes over the wire."""

MOST_DETAILS = 2700
"""Bytes of the details."""

MOST_AGAIN = 500
"""Of these, of the sentence, which is in there once more."""

MOST_VIOLATIONS = 16

MOST_OF_A_FIELD, MOST_OF_A_VIOLATION = 80, 300
"""Bytes of what is wrong with a field. The sentence has the rest."""

UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request, or of the spec in it (`spec.flow.steps`), and what is wrong with it."""

    field: str
    what: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason of a refused call."""

    code: grpc.StatusCode
    sentence: str
    reason: str = UNKNOWN
    violations: tuple[Violation, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Of the ErrorInfo: what a program may want to know, such as the job's uid."""


def cut_bytes(text: str, most: int) -> str:
    """The text, of `most` bytes of UTF-8 at most."""
    data = text.encode(errors="replace")
    return text if len(data) <= most else data[: most - 4].decode(errors="ignore") + " ..."


def clip_details(text: str) -> str:
    """A sentence that may be sent as the details of a status: not too long, as the wire has it."""
    total = 0
    for place, character in enumerate(text):
        data = character.encode(errors="replace")
        total += 1 if 0x20 <= data[0] < 0x7F and data != b"%" else 3 * len(data)
        if total > MOST_SAID - 4:
            return text[:place] + " ..." if len(text) > place + 4 else text
    return text


def refusal_metadata(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """The metadata that say it."""
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
    """What a refused call was told. One that was refused by another program, or on the way, has no reason of gcore's."""
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
"""For programs: why such a call is refused."""


def version_metadata(versions: Collection[int] | None = None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call whose caller speaks `versions` (None: those of this process)."""
    return ((VERSION_KEY, ",".join(str(version) for version in sorted(versions or schema.READABLE))),)


def version_refusal(said: str | None) -> str | None:
    """Why a call whose metadata say this is not served, or None."""
    spoken = set((str(schema.FIRST_VERSION) if said is None else said).split(","))
    if spoken & {str(readable) for readable in schema.READABLE}:
        return None
    older = all(one.isascii() and one.isdigit() and len(one) < 9 and int(one) < schema.SCHEMA_VERSION for one in spoken)
    upgrade = "the caller" if older else "the controllers and workers first, or use the gcore that fits them"
    readable = " and ".join(map(str, sorted(schema.READABLE)))
    return f"the call is of schema version {str(said)[:20]!r}, and this process serves {readable}; upgrade {upgrade}"


class VersionedStub:
    """A stub whose every call carries the versions that this process speaks, and `more` besides."""

    def __init__(
        self, stub: Any, versions: Collection[int] | None = None, *, more: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self._stub = stub
        self._metadata = version_metadata(versions) + more

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
        said = next((str(v) for k, v in handler_call_details.invocation_metadata or () if k == VERSION_KEY), None)
        why = version_refusal(said)
        return handler if why is None else _refusing(handler, why)


def _refusing(handler: Handler, why: str) -> Handler:
    """A handler of the same kind that only refuses."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        code = grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, why, refusal_metadata(Refusal(code, why, UNSERVED)))

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await refuse(request, context)
        yield  # whoever stands before this goes through its answers

    return wrap_handler(handler, refuse_stream if handler.response_streaming else refuse)


def server_credentials(watched: ReloadingFiles, *, mutual: bool) -> grpc.ServerCredentials:
    """`mutual`: whether clients must show a certificate, too."""
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
        raise UsageError("a server has a certificate and its key", where="tls", fix="Name both: cert and key")
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca if mutual else None)


class NodesOnlyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses, with PERMISSION_DENIED, whoever is no node of the cluster."""

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
    """The request of a node."""
    names = (value.decode(errors="replace") for value in context.auth_context().get("peer_uri", ()))
    whose = parse_cert_name([name for name in names if name.startswith(f"{SCHEME}://")])
    if whose is None or whose.kind != "node":
        await _refuse(
            context, grpc.StatusCode.PERMISSION_DENIED, "train ranks serve nodes of the cluster, and nobody else"
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
