"""Bytes that are no message of the kind that is expected: refused as a wrong request. gRPC itself takes them for a defect of the
server, and fills its log with tracebacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from controllers.service.statuses import Context, refuse
from gcore.rpc_handlers import Handler, answer_of, like
from gcore.rpc_status import Refusal

SENTENCE = "the request is not a message of the kind that is expected; use a client of this API's version"


class Garbled:
    """In place of a message that could not be read."""


class Decoding(grpc.aio.ServerInterceptor):
    """Stands last, next to the services. Requests that are streams are left to gRPC: none of people's has any."""

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
        return like(handler, checked(answer_of(handler)), decode)


def _decoder(inner: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return inner(data)
        except (DecodeError, ValueError, RecursionError):
            return Garbled()

    return decode


def _unary(inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def checked(request: Any, context: Context) -> Any:
        await _check(request, context)
        return await inner(request, context)

    return checked


def _stream(inner: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Callable[[Any, Any], AsyncGenerator[Any, None]]:
    async def checked(request: Any, context: Context) -> AsyncGenerator[Any, None]:
        await _check(request, context)
        async with aclosing(inner(request, context)) as answers:
            async for one in answers:
                yield one

    return checked


async def _check(request: Any, context: Context) -> None:
    if isinstance(request, Garbled):
        await refuse(context, Refusal(grpc.StatusCode.INVALID_ARGUMENT, SENTENCE, "BAD_REQUEST"))
