"""A scripted Jobs service: a real gRPC server, so that clients meet real streams, refusals and crashes.

Several `FakeJobs` may serve one `Script`, as several controllers serve one cluster. `kill` ends one as a crash
does; `hush` keeps its connections open and sends nothing more. It trains, stores and validates nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.observability.events import JobEvent

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})

_STATES = {
    "PENDING": pb.JOB_STATE_PENDING,
    "RUNNING": pb.JOB_STATE_RUNNING,
    "SUCCEEDED": pb.JOB_STATE_SUCCEEDED,
    "FAILED": pb.JOB_STATE_FAILED,
    "CANCELLED": pb.JOB_STATE_CANCELLED,
}


@dataclass
class Script:
    """What the cluster knows: one job, the events so far, and what to answer. Shared by its servers."""

    job: pb.Job
    events: list[JobEvent] = field(default_factory=list)
    audit: pb.AuditReport = field(default_factory=lambda: pb.AuditReport(clean=True))
    nodes: pb.ListNodesReply = field(default_factory=pb.ListNodesReply)
    samples: list[pb.SampleGroup] = field(default_factory=list)
    asked_samples: list[pb.GetSamplesRequest] = field(default_factory=list)
    lines: list[pb.LogLine] = field(default_factory=list)
    steps: list[pb.StepMetrics] = field(default_factory=list)
    shards: list[pb.Shard] = field(default_factory=list)
    usages: list[pb.Usage] = field(default_factory=list)
    placement: pb.PlacementReply = field(default_factory=pb.PlacementReply)
    asked: list[Any] = field(default_factory=list)
    """Every request of the verbs that change a job or a node, and of those that have filters, in the order in which they came."""
    deleted: bool = False
    requests: list[pb.CreateJobRequest] = field(default_factory=list)
    """Every CreateJob that came, repeated ones too."""
    refusal: tuple[grpc.StatusCode, str] | None = None
    """When set, every call is refused so."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def play(self, events: Sequence[JobEvent]) -> None:
        """Let `events` happen now. A "state" event changes the job's state, a "step" event its step."""
        for event in events:
            self.events.append(event)
            if event.kind == "state":
                self.job.state = _STATES[event.data["state"]]
                self.job.reason = event.data.get("reason", "")
            if event.kind == "step":
                self.job.step = event.data["step"]
        woken, self.changed = self.changed, asyncio.Event()
        woken.set()


