"""The gRPC server of a daemon: limits on calls, streams and messages; metrics; health; undecodable requests.

A slow client must not make a stream expensive, so the number of streams is limited. Calls above a limit end with RESOURCE_EXHAUSTED. If
callers are authenticated, one caller may use at most half of the permits. For streams, daemons count as one caller; for calls, daemons
have permits of their own. Unauthenticated clients may only call the health service; they have a few separate permits, counted by
machine. A call holds its permit until it has ended, not until the response is sent. The gRPC server accepts more calls than the limiter,
which leaves room for health checks, nodes and refusals. Keepalive pings detect dead connections.

The health service never waits for a client: a watcher that does not read blocks only its own stream. (gRPC's own health servicer writes to
watchers under a lock.) Requests that cannot be decoded end with INVALID_ARGUMENT; gRPC would log a traceback for each. Calls of unknown
methods are counted under one label, because clients choose the names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from controllers.api.edge.access import Caller, Role, current_caller
from controllers.api.edge.errors import CallContext, Exhausted, TooManyCalls, abort_call, final_status
from gcore.api.rpc import Handler, Refusal, handler_call, wrap_handler
from gcore.api.v1 import jobs_pb2
from gcore.config.node import ApiConfig
from gcore.observability.metrics import Metrics
from gcore.system.clock import Clock

STRANGERS = 128
"""Maximum number of concurrent unauthenticated calls."""

WATCHERS = 16
"""Maximum number of unauthenticated health watchers; their streams have no end."""

UNKNOWN = "unknown"

SENTENCE = "the request cannot be decoded. Use a client of this API's version"

Status: Any = pb.HealthCheckResponse

MOST_REQUEST = 4 << 20
"""Maximum size of a request in bytes. The largest is a spec with its templates."""

MOST_ANSWER = 64 << 20
"""Maximum size of a response in bytes. Equals the client's limit (`gcore.client.calls.MAX_ANSWER_BYTES`)."""

MOST_METADATA = 16 << 10

OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MOST_REQUEST),
    ("grpc.max_send_message_length", MOST_ANSWER),
    ("grpc.max_metadata_size", MOST_METADATA),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Clients may send pings, but only at this rate.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class Permits:
    """A limit of `most` concurrent calls or streams (`what`: the noun for errors). A named caller gets at most half of
    the permits.

    `kind` and `fix`: the error that is raised if the limit is reached, and its advice."""

    def __init__(self, most: int, what: str, kind: type[Exhausted], fix: str) -> None:
        self._most = most
        self._most_of_one = -(-most // 2)
        self._what = what
        self._kind = kind
        self._fix = fix
        self._by_name: Counter[str] = Counter()
        self.taken = 0

    def take(self, name: str) -> None:
        """Take one permit for the caller `name`. An empty name may take all permits. Raises Exhausted if none is
        left."""
        if self.taken >= self._most:
            raise self._kind(f"this controller already serves its maximum of {self.taken} {self._what}", fix=self._fix)
        if name and self._by_name[name] >= self._most_of_one:
            raise self._kind(
                f"{name} already has {self._by_name[name]} {self._what} here, which is half of this controller's limit",
                fix="End some of them, or use another controller",
            )
        self.taken += 1
        self._by_name[name] += 1

    def give(self, name: str) -> None:
        """Return one permit that `name` has taken."""
        self.taken -= 1
        self._by_name[name] -= 1
        if not self._by_name[name]:
            del self._by_name[name]


class StreamLimiter:
    """Limits the number of concurrent streams to `most`."""

    def __init__(self, most: int) -> None:
        fix = "Use another controller, or raise api.streams in the node's configuration"
        self._places = Permits(most, "streams", Exhausted, fix)

    @property
    def taken(self) -> int:
        """The number of open streams."""
        return self._places.taken

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Context manager that holds one permit for a stream of the current caller. Raises Exhausted if none is
        left."""
        name = _named(current_caller())
        self._places.take(name)
        try:
            yield
        finally:
            self._places.give(name)


class CallLimiter:
    """Limits the concurrent calls: `most` of users and as many of daemons. Unauthenticated calls have separate small
    limits. A call holds its permit until its gRPC context is done."""

    def __init__(self, most: int) -> None:
        fix = "Use another controller, or raise api.calls in the node's configuration"
        self._people = Permits(most, "calls", TooManyCalls, fix)
        self._nodes = Permits(most, "calls of nodes", TooManyCalls, fix)
        self._strangers = Permits(STRANGERS, "calls without a token", TooManyCalls, "Use another controller")
        self._watchers = Permits(WATCHERS, "health watchers", TooManyCalls, "Poll with Check instead")

    @property
    def taken(self) -> int:
        """The number of active calls."""
        return sum(one.taken for one in (self._people, self._nodes, self._strangers, self._watchers))

    def enter(self, one: Caller, context: Any) -> None:
        """Take a permit for the call of an authenticated caller. Raises TooManyCalls."""
        _enter(self._nodes if one.role is Role.NODE else self._people, _named(one), context)

    def enter_stranger(self, context: Any, *, watches: bool) -> None:
        """Take a permit for an unauthenticated call. Raises TooManyCalls."""
        machine = str(context.peer() or "").rpartition(":")[0]
        _enter(self._watchers if watches else self._strangers, machine, context)


def most_at_once(most: int) -> int:
    """How many concurrent calls the gRPC server accepts if a `CallLimiter` allows `most`. It is larger, so that calls
    above the limit reach the limiter, which refuses them with an error that says why."""
    return 2 * most + 2 * (STRANGERS + WATCHERS)


def _named(one: Caller) -> str:
    return "" if one.role is Role.NODE else one.name


def _enter(places: Permits, name: str, context: Any) -> None:
    places.take(name)
    context.add_done_callback(lambda _: places.give(name))


class CallCounter(grpc.aio.ServerInterceptor):
    """An interceptor that counts calls. It runs first, so that refused calls are counted too."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            self._metrics.calls.labels(UNKNOWN, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        method = handler_call_details.method.rpartition("/")[2]
        if handler.response_streaming:
            return wrap_handler(handler, self._stream(method, handler))
        return wrap_handler(handler, self._unary(method, handler))

    def _unary(self, method: str, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        behind = handler_call(handler)

        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            begun, done = self._clock.monotonic(), False
            try:
                answer = await behind(request, context)
                done = True
                return answer
            finally:
                self._metrics.calls.labels(method, final_status(context, done=done)).inc()
                self._metrics.call_seconds.labels(method).observe(max(self._clock.monotonic() - begun, 0.0))

        return counted

    def _stream(self, method: str, handler: Handler) -> Callable[[Any, Any], AsyncGenerator[Any, None]]:
        behind = handler_call(handler)

        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any, None]:
            done = left = False
            self._metrics.open_streams.labels(method).inc()
            try:
                async with aclosing(behind(request, context)) as answers:
                    async for one in answers:
                        yield one
                done = True
            except GeneratorExit:
                left = True
                raise
            finally:
                self._metrics.open_streams.labels(method).dec()
                self._metrics.calls.labels(method, final_status(context, done=done, left=left)).inc()

        return counted


class UndecodableMessage:
    """Stands in the place of a request that could not be decoded, until `DecodingInterceptor` refuses the call."""


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor that refuses requests that could not be decoded. It runs last, next to the services. Streaming requests are left to gRPC:
    no RPC for users has any."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode = _decoder(handler.request_deserializer)
        checked = _stream if handler.response_streaming else _unary
        return wrap_handler(handler, checked(handler_call(handler)), decode)


def _decoder(inner: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return inner(data)
        except (DecodeError, ValueError, RecursionError):
            return UndecodableMessage()

    return decode


def _unary(inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(request: Any, context: CallContext) -> Any:
        await _check(request, context)
        return await inner(request, context)

    return checked


def _stream(inner: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], AsyncGenerator[Any, None]]:
    async def checked(request: Any, context: CallContext) -> AsyncGenerator[Any, None]:
        await _check(request, context)
        async with aclosing(inner(request, context)) as answers:
            async for one in answers:
                yield one

    return checked


async def _check(request: Any, context: CallContext) -> None:
    if isinstance(request, UndecodableMessage):
        await abort_call(context, Refusal(grpc.StatusCode.INVALID_ARGUMENT, SENTENCE, "BAD_REQUEST"))


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The gRPC health service for the whole daemon, under the empty service name. Other services have no separate status."""

    WHOLE: ClassVar[str] = ""

    def __init__(self) -> None:
        self._serving = False
        self._changed = asyncio.Event()

    def set(self, *, serving: bool) -> None:
        """Set whether the daemon serves, and notify the watchers if that is a change."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """Return the current status."""
        if request.service != self.WHOLE:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, "only the whole daemon has a health status. Leave service empty"
            )
        return self._answer()

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Send the current status and every later change. A slow client gets only the newest status."""
        if request.service != self.WHOLE:
            yield Status(status=Status.SERVICE_UNKNOWN)
            await asyncio.Event().wait()
        while True:
            changed, before = self._changed, self._serving
            yield self._answer()
            while before == self._serving:
                await changed.wait()
                changed = self._changed

    def _answer(self) -> Any:
        return Status(status=Status.SERVING if self._serving else Status.NOT_SERVING)


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor], api: ApiConfig) -> grpc.aio.Server:
    """Create the gRPC server with the limits of `api` and the given interceptors; the caller adds services and
    ports."""
    most = most_at_once(api.calls)
    return grpc.aio.server(
        interceptors=[*interceptors, DecodingInterceptor()], options=OPTIONS, maximum_concurrent_rpcs=most
    )


def add_reflection(server: grpc.aio.Server, api: ApiConfig) -> None:
    """Enable gRPC reflection if the configuration requests it. It reveals only what docs/reference/api.md lists."""
    if not api.reflection:
        return
    from grpc_reflection.v1alpha import reflection

    name = jobs_pb2.DESCRIPTOR.services_by_name["Jobs"].full_name
    reflection.enable_server_reflection((name, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
