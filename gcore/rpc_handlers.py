"""Handlers of gRPC calls, of all four kinds: what one does, and one of the same kind that does something else. For interceptors.

gRPC calls the handler of a single request when the request has come, however long that takes: until then a call holds its place, and
nobody has asked whose it is. `early` makes a handler that is called as soon as the call has begun, and reads the request itself; on the
wire it is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc

from gcore.errors import GcoreError, UsageError

REQUEST_WITHIN_S = 30.0
"""From the beginning of a call to its request, of whoever may call: the largest, over a slow line."""
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def answer_of(handler: Handler) -> Callable[..., Any]:
    """What it does with a request and a context: an awaitable answer, or an asynchronous iterator where it answers with a stream."""
    either: Any = handler
    found: Callable[..., Any] = {
        (False, False): either.unary_unary,
        (False, True): either.unary_stream,
        (True, False): either.stream_unary,
        (True, True): either.stream_stream,
    }[handler.request_streaming, handler.response_streaming]
    return found


def like(handler: Handler, answer: Callable[..., Any], decode: Callable[[bytes], Any] | None = None) -> Handler:
    """One of the same kind that answers by `answer`, and reads requests by `decode` if that is given."""
    make: Callable[..., Handler] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(answer, decode or handler.request_deserializer, handler.response_serializer)


def early(handler: Handler, answer: Callable[..., Any]) -> Handler:
    """One that answers by `answer`, which is given an iterator of requests (`request_of`) and a context as soon as a call has begun."""
    make: Callable[..., Handler] = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )
    return make(answer, handler.request_deserializer, handler.response_serializer)


async def request_of(handler: Handler, requests: AsyncIterator[Any], within_s: float = REQUEST_WITHIN_S) -> Any:
    """What `handler` takes: the one request, or, where it takes a stream, all of it. Raises LateRequest, UsageError."""
    if handler.request_streaming:
        return requests
    try:
        async with asyncio.timeout(within_s):
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
