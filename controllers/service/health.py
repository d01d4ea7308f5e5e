"""The daemon's health, for whoever asks (`grpc.health.v1`): whether it can work.

Nobody who asks is known, so nothing here waits for anybody: a watcher that takes nothing holds up its own stream alone. (The one that comes with
gRPC writes to its watchers under a lock, and who is to change what it says waits for the slowest.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

Status: Any = pb.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Of the whole daemon, which is called by no name; no part of it has a health of its own."""

    WHOLE: ClassVar[str] = ""

    def __init__(self) -> None:
        self._serving = False
        self._changed = asyncio.Event()

    def set(self, *, serving: bool) -> None:
        """What is answered from now on."""
        if serving != self._serving:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """How it is now."""
        if request.service != self.WHOLE:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the daemon's health has no name: leave service empty")
        return self._answer()

    async def Watch(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """How it is now, and then each time that it is another; of what comes while nobody reads, the last."""
        if request.service != self.WHOLE:
            yield Status(status=Status.SERVICE_UNKNOWN)
            await asyncio.Event().wait()
        while True:
            changed, told = self._changed, self._serving
            yield self._answer()
            while told == self._serving:
                await changed.wait()
                changed = self._changed

    def _answer(self) -> Any:
        return Status(status=Status.SERVING if self._serving else Status.NOT_SERVING)
