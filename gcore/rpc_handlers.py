"""Handlers of gRPC calls, of all four kinds: what one does, and one of the same kind that does something else. For interceptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc

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
