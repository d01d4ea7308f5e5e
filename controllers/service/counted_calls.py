"""Counts what is asked of this process over gRPC: by method and status, how long unary calls took, which streams are open.

Methods that nobody serves are counted together: their names are the caller's. Refuses nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from controllers.service.statuses import ended_with
from gcore.clock import Clock
from gcore.metrics import Metrics
from gcore.rpc_handlers import Handler, answer_of, like

UNKNOWN = "unknown"


class CountedCalls(grpc.aio.ServerInterceptor):
    """Stands first, so that what others refuse is counted too."""

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
            return like(handler, self._stream(method, handler))
        return like(handler, self._unary(method, handler))

    def _unary(self, method: str, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        behind = answer_of(handler)

        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            begun, done = self._clock.monotonic(), False
            try:
                answer = await behind(request, context)
                done = True
                return answer
            finally:
                self._metrics.calls.labels(method, ended_with(context, done=done)).inc()
                self._metrics.call_seconds.labels(method).observe(max(self._clock.monotonic() - begun, 0.0))

        return counted

    def _stream(self, method: str, handler: Handler) -> Callable[[Any, Any], AsyncGenerator[Any, None]]:
        behind = answer_of(handler)

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
                self._metrics.calls.labels(method, ended_with(context, done=done, left=left)).inc()

        return counted