class FakeJobs(jobs_pb2_grpc.JobsServicer):
    """One controller's job API. `address` is known after `start`."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.address = ""
        self.served: list[int] = []
        """The sequence numbers this server sent, in order."""
        self.watches: list[int] = []
        """The `after` of every WatchJob that came."""
        self._hushed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> FakeJobs:
        """Serve on loopback."""
        server = grpc.aio.server()
        jobs_pb2_grpc.add_JobsServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self._hushed), server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        self._server = server
        return self

    async def kill(self) -> None:
        """End at once: every stream breaks, the port closes."""
        if self._server is not None:
            await self._server.stop(grace=None)

    def hush(self) -> None:
        """Answer nothing any more, as a stopped process does."""
        self._hushed.set()

    async def CreateJob(self, request: pb.CreateJobRequest, context: _Context) -> pb.Job:
        """The script's job."""
        await self._first(context)
        self.script.requests.append(request)
        self.script.job.spec_json = request.spec_json
        return self.script.job

    async def GetJob(self, request: pb.GetJobRequest, context: _Context) -> pb.Job:
        """The script's job, by name or uid."""
        await self._first(context)
        await self._known(request.job, context)
        return self.script.job

    async def ListJobs(self, request: pb.ListJobsRequest, context: _Context) -> pb.ListJobsReply:
        """One job."""
        await self._first(context)
        self.script.asked.append(request)
        fits = self.script.job.name.startswith(request.name_prefix) and not self.script.deleted
        return pb.ListJobsReply(jobs=[self.script.job] if fits else [])

    async def CancelJob(self, request: pb.CancelJobRequest, context: _Context) -> pb.Job:
        """Cancelled at once."""
        await self._first(context)
        await self._known(request.job, context)
        self.script.asked.append(request)
        if self.script.job.state not in _ENDED:
            self.script.job.state = pb.JOB_STATE_CANCELLED
        return self.script.job

    async def PauseJob(self, request: pb.PauseJobRequest, context: _Context) -> pb.Job:
        """Paused at once."""
        return await self._in_state(request, context, pb.JOB_STATE_PAUSED)

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: _Context) -> pb.Job:
        """Running at once."""
        return await self._in_state(request, context, pb.JOB_STATE_RUNNING)

    async def UpdateJob(self, request: pb.UpdateJobRequest, context: _Context) -> pb.Job:
        """Change the fields that the mask names."""
        job = await self._in_state(request, context, self.script.job.state)
        for name in request.update_mask.paths:
            setattr(job, name, getattr(request, name))
        return job

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: _Context) -> pb.DeleteJobReply:
        """Refused while the job has not ended."""
        await self._in_state(request, context, self.script.job.state)
        if self.script.job.state not in _ENDED:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the job has not ended. Cancel it first")
        self.script.deleted = True
        return pb.DeleteJobReply()

    async def RunEval(self, request: pb.RunEvalRequest, context: _Context) -> pb.RunEvalReply:
        """Of the step under way."""
        job = await self._in_state(request, context, self.script.job.state)
        return pb.RunEvalReply(step=job.step + 1, lineage=job.lineage)

    async def ListShards(self, request: pb.ListShardsRequest, context: _Context) -> pb.ListShardsReply:
        """The script's shards."""
        await self._in_state(request, context, self.script.job.state)
        return pb.ListShardsReply(shards=self.script.shards)

    async def GetPlacement(self, request: pb.GetPlacementRequest, context: _Context) -> pb.PlacementReply:
        """The script's placement."""
        await self._first(context)
        await self._known(request.job, context)
        return self.script.placement

    async def DrainNode(self, request: pb.DrainNodeRequest, context: _Context) -> pb.Node:
        """One of the script's nodes."""
        await self._first(context)
        self.script.asked.append(request)
        for node in self.script.nodes.nodes:
            if node.name == request.node:
                node.draining = not request.undo
                return node
        await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no node {request.node!r}")
        raise AssertionError("abort raises")

    async def GetUsage(self, request: pb.GetUsageRequest, context: _Context) -> pb.GetUsageReply:
        """The script's usage."""
        await self._first(context)
        self.script.asked.append(request)
        return pb.GetUsageReply(usages=self.script.usages)

    async def StreamLogs(self, request: pb.StreamLogsRequest, context: _Context) -> AsyncIterator[pb.LogLine]:
        """The script's lines; with `follow` it never ends."""
        await self._in_state(request, context, self.script.job.state)
        for line in self.script.lines:
            yield line
        if request.follow:
            await asyncio.Event().wait()

    async def StreamMetrics(self, request: pb.StreamMetricsRequest, context: _Context) -> AsyncIterator[pb.StepMetrics]:
        """The script's steps behind the one that is named."""
        await self._in_state(request, context, self.script.job.state)
        place = (request.after_lineage, request.after_step) if request.HasField("after_lineage") else None
        for step in self.script.steps:
            if (step.lineage, step.step) > place if place is not None else step.step > request.after_step:
                yield step
        if request.follow and self.script.job.state not in _ENDED:
            await asyncio.Event().wait()

    async def AuditJob(self, request: pb.AuditJobRequest, context: _Context) -> pb.AuditReport:
        """The script's report."""
        await self._first(context)
        await self._known(request.job, context)
        return self.script.audit

    async def ListNodes(self, request: pb.ListNodesRequest, context: _Context) -> pb.ListNodesReply:
        """The script's nodes."""
        await self._first(context)
        return self.script.nodes

    async def GetSamples(self, request: pb.GetSamplesRequest, context: _Context) -> AsyncIterator[pb.SampleGroup]:
        """The script's samples, whichever are asked for."""
        await self._first(context)
        await self._known(request.job, context)
        self.script.asked_samples.append(request)
        for group in self.script.samples:
            yield group

    async def WatchJob(self, request: pb.WatchJobRequest, context: _Context) -> AsyncIterator[pb.JobEvent]:
        """The events after `request.after`, then those to come, until the job has ended."""
        await self._first(context)
        await self._known(request.job, context)
        self.watches.append(request.after)
        known = [event for event in self.script.events if event.sequence > request.after]
        sent = self.script.events.index(known[-request.newest]) if 0 < request.newest < len(known) else 0
        while True:
            changed = self.script.changed
            while sent < len(self.script.events):
                event = self.script.events[sent]
                sent += 1
                if event.sequence > request.after:
                    if self._hushed.is_set():
                        await asyncio.Event().wait()
                    self.served.append(event.sequence)
                    yield _message(event)
            if self.script.job.state in _ENDED or request.once:
                return
            await changed.wait()

    async def _first(self, context: _Context) -> None:
        if self._hushed.is_set():
            await asyncio.Event().wait()
        if self.script.refusal is not None:
            await context.abort(*self.script.refusal)

    async def _in_state(self, request: Any, context: _Context, state: pb.JobState) -> pb.Job:
        await self._first(context)
        await self._known(request.job, context)
        self.script.asked.append(request)
        self.script.job.state = state
        return self.script.job

    async def _known(self, job: str, context: _Context) -> None:
        if job not in (self.script.job.name, self.script.job.uid):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no job is called {job!r}. See `gcore list`")


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    def __init__(self, hushed: asyncio.Event) -> None:
        super().__init__()
        self._hushed = hushed

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        if self._hushed.is_set():
            await asyncio.Event().wait()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _message(event: JobEvent) -> pb.JobEvent:
    return pb.JobEvent(
        sequence=event.sequence,
        time=event.time,
        kind=event.kind,
        message=event.message,
        data_json=json.dumps(dict(event.data)),
    )
