"""The client of the job API: any controller answers for the whole cluster, so any one that answers will do.

A call goes to the controller that answered last; when that one does not answer, to the others in turn. That is safe for
every call of the API: reads change nothing, cancelling twice is cancelling once, and a job is created under a request
id, which finds the job that the first, unanswered call made. Following a job goes on from another controller after the
last event seen; sequence numbers make sure that none is handed out twice, and the server sends all that are greater, so
none is lost.

Knows no files and no terminal. Errors are gcore's: `Unreachable` when nobody answered, `StoreUnavailable` when a controller
answered that its store is away, `UsageError` when the answer was that the request is wrong, `GcoreError` for anything else a
controller complains of.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.clock import Clock
from gcore.errors import GcoreError, StoreUnavailable, Unreachable, UsageError
from gcore.events import JobEvent
from gcore.rpc_schema import VersionedStub

T = TypeVar("T")

ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})
MAX_ANSWER_BYTES = 64 << 20

_NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_WRONG_REQUEST = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
    }
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long what is waited for, in seconds."""

    call_s: float = 10.0
    """For the answer to one call."""
    create_s: float = 1800.0
    """For the creation of a job, before which its data are read and checked, and copied if they are no JSONL."""
    audit_s: float = 600.0
    """For an audit, which reads the whole log."""
    samples_s: float = 120.0
    """For samples, which may be many."""
    quiet_s: float = 5.0
    """Following, without an event: then the controller is asked whether it is still there."""
    probe_s: float = 3.0
    """For the answer to that."""
    retry_s: float = 0.3
    """Between two rounds over all controllers."""
    lost_s: float = 60.0
    """Without any controller that answers, before following gives up."""


def job_state_name(state: int) -> str:
    """`RUNNING` for JOB_STATE_RUNNING; `UNKNOWN` for a state that this version does not know, or that nobody can read."""
    if state == pb.JOB_STATE_UNSPECIFIED:
        return "UNKNOWN"
    try:
        return pb.JobState.Name(state).removeprefix("JOB_STATE_")
    except ValueError:
        return "UNKNOWN"


