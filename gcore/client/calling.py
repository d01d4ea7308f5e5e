"""Calls to a cluster of which any controller answers: to the one that answered last; when that one does not answer, to the others in
turn.

That is safe for every call of the API: reads change nothing, what changes a job says how it is to be, so that twice is once, and a
job is created under a request id, which finds the job that the first, unanswered call made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gcore.api.v1 import jobs_pb2_grpc
from gcore.client.patience import MAX_ANSWER_BYTES, Patience
from gcore.client.refused import NO_ANSWER, NOTHING_THERE, explain, why
from gcore.clock import Clock
from gcore.errors import StoreUnavailable, Unreachable
from gcore.rpc_schema import VersionedStub
from gcore.tls.connecting import PLAIN, Connector

T = TypeVar("T")
Call = Callable[[Any, float], Awaitable[T]]
"""Makes a call with a stub, for so many seconds."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # A controller that comes back is to be found soon, and gRPC's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Controllers stand in the same network; a proxy for the web has no business in between.
    ("grpc.enable_http_proxy", 0),
)


class Silent(Exception):
    """A controller that was talked to says nothing more."""


class Calls:
    """Connections to one or several addresses (host:port). Use it as an async context manager."""

    def __init__(
        self, addresses: Sequence[str], *, clock: Clock, patience: Patience | None = None, connector: Connector = PLAIN
    ) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address")
        self.addresses = tuple(addresses)
        self._clock = clock
        self._patience = patience or Patience()
        self._connector = connector
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._heard = clock.monotonic()
        """When a controller last answered anything."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def is_serving(self, address: str) -> bool:
        """Whether the daemon at `address` says that it serves."""
        return await self._health(address) == int(health_pb2.HealthCheckResponse.SERVING)

    async def _anywhere(self, what: str, call: Call[T], *, timeout_s: float | None = None) -> T:
        """Make the call at one controller after the other, until one answers.

        After one round raises StoreUnavailable if one of them is there and says why it cannot, else Unreachable.
        """
        reasons, told = [], ""
        for _ in self.addresses:
            address = self.addresses[self._current]
            try:
                if timeout_s is None:
                    answer = await call(self._stub(address), self._patience.call_s)
                else:
                    answer = await self._while_there(call, address, timeout_s)
            except Silent:
                reasons.append("no answer in time")
                self._turn_from(address)
            except grpc.aio.AioRpcError as error:
                if error.code() not in NO_ANSWER:
                    raise explain(error, address, what) from error
                reasons.append(why(error))
                if await self._said_so(error, address):
                    told = f"cannot {what}: {why(error)}"
                self._turn_from(address)
            else:
                self._heard = self._clock.monotonic()
                return answer
        if told:  # by a sentence that says itself what to do; no other controller would know better
            raise StoreUnavailable(told, where=", ".join(self.addresses))
        raise self._nobody(f"cannot {what}: {reasons[-1]}")

    async def _said_so(self, error: grpc.aio.AioRpcError, address: str) -> bool:
        """Whether the controller itself answered that it cannot, because its store is away, and not the way there."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or why(error) == NOTHING_THERE:
            return False
        return await self._health(address) is not None

    async def _while_there(self, call: Call[T], address: str, timeout_s: float) -> T:
        """The answer to a call that may take long, as long as the controller answers anything. Raises Silent."""
        asked = asyncio.ensure_future(call(self._stub(address), timeout_s))
        try:
            while not (await asyncio.wait({asked}, timeout=self._patience.call_s))[0]:
                if await self._health(address) is None:
                    raise Silent
            return await asked
        finally:
            asked.cancel()

    async def _health(self, address: str) -> int | None:
        """What the daemon says of itself; None if it says nothing."""
        stub = health_pb2_grpc.HealthStub(self._channel(address))
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._patience.probe_s)
        except grpc.aio.AioRpcError as error:
            # Whoever refuses the question is there too.
            return None if error.code() in NO_ANSWER else health_pb2.HealthCheckResponse.UNKNOWN
        self._heard = self._clock.monotonic()
        return int(reply.status)

    def _turn_from(self, address: str) -> None:
        """Ask the next one from now on, unless somebody else has turned already."""
        if self.addresses[self._current] == address:
            self._current = (self._current + 1) % len(self.addresses)

    def _nobody(self, what: str) -> Unreachable:
        return Unreachable(
            what,
            where=", ".join(self.addresses),
            fix="Start a cluster with `gcore up`, or name a controller with --address host:port",
        )

    def _stub(self, address: str) -> Any:
        # The generated asynchronous stub is a type only; at run time the one class serves both.
        return VersionedStub(jobs_pb2_grpc.JobsStub(self._channel(address)), more=self._connector.metadata(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connector.channel(address, CHANNEL_OPTIONS)
        return self._channels[address]
