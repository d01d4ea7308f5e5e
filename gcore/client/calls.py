"""Calls to a cluster through any controller: first the one that answered last, then the others in turn.

All API calls can be repeated safely: reads change nothing, changes set an absolute state, and job creation carries a request ID, so that a
repeated request returns the job that a lost response created. A rejected call raises an error of `gcore.errors`, with the API's structured
reason in `GcoreError.refusal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gcore.api.rpc import VersionedStub, parse_refusal
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.errors import GcoreError, NotAllowed, StoreUnavailable, Unreachable, UsageError
from gcore.system.clock import Clock

NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Status codes after which the client tries another controller."""

WRONG_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)

NOT_ALLOWED = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

FINAL = WRONG_REQUEST | NOT_ALLOWED
"""Status codes of a rejection that every controller would repeat, so the client does not try another one."""

NOTHING_THERE = "nothing listens there"

HANDSHAKES = {
    "certificate has expired": "its certificate has expired (`gcore certs renew`)",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the trusted authority (`ca` of the context, GCORE_CA)",
    "Hostname Verification": "its certificate is not valid for this host name (`gcore certs issue --host`)",
    "WRONG_VERSION_NUMBER": "the server there does not use TLS",
    "Socket closed": "the server there closes every connection: it needs TLS, or a valid certificate from its authority",
}
"""Explanations of connection failures, by a part of gRPC's error text."""


def status_text(error: grpc.aio.AioRpcError) -> str:
    """Return the reason of a failed call as one line for users, without gRPC internals."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    details = " ".join((error.details() or error.code().name).split())
    if "failed to connect" in details or "Connection refused" in details:
        return next((said for sign, said in HANDSHAKES.items() if sign in details), NOTHING_THERE)
    return details.rstrip(".")


def explain_refusal(error: grpc.aio.AioRpcError, address: str, what: str) -> GcoreError:
    """Convert a controller's rejection into an error of `gcore.errors`, with the API's structured reason.

    `what`: verb phrase of the call, such as "list the jobs", for the message.
    """
    found = _kind(error, address, what)
    found.refusal = parse_refusal(error)
    return found


def _kind(error: grpc.aio.AioRpcError, address: str, what: str) -> GcoreError:
    if error.code() in WRONG_REQUEST:
        return UsageError(status_text(error))
    if error.code() in NOT_ALLOWED:
        return NotAllowed(status_text(error))
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(
            f"the server there does not know how to {what}", where=address, fix="Name the address of a gcore controller"
        )
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return GcoreError(f"cannot {what}: {status_text(error)}", where=address)
    return GcoreError(
        f"the controller could not {what}: {status_text(error)}",
        where=address,
        fix="See its log for details (HOME/logs)",
    )


ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})
MAX_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Timeouts of the client, in seconds."""

    call_s: float = 10.0
    """Timeout of one call."""
    create_s: float = 1800.0
    """Timeout of job creation, which reads, checks and, unless it is JSONL, copies the data first."""
    audit_s: float = 600.0
    """Timeout of an audit, which reads the whole log."""
    samples_s: float = 120.0
    """Timeout of reading samples."""
    quiet_s: float = 5.0
    """Time without a message on a stream before the client probes the controller."""
    probe_s: float = 3.0
    """Timeout of that probe."""
    retry_s: float = 0.3
    """Pause between two rounds over all controllers."""
    lost_s: float = 60.0
    """Time without any answer from a controller before a stream gives up."""


def job_state_name(state: int) -> str:
    """Return `RUNNING` for JOB_STATE_RUNNING; `UNKNOWN` for an unspecified state or one that this version does not know."""
    if state == pb.JOB_STATE_UNSPECIFIED:
        return "UNKNOWN"
    try:
        return pb.JobState.Name(state).removeprefix("JOB_STATE_")
    except ValueError:
        return "UNKNOWN"


T = TypeVar("T")

ApiCall = Callable[[Any, float], Awaitable[T]]
"""One API call: a coroutine function of a gRPC stub and a timeout in seconds."""

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Reconnect soon to a restarted controller; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ControllerSilent(Exception):
    """Raised inside the client when a controller stops answering; the client then tries another one."""


