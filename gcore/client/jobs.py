"""Clients of the Jobs and Access services: one method per API call, with the API's protobuf messages.

Methods raise `Unreachable` if no controller answers, `StoreUnavailable` if a controller cannot reach its store, `UsageError` for a wrong
request, `NotAllowed` for a request without permission, and `GcoreError` otherwise.

When a controller dies, a stream continues at another one after the last item. Sequence numbers of events, log positions of steps and
positions of log lines make sure that no item is lost or returned twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.field_mask_pb2 import FieldMask

from gcore.api.rpc import VersionedStub
from gcore.api.v1 import access_pb2 as pb
from gcore.api.v1 import access_pb2_grpc
from gcore.api.v1 import jobs_pb2 as v1_pb
from gcore.client.calls import ENDED, FINAL, NO_ANSWER, ApiCalls, ControllerSilent, explain_refusal
from gcore.errors import Unreachable
from gcore.observability.events import JobEvent


class AccessClient(ApiCalls):
    """Client of the Access service. Any controller answers. Use it as an async context manager."""

    async def who_am_i(self) -> pb.WhoAmIReply:
        """Return the identity that the cluster assigns to this client."""
        return await self._call_any("look up the caller", lambda s, t: s.WhoAmI(pb.WhoAmIRequest(), timeout=t))

    async def create_token(
        self, name: str, role: str, namespaces: Sequence[str], lifetime_s: float
    ) -> pb.CreateTokenReply:
        """Create a token. If the response is lost, revoke the token, because its secret cannot be read again."""
        request = pb.CreateTokenRequest(name=name, role=role, namespaces=namespaces, lifetime_s=lifetime_s)
        return await self._call_any("create the token", lambda s, t: s.CreateToken(request, timeout=t))

    async def list_tokens(self) -> pb.ListTokensReply:
        """Return all tokens without their secrets."""
        return await self._call_any("list the tokens", lambda s, t: s.ListTokens(pb.ListTokensRequest(), timeout=t))

    async def revoke_token(self, token_id: str) -> pb.RevokeTokenReply:
        """Revoke a token."""
        request = pb.RevokeTokenRequest(id=token_id)
        return await self._call_any("revoke the token", lambda s, t: s.RevokeToken(request, timeout=t))

    def _stub(self, address: str) -> Any:
        channel = self._channel(address)
        return VersionedStub(access_pb2_grpc.AccessStub(channel), more=self._connector.metadata(address))


MOST_REFUSALS = 3
"""A stream raises after this many consecutive rejections per controller, if their reason may be temporary."""


class _Told:
    """Position of a client in the logs of a job's workers, so that a broken stream can resume after the lines that were
    yielded.

    Controllers send positions and marks among the lines; those of an earlier version send neither.
    """

    def __init__(self) -> None:
        self._places: dict[str, v1_pb.LogPlace] = {}
        """Position by worker."""
        self._lines, self._marks, self._ended = False, False, False

    @property
    def is_over(self) -> bool:
        """Whether the logs are complete when the stream ends: it had an end mark, or its controller sends no marks (an
        earlier version)."""
        return self._ended or not self._marks

    @property
    def can_go_on(self) -> bool:
        """Whether a new stream can resume after the yielded lines: their position is known, or there are none."""
        return self._marks or not self._lines

    def note(self, message: v1_pb.LogLine) -> bool:
        """Record the position in a message of the stream. Returns whether the message is a log line, and not a mark."""
        if message.HasField("place"):
            self._places[message.place.instance] = message.place
        is_line = message.mark == v1_pb.LOG_MARK_UNSPECIFIED
        self._lines, self._marks = self._lines or is_line, self._marks or not is_line
        self._ended = message.mark == v1_pb.LOG_MARK_END
        return is_line

    def rest_of(self, request: v1_pb.StreamLogsRequest) -> v1_pb.StreamLogsRequest:
        """Return a copy of `request` that asks only for the lines that were not yielded yet."""
        asked = v1_pb.StreamLogsRequest()
        asked.CopyFrom(request)
        asked.places = True
        asked.after.extend(self._places.values())
        return asked


class ResumingStreams(ApiCalls):
    """Reads the streams of a job (events, metrics, logs). If a controller dies, a stream resumes at another one."""

    async def follow(
        self, job: str, *, after: int = 0, newest: int = 0, follow: bool = True
    ) -> AsyncGenerator[JobEvent, None]:
        """Yield each event of `job` with a sequence number above `after` once, in order, until the job has ended.

        `newest`: limits past events to the newest ones. Without `follow`, only past events. Raises Unreachable if no controller answers
        for `WaitPolicy.lost_s`, and UsageError if the job does not exist.
        """
        last = after

        def begin(stub: Any) -> Any:
            some = newest if last == after else 0
            return stub.WatchJob(v1_pb.WatchJobRequest(job=job, after=last, once=not follow, newest=some))

        async with aclosing(self._resumed("follow the job", job, begin, until_ended=follow)) as messages:
            async for message in messages:
                if message.sequence > last:
                    last = message.sequence
                    yield JobEvent.from_message(message)

    async def follow_metrics(
        self,
        job: str,
        *,
        after_step: int = 0,
        after_lineage: int | None = None,
        names: Sequence[str] = (),
        follow: bool = True,
    ) -> AsyncGenerator[v1_pb.StepMetrics, None]:
        """Yield the metrics of each step after `after_step`, once per lineage and step; with `follow` until the job has ended."""
        place = None if after_lineage is None else (after_lineage, after_step)

        def begin(stub: Any) -> Any:
            request = v1_pb.StreamMetricsRequest(job=job, after_step=after_step, follow=follow, names=list(names))
            if place is not None:
                request.after_lineage, request.after_step = place
            return stub.StreamMetrics(request)

        what = "read the job's metrics"
        async with aclosing(self._resumed(what, job, begin, until_ended=follow)) as messages:
            async for message in messages:
                at = (message.lineage, message.step)
                if place is None or at > place:
                    place = at
                    yield message

    async def stream_logs(self, request: v1_pb.StreamLogsRequest) -> AsyncGenerator[v1_pb.LogLine, None]:
        """Yield each line of the workers' logs once. Raises Unreachable if no controller answers for `WaitPolicy.lost_s`, or if the stream
        breaks and the controller, of an earlier version, did not send positions."""
        told = _Told()

        def begin(stub: Any) -> Any:
            if not told.can_go_on:
                raise Unreachable(
                    "the controller that read the logs stopped, and it did not send positions",
                    where=", ".join(self.addresses),
                    fix="Repeat the call with --since to read the lines after the last one",
                )
            return stub.StreamLogs(told.rest_of(request))

        stream = self._resumed("read the logs", request.job, begin, until_ended=False, is_over=lambda: told.is_over)
        async with aclosing(stream) as messages:
            async for message in messages:
                if told.note(message):
                    yield message

    async def _resumed(
        self,
        what: str,
        job: str,
        begin: Callable[[Any], Any],
        *,
        until_ended: bool = True,
        is_over: Callable[[], bool] = lambda: True,
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a stream and reopen it, at another controller, whenever it breaks.

        `what`: verb phrase for error messages. `begin`: opens the stream after the messages that were already received.
        `until_ended`: read until the job has ended; otherwise a normal end of the stream is the end if `is_over()` is
        true. Raises Unreachable if no controller answers for `WaitPolicy.lost_s`.
        """
        self._answered_at = self._clock.monotonic()
        refused = 0
        while True:
            address = self.addresses[self._current]
            call = begin(self._stub(address))
            brought = False
            try:
                async with aclosing(self._until_silent(call, address)) as messages:
                    async for message in messages:
                        brought, refused = True, 0
                        yield message
                # A controller that shuts down also ends its streams normally. So the stream is complete only if it brings no message
                # and the job has ended.
                if not until_ended and is_over():
                    return
                if not until_ended:
                    self._switch_from(address)
                elif not brought and (await self._state(job)) in ENDED:
                    return
            except grpc.aio.AioRpcError as error:
                refused += error.code() not in NO_ANSWER
                if error.code() in FINAL or refused >= MOST_REFUSALS * len(self.addresses):
                    raise explain_refusal(error, address, what) from error
                self._switch_from(address)
                # A controller that cannot reach the store still answers health checks, so it does not count as lost.
                await self._health(address)
            except (ControllerSilent, Unreachable):
                self._switch_from(address)
            finally:
                call.cancel()
            if self._clock.monotonic() - self._answered_at > self._patience.lost_s:
                raise self._unreachable(f"no controller has answered for {self._patience.lost_s:.0f} s")
            if not brought:
                await self._clock.sleep(self._patience.retry_s)

    async def _state(self, job: str) -> int:
        """Return the job's state (a `JobState` of the API)."""
        found = await self._call_any("look up the job", lambda s, t: s.GetJob(v1_pb.GetJobRequest(job=job), timeout=t))
        return int(found.state)

    async def _until_silent(self, call: Any, address: str) -> AsyncGenerator[Any, None]:
        """Yield the stream's messages; raise ControllerSilent if its controller stops answering.

        A machine that vanished or a stopped process does not break the connection, so a quiet stream is probed.
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
                        raise ControllerSilent
                message = reading.result()
            finally:
                reading.cancel()
            self._answered_at = self._clock.monotonic()
            if message is None:
                return
            yield message


class JobsClient(ResumingStreams):
    """Low-level client of the Jobs service: one method per API call, which returns the API's message."""

    async def create_job(self, spec_json: str, *, request_id: str, mode: v1_pb.StartMode) -> v1_pb.Job:
        """Create a job. A repeated call with the same `request_id` returns the same job.

        `mode`: whether an unfinished job of that name continues, or is cancelled for a new one.
        """
        key = self._owner_key
        request = v1_pb.CreateJobRequest(request_id=request_id, spec_json=spec_json, mode=mode, owner_key=key)
        return await self._call_any(
            "create the job", lambda stub, t: stub.CreateJob(request, timeout=t), timeout_s=self._patience.create_s
        )

    async def get_job(self, job: str) -> v1_pb.Job:
        """Return a job by name (the newest with this name) or uid."""
        return await self._call_any("look up the job", lambda s, t: s.GetJob(v1_pb.GetJobRequest(job=job), timeout=t))

    async def list_page(self, request: v1_pb.ListJobsRequest) -> v1_pb.ListJobsReply:
        """Return one page of the jobs that the caller may see, newest first. `request`: filters, page size and page
        token."""
        return await self._call_any("list the jobs", lambda s, t: s.ListJobs(request, timeout=t))

    async def list_jobs(
        self, *, namespace: str = "", states: Sequence[int] = (), name_prefix: str = "", limit: int | None = None
    ) -> list[v1_pb.Job]:
        """Return all matching jobs, or the newest `limit`, newest first."""
        found: list[v1_pb.Job] = []
        request = v1_pb.ListJobsRequest(namespace=namespace, name_prefix=name_prefix, page_size=limit or 0)
        request.states.extend(states)  # type: ignore[arg-type]
        while True:
            reply = await self.list_page(request)
            found += reply.jobs
            if not reply.next_page_token or (limit is not None and len(found) >= limit):
                return found[:limit]
            request.page_token = reply.next_page_token

    async def cancel_job(self, job: str, *, drain: bool = False) -> v1_pb.Job:
        """Cancel the job: immediately, or with `drain` at its next commit. Has no effect on an ended job."""
        request = v1_pb.CancelJobRequest(job=job, mode=v1_pb.CANCEL_MODE_DRAIN if drain else v1_pb.CANCEL_MODE_NOW)
        return await self._call_any("cancel the job", lambda s, t: s.CancelJob(request, timeout=t))

    async def pause_job(self, job: str) -> v1_pb.Job:
        """Pause the job. It releases its slots at its next commit and waits until it is resumed."""
        return await self._call_any("pause the job", lambda s, t: s.PauseJob(v1_pb.PauseJobRequest(job=job), timeout=t))

    async def resume_job(self, job: str) -> v1_pb.Job:
        """Resume a paused job. It continues as soon as slots are available."""
        return await self._call_any(
            "resume the job", lambda s, t: s.ResumeJob(v1_pb.ResumeJobRequest(job=job), timeout=t)
        )

    async def update_job(self, job: str, changes: Mapping[str, int]) -> v1_pb.Job:
        """Change `priority`, `slots_min` and `slots_max` (0: no limit) of a running job."""
        request = v1_pb.UpdateJobRequest(job=job, update_mask=FieldMask(paths=sorted(changes)), **changes)
        return await self._call_any("change the job", lambda s, t: s.UpdateJob(request, timeout=t))

    async def delete_job(self, job: str, *, files: bool = False) -> None:
        """Delete the record of an ended job, and with `files` its run folder."""
        request = v1_pb.DeleteJobRequest(job=job, files=files)
        await self._call_any("delete the job", lambda s, t: s.DeleteJob(request, timeout=t))

    async def run_eval(self, job: str) -> v1_pb.RunEvalReply:
        """Request an evaluation of the newest weights. Returns their version, not the result."""
        return await self._call_any(
            "request an evaluation", lambda s, t: s.RunEval(v1_pb.RunEvalRequest(job=job), timeout=t)
        )

    async def list_shards(self, job: str) -> list[v1_pb.Shard]:
        """Return the shards of the job's prompt stream: which node generates for each, and its first prompt without an
        outcome."""
        request = v1_pb.ListShardsRequest(job=job)
        reply = await self._call_any("list the shards", lambda s, t: s.ListShards(request, timeout=t))
        return list(reply.shards)

    async def audit_job(self, job: str) -> v1_pb.AuditReport:
        """Audit the job: compare its log with the receipts of the train ranks (what each rank trained)."""
        request = v1_pb.AuditJobRequest(job=job)
        return await self._call_any(
            "audit the job", lambda s, t: s.AuditJob(request, timeout=t), timeout_s=self._patience.audit_s
        )

    async def get_samples(
        self,
        job: str,
        *,
        step: int | None = None,
        source: str = "",
        order: v1_pb.SampleOrder = v1_pb.SAMPLE_ORDER_UNSPECIFIED,
        limit: int = 0,
    ) -> list[v1_pb.SampleGroup]:
        """Return the stored samples of `step` (None: the newest step that has some), one group per prompt; at most
        `limit` groups, 0: all.

        Raises UsageError if the job does not exist or has no such samples; the error lists the steps that have samples.
        """
        request = v1_pb.GetSamplesRequest(job=job, step=step, source=source, order=order, limit=limit)
        return await self.read_samples(request)

    async def read_samples(self, request: v1_pb.GetSamplesRequest) -> list[v1_pb.SampleGroup]:
        """Return the stored samples that `request` selects. Raises as `get_samples`."""

        async def read(stub: Any, timeout_s: float) -> list[v1_pb.SampleGroup]:
            return [group async for group in stub.GetSamples(request, timeout=timeout_s)]

        return await self._call_any("read the samples", read, timeout_s=self._patience.samples_s)

    async def get_books(self, job: str, step: int | None = None) -> list[v1_pb.BookOfNode]:
        """Return the slot accounting of `step`, per node, with the timeline of each slot. `step` None: the newest
        steps, without timelines.

        Raises UsageError if the job does not exist or the step has no slot accounting.
        """
        request = v1_pb.GetBooksRequest(job=job, step=step)

        async def read(stub: Any, timeout_s: float) -> list[v1_pb.BookOfNode]:
            return [book async for book in stub.GetBooks(request, timeout=timeout_s)]

        return await self._call_any("read the slot accounting", read, timeout_s=self._patience.samples_s)

    async def list_checkpoints(self, job: str) -> v1_pb.ListCheckpointsReply:
        """Return the job's registered checkpoints, newest first."""
        request = v1_pb.ListCheckpointsRequest(job=job)
        return await self._call_any("list the checkpoints", lambda s, t: s.ListCheckpoints(request, timeout=t))

    async def get_placement(self, job: str) -> v1_pb.PlacementReply:
        """Return the job's placement (which pool each slot serves: rollout, reward or train), and its newest changes."""
        request = v1_pb.GetPlacementRequest(job=job)
        return await self._call_any("look up the placement", lambda s, t: s.GetPlacement(request, timeout=t))

    async def pin_placement(self, request: v1_pb.PinPlacementRequest) -> v1_pb.PlacementReply:
        """Pin a part of a job's placement, so that the policy does not change it, or release the pin. Idempotent."""
        return await self._call_any("pin the placement", lambda s, t: s.PinPlacement(request, timeout=t))

    async def list_nodes(self) -> v1_pb.ListNodesReply:
        """Return the daemons and workers of the cluster."""
        return await self._call_any("list the nodes", lambda s, t: s.ListNodes(v1_pb.ListNodesRequest(), timeout=t))

    async def drain_node(self, node: str, *, undo: bool = False) -> v1_pb.Node:
        """Drain a node: every job leaves it at its next commit, and no new work starts there until `undo`."""
        request = v1_pb.DrainNodeRequest(node=node, undo=undo)
        return await self._call_any("drain the node", lambda s, t: s.DrainNode(request, timeout=t))

    async def get_quotas(self) -> list[v1_pb.Quota]:
        """Return the slot quota of each namespace and its current use."""
        reply = await self._call_any(
            "look up the quotas", lambda s, t: s.GetQuotas(v1_pb.GetQuotasRequest(), timeout=t)
        )
        return list(reply.quotas)

    async def set_quota(self, namespace: str, slots: int | None) -> list[v1_pb.Quota]:
        """Set the maximum number of slots for all jobs of a namespace together; None removes it. Returns all quotas.
        Idempotent."""
        request = v1_pb.SetQuotaRequest(namespace=namespace, slots=slots)
        reply = await self._call_any("set the quota", lambda s, t: s.SetQuota(request, timeout=t))
        return list(reply.quotas)

    async def get_usage(
        self, *, by: Sequence[str] = (), since: float = 0.0, until: float = 0.0, namespace: str = ""
    ) -> list[v1_pb.Usage]:
        """Return the slot-seconds that jobs held and used, grouped by the keys `by`: namespace, job, owner or pool.

        `since`, `until`: seconds since the epoch; 0: no limit.
        """
        request = v1_pb.GetUsageRequest(since=since, until=until, by=list(by), namespace=namespace)
        reply = await self._call_any("sum up the usage", lambda s, t: s.GetUsage(request, timeout=t))
        return list(reply.usages)