class JobsClient:
    """The Jobs service behind one or several addresses (host:port). Use it as an async context manager."""

    def __init__(self, addresses: Sequence[str], *, clock: Clock, patience: Patience | None = None) -> None:
        if not addresses:
            raise ValueError("a client needs at least one address")
        self.addresses = tuple(addresses)
        self._clock = clock
        self._patience = patience or Patience()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._heard = clock.monotonic()
        """When a controller last answered anything."""

    async def __aenter__(self) -> JobsClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def create_job(self, spec_json: str, *, request_id: str, mode: pb.StartMode) -> pb.Job:
        """Create the job, or find it: the same `request_id` always means the same job."""
        request = pb.CreateJobRequest(request_id=request_id, spec_json=spec_json, mode=mode)
        return await self._anywhere(
            "create the job", lambda stub, t: stub.CreateJob(request, timeout=t), timeout_s=self._patience.create_s
        )

    async def get_job(self, job: str) -> pb.Job:
        """By name (the newest of that name) or uid."""
        return await self._anywhere("look the job up", lambda s, t: s.GetJob(pb.GetJobRequest(job=job), timeout=t))

    async def list_jobs(self) -> list[pb.Job]:
        """All jobs of the cluster."""
        reply = await self._anywhere("list the jobs", lambda s, t: s.ListJobs(pb.ListJobsRequest(), timeout=t))
        return list(reply.jobs)

    async def cancel_job(self, job: str) -> pb.Job:
        """Ask for the end of the job. One that has ended stays as it is."""
        return await self._anywhere("cancel the job", lambda s, t: s.CancelJob(pb.CancelJobRequest(job=job), timeout=t))

    async def audit_job(self, job: str) -> pb.AuditReport:
        """Have the job's accounts recomputed."""
        request = pb.AuditJobRequest(job=job)
        return await self._anywhere(
            "audit the job", lambda s, t: s.AuditJob(request, timeout=t), timeout_s=self._patience.audit_s
        )

    async def get_samples(
        self,
        job: str,
        *,
        step: int | None = None,
        source: str = "",
        order: pb.SampleOrder = pb.SAMPLE_ORDER_UNSPECIFIED,
        limit: int = 0,
    ) -> list[pb.SampleGroup]:
        """What `step` (default: the newest) was trained on, as far as it is kept: at most `limit` groups, 0 for all.

        Raises UsageError if there is no such job, or there are no such samples; it says which there are.
        """
        request = pb.GetSamplesRequest(job=job, step=step, source=source, order=order, limit=limit)

        async def read(stub: Any, timeout_s: float) -> list[pb.SampleGroup]:
            return [group async for group in stub.GetSamples(request, timeout=timeout_s)]

        return await self._anywhere("read the samples", read, timeout_s=self._patience.samples_s)

    async def get_books(self, job: str, step: int | None = None) -> list[pb.BookOfNode]:
        """What the job's slots did in `step`, node by node, with what they did when; None: in the newest steps, without that.

        Raises UsageError if there is no such job, or nobody has booked the step.
        """
        request = pb.GetBooksRequest(job=job, step=step)

        async def read(stub: Any, timeout_s: float) -> list[pb.BookOfNode]:
            return [book async for book in stub.GetBooks(request, timeout=timeout_s)]

        return await self._anywhere("read the books", read, timeout_s=self._patience.samples_s)

    async def list_checkpoints(self, job: str) -> pb.ListCheckpointsReply:
        """The job's registered checkpoints, the newest first."""
        request = pb.ListCheckpointsRequest(job=job)
        return await self._anywhere("list the checkpoints", lambda s, t: s.ListCheckpoints(request, timeout=t))

    async def get_placement(self, job: str) -> pb.PlacementReply:
        """How a job's slots are shared out, and its newest moves."""
        request = pb.GetPlacementRequest(job=job)
        return await self._anywhere("look the placement up", lambda s, t: s.GetPlacement(request, timeout=t))

    async def pin_placement(self, request: pb.PinPlacementRequest) -> pb.PlacementReply:
        """Fix something of a job's placement, or let it go; the same twice is the same once."""
        return await self._anywhere("fix the placement", lambda s, t: s.PinPlacement(request, timeout=t))

    async def list_nodes(self) -> pb.ListNodesReply:
        """The daemons and workers of the cluster."""
        return await self._anywhere("list the nodes", lambda s, t: s.ListNodes(pb.ListNodesRequest(), timeout=t))

    async def is_serving(self, address: str) -> bool:
        """Whether the daemon at `address` says that it serves."""
        return await self._health(address) == int(health_pb2.HealthCheckResponse.SERVING)

    async def follow(self, job: str, *, after: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Every event of `job` with a sequence number above `after`, in order, each once, until the job has ended.

        Raises Unreachable when no controller answered for `Patience.lost_s`, UsageError when there is no such job.
        """
        self._heard = self._clock.monotonic()
        while True:
            address = self.addresses[self._current]
            call = self._stub(address).WatchJob(pb.WatchJobRequest(job=job, after=after))
            brought = False
            try:
                async with aclosing(self._until_silent(call, address)) as messages:
                    async for message in messages:
                        if message.sequence > after:
                            after, brought = message.sequence, True
                            yield JobEvent.from_message(message)
                # A controller that shuts down ends its streams in good order too. So only a watch that brings nothing,
                # of a job that has ended, is the end.
                if not brought and (await self.get_job(job)).state in ENDED:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() in _WRONG_REQUEST:
                    raise _explain(error, address, "follow the job") from error
                self._turn_from(address)
                # One that cannot follow, because the store is away, is there all the same: it is not what is given up on.
                await self._health(address)
            except (_Silent, Unreachable):
                self._turn_from(address)
            finally:
                call.cancel()
            if self._clock.monotonic() - self._heard > self._patience.lost_s:
                raise self._nobody(f"no controller has answered for {self._patience.lost_s:.0f} s")
            if not brought:
                await self._clock.sleep(self._patience.retry_s)

    async def _until_silent(self, call: Any, address: str) -> AsyncGenerator[pb.JobEvent, None]:
        """The stream's messages; raises _Silent when its controller has stopped answering.

        A machine that vanished, or a process that was stopped, breaks no connection: so a quiet stream is probed.
        """
        messages = aiter(call)
        while True:
            reading: asyncio.Future[Any] = asyncio.ensure_future(anext(messages, None))
            try:
                while not reading.done():
                    quiet = asyncio.ensure_future(self._clock.sleep(self._patience.quiet_s))
                    try:
                        await asyncio.wait({reading, quiet}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        quiet.cancel()
                    if not reading.done() and await self._health(address) is None:
                        raise _Silent
                message = reading.result()
            finally:
                reading.cancel()
            self._heard = self._clock.monotonic()
            if message is None:
                return
            yield message

    async def _anywhere(self, what: str, call: _Call[T], *, timeout_s: float | None = None) -> T:
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
            except _Silent:
                reasons.append("no answer in time")
                self._turn_from(address)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise _explain(error, address, what) from error
                reasons.append(_why(error))
                if await self._said_so(error, address):
                    told = f"cannot {what}: {_why(error)}"
                self._turn_from(address)
            else:
                self._heard = self._clock.monotonic()
                return answer
        if told:  # by a sentence that says itself what to do; no other controller would know better
            raise StoreUnavailable(told, where=", ".join(self.addresses))
        raise self._nobody(f"cannot {what}: {reasons[-1]}")

    async def _said_so(self, error: grpc.aio.AioRpcError, address: str) -> bool:
        """Whether the controller itself answered that it cannot, because its store is away, and not the way there."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or _why(error) == _NOTHING_THERE:
            return False
        return await self._health(address) is not None

    async def _while_there(self, call: _Call[T], address: str, timeout_s: float) -> T:
        """The answer to a call that may take long, as long as the controller answers anything. Raises _Silent."""
        asked = asyncio.ensure_future(call(self._stub(address), timeout_s))
        try:
            while not (await asyncio.wait({asked}, timeout=self._patience.call_s))[0]:
                if await self._health(address) is None:
                    raise _Silent
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
            return None if error.code() in _NO_ANSWER else health_pb2.HealthCheckResponse.UNKNOWN
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
        return VersionedStub(jobs_pb2_grpc.JobsStub(self._channel(address)))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return self._channels[address]


class _Silent(Exception):
    """A controller that was talked to says nothing more."""


_Call = Callable[[Any, float], Awaitable[T]]

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # A controller that comes back is to be found soon, and gRPC's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Controllers stand in the same network; a proxy for the web has no business in between.
    ("grpc.enable_http_proxy", 0),
)


_NOTHING_THERE = "nothing listens there"


def _why(error: grpc.aio.AioRpcError) -> str:
    """One line, without gRPC's inner life."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    details = " ".join((error.details() or error.code().name).split())
    if "failed to connect" in details or "Connection refused" in details:
        return _NOTHING_THERE
    return details.rstrip(".")


def _explain(error: grpc.aio.AioRpcError, address: str, what: str) -> GcoreError:
    """What the controller's refusal means here. Its details are a sentence for people already."""
    if error.code() in _WRONG_REQUEST:
        return UsageError(_why(error))
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UsageError(
            f"what answers does not know how to {what}", where=address, fix="Name the address of a gcore controller"
        )
    return GcoreError(
        f"the controller could not {what}: {_why(error)}", where=address, fix="Its log says more (HOME/logs)"
    )