class ApiCalls:
    """Makes API calls to the controllers at one or more addresses (host:port), one after the other until one answers.

    Base class of the clients. Use it as an async context manager. `owner_key`: shows that the caller owns a local
    cluster; else empty.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        clock: Clock,
        patience: WaitPolicy | None = None,
        connector: Connector = PLAIN,
        owner_key: str = "",
    ) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address")
        self.addresses = tuple(addresses)
        self._clock = clock
        self._patience = patience or WaitPolicy()
        self._connector = connector
        self._owner_key = owner_key
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._answered_at = clock.monotonic()
        """When a controller last answered, in monotonic seconds."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def is_serving(self, address: str) -> bool:
        """Return whether the daemon at `address` reports that it is serving."""
        return await self._health(address) == int(health_pb2.HealthCheckResponse.SERVING)

    async def _call_any(self, what: str, call: ApiCall[T], *, timeout_s: float | None = None) -> T:
        """Call one controller after another until one answers, each at most once.

        `what`: verb phrase of the call for error messages. `timeout_s`: for a long call, which is abandoned earlier
        only if the controller fails health checks; None: `WaitPolicy.call_s`. If no controller answers, raises
        StoreUnavailable if one of them reported that it cannot reach the store, otherwise Unreachable.
        """
        reasons, store_error = [], ""
        for _ in self.addresses:
            address = self.addresses[self._current]
            try:
                if timeout_s is None:
                    answer = await call(self._stub(address), self._patience.call_s)
                else:
                    answer = await self._call_watched(call, address, timeout_s)
            except ControllerSilent:
                reasons.append("no answer in time")
                self._switch_from(address)
            except grpc.aio.AioRpcError as error:
                if error.code() not in NO_ANSWER:
                    raise explain_refusal(error, address, what) from error
                reasons.append(status_text(error))
                if await self._is_from_controller(error, address):
                    store_error = f"cannot {what}: {status_text(error)}"
                self._switch_from(address)
            else:
                self._answered_at = self._clock.monotonic()
                return answer
        if store_error:  # the sentence already says what to do, and other controllers would report the same
            raise StoreUnavailable(store_error, where=", ".join(self.addresses))
        raise self._unreachable(f"cannot {what}: {reasons[-1]}")

    async def _is_from_controller(self, error: grpc.aio.AioRpcError, address: str) -> bool:
        """Return whether UNAVAILABLE came from the controller itself, which cannot reach its store, and not from the
        network."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or status_text(error) == NOTHING_THERE:
            return False
        return await self._health(address) is not None

    async def _call_watched(self, call: ApiCall[T], address: str, timeout_s: float) -> T:
        """Make a long call and return its result. Raises ControllerSilent if the controller stops answering health
        checks meanwhile."""
        asked = asyncio.ensure_future(call(self._stub(address), timeout_s))
        try:
            while not (await asyncio.wait({asked}, timeout=self._patience.call_s))[0]:
                if await self._health(address) is None:
                    raise ControllerSilent
            return await asked
        finally:
            asked.cancel()

    async def _health(self, address: str) -> int | None:
        """Return the daemon's health status; None if it does not answer."""
        stub = health_pb2_grpc.HealthStub(self._channel(address))
        try:
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._patience.probe_s)
        except grpc.aio.AioRpcError as error:
            # A server that rejects the health check is reachable too.
            return None if error.code() in NO_ANSWER else health_pb2.HealthCheckResponse.UNKNOWN
        self._answered_at = self._clock.monotonic()
        return int(reply.status)

    def _switch_from(self, address: str) -> None:
        """Use the next controller from now on, unless another call has already switched."""
        if self.addresses[self._current] == address:
            self._current = (self._current + 1) % len(self.addresses)

    def _unreachable(self, what: str) -> Unreachable:
        """Create the error for calls that no controller answered."""
        return Unreachable(
            what,
            where=", ".join(self.addresses),
            fix="Start a cluster with `gcore up`, or name a controller with --address host:port",
        )

    def _stub(self, address: str) -> Any:
        # The generated asynchronous stub exists for type checking only; the synchronous class serves both at run time.
        return VersionedStub(jobs_pb2_grpc.JobsStub(self._channel(address)), more=self._connector.metadata(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._connector.channel(address, CHANNEL_OPTIONS)
        return self._channels[address]
