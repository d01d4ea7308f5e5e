"""The Jobs service. Any controller answers for the whole cluster: it reads the store, and follows jobs through its mirror.

Errors leave as gRPC statuses with one sentence: INVALID_ARGUMENT (the spec or its files), NOT_FOUND, FAILED_PRECONDITION
(another spec under the same name), UNAVAILABLE (no store).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from controllers.own_files import collect_books, collect_samples
from controllers.service.audits import report_of
from controllers.service.books import find_books
from controllers.service.checkpoints import list_checkpoints
from controllers.service.described import STATES, described, with_news
from controllers.service.events import Event, EventLog
from controllers.service.placed import placement_of, write_pin
from controllers.service.records import StoredJobs, Unreadable
from controllers.service.refusals import Conflict, NotFound
from controllers.service.samples import find_samples
from controllers.waiting import waiting_for
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.clock import Clock
from gcore.errors import GcoreError, StoreUnavailable, UsageError
from gcore.ledger.mirror import JobMirror
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys

if TYPE_CHECKING:  # imported when there is a job: see controllers.wire
    from controllers.job import JobRunner
    from controllers.service.submission import Submissions

log = logging.getLogger(__name__)
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]


def edge(method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The RPC edge: gcore's errors become statuses; a defect is logged and becomes INTERNAL."""

    @functools.wraps(method)
    async def guarded(self: Any, request: Any, context: Context) -> T:
        try:
            return await method(self, request, context)
        except StoreUnavailable as error:
            # Whoever asks in vain because the store is away is told why it does not come back.
            await context.abort(status_of(error), self.trouble() or str(error))
        except GcoreError as error:
            await context.abort(status_of(error), str(error))
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("%s failed", method.__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"{method.__name__} failed: {error!r}")
        raise AssertionError("abort raises")

    return guarded


def status_of(error: GcoreError) -> grpc.StatusCode:
    """The status an error leaves as."""
    match error:
        case NotFound():
            return grpc.StatusCode.NOT_FOUND
        case Conflict():
            return grpc.StatusCode.FAILED_PRECONDITION
        case StoreUnavailable():
            return grpc.StatusCode.UNAVAILABLE
        case UsageError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case _:
            return grpc.StatusCode.FAILED_PRECONDITION


class JobsService(jobs_pb2_grpc.JobsServicer):
    """Implements gcore.api.v1.Jobs."""

    def __init__(
        self,
        jobs: StoredJobs,
        submissions: Callable[[], Awaitable[Submissions]],
        runner: Callable[[str], JobRunner | None],
        clock: Clock,
        trouble: Callable[[], str] = str,
    ) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here."""
        self.trouble = trouble
        self._jobs = jobs
        self._submissions = submissions
        self._runner = runner
        self._clock = clock

    @edge
    async def CreateJob(self, request: pb.CreateJobRequest, context: Context) -> pb.Job:
        """Create, or find, a job."""
        submissions = await self._submissions()
        uid = await submissions.create(request.request_id, request.spec_json, request.mode == pb.START_MODE_NEW)
        return await self._describe(uid)

    @edge
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.Job:
        """One job."""
        return await self._describe(await self._find(request.job))

    @edge
    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsReply:
        """All jobs, oldest first."""
        return pb.ListJobsReply(jobs=[_listed(one) for one in await self._jobs.summaries()])

    @edge
    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.Job:
        """End a job."""
        ended = await (await self._submissions()).cancel(uid := await self._find(request.job), "cancelled on request")
        try:
            return await self._describe(uid)
        except UnreadableRecord:  # that it has ended must not look like a failure
            if ended is None:
                raise
            return pb.Job(uid=uid, name=request.job, state=STATES[ended.phase], reason=ended.reason)

    @edge
    async def AuditJob(self, request: pb.AuditJobRequest, context: Context) -> pb.AuditReport:
        """Recompute a job's accounts."""
        uid = await self._find(request.job)
        return report_of(await self._jobs.audit(uid))

    @edge
    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Context) -> pb.ListCheckpointsReply:
        """A job's registered checkpoints."""
        mirror = await self._jobs.mirror(await self._find(request.job))
        return await list_checkpoints(mirror, await self._jobs.holders(mirror))

    @edge
    async def GetPlacement(self, request: pb.GetPlacementRequest, context: Context) -> pb.PlacementReply:
        """How a job's slots are shared out."""
        return await self._placement(await self._find(request.job))

    @edge
    async def PinPlacement(self, request: pb.PinPlacementRequest, context: Context) -> pb.PlacementReply:
        """Fix something of it."""
        uid = await self._find(request.job)
        slots = sum(len(node.slots) for node in (await self._jobs.cluster()).nodes)
        look = functools.partial(self._jobs.mirror, uid)
        await write_pin(self._jobs.ledger(uid), look, request, slots, self._jobs.node, self._clock.wall())
        return await self._placement(uid)

    async def _placement(self, uid: str) -> pb.PlacementReply:
        mirror, listing = await self._jobs.mirror(uid), await self._jobs.cluster()
        return placement_of(mirror, frozenset(node.name for node in listing.nodes))

    @edge
    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesReply:
        """The daemons and workers that are there."""
        listing = await self._jobs.cluster()
        return pb.ListNodesReply(
            nodes=[
                pb.Node(name=n.name, incarnation=n.incarnation, address=n.address, pid=n.pid, slots=n.slots)
                for n in listing.nodes
            ],
            workers=[
                pb.WorkerInfo(
                    instance=w.instance,
                    node=w.node,
                    role=w.role,
                    job_uid=w.job_uid,
                    state=w.state,
                    address=w.address,
                    pid=w.pid,
                    slot=" ".join(w.slots),
                )
                for w in listing.workers
            ],
        )

    async def WatchJob(self, request: pb.WatchJobRequest, context: Context) -> AsyncIterator[pb.JobEvent]:
        """A job's events after a number, as they come; ends with the job."""
        try:
            uid = await self._find(request.job)
            async for event in self._follow(uid, request.after):
                yield pb.JobEvent(
                    sequence=event.sequence,
                    time=event.time,
                    kind=event.kind,
                    message=event.message,
                    data_json=event.data_json,
                )
        except GcoreError as error:
            await context.abort(status_of(error), str(error))

    async def GetSamples(self, request: pb.GetSamplesRequest, context: Context) -> AsyncIterator[pb.SampleGroup]:
        """What a step was trained on, as far as it is kept."""
        try:
            mirror = await self._jobs.mirror(await self._find(request.job))
            await self._jobs.collect(mirror, collect_samples)
            for group in await find_samples(mirror, request):
                yield group
        except GcoreError as error:
            await context.abort(status_of(error), str(error))

    async def GetBooks(self, request: pb.GetBooksRequest, context: Context) -> AsyncIterator[pb.BookOfNode]:
        """What the slots of a job did."""
        try:
            mirror = await self._jobs.mirror(await self._find(request.job))
            if request.HasField("step"):
                await self._jobs.collect(mirror, collect_books)
            for book in await find_books(mirror, request.step if request.HasField("step") else None):
                yield book
        except GcoreError as error:
            await context.abort(status_of(error), str(error))

    async def _follow(self, uid: str, after: int) -> AsyncIterator[Event]:
        runner = await self._settled(uid)
        if runner is None:
            for event in (await self._history(uid)).after(after):
                yield event
            return
        while True:
            # Looked at before the events: what comes while they are sent on is seen in the next round.
            seen, over = runner.changes.count, runner.closed or _has_ended(runner.mirror)
            for event in runner.events.after(after):
                after = event.sequence
                yield event
            if over:
                return
            if runner.changes.count == seen:
                await runner.changes.wait()

    async def _settled(self, uid: str) -> JobRunner | None:
        """The runner of a job that has not ended; a new job's may take a moment to come."""
        mirror = await self._jobs.mirror(uid)
        if mirror.status is None or _has_ended(mirror):
            return None
        for _ in range(400):
            runner = self._runner(uid)
            if runner is not None:
                return runner
            await self._clock.sleep(0.05)
        raise StoreUnavailable(f"this controller has not heard of job {uid} yet", fix="Ask again")

    async def _history(self, uid: str) -> EventLog:
        keys = JobKeys(uid)
        batch = await self._jobs.batch(uid)
        history = EventLog(keys)
        history.note(JobMirror(keys), batch, JobMirror(keys).fold(batch), self._clock.wall())
        return history

    async def _find(self, name: str) -> str:
        uid = await self._jobs.find(name)
        if uid is None:
            raise NotFound(f"there is no job {name!r}", fix="`gcore list` shows the jobs there are")
        return uid

    async def _describe(self, uid: str) -> pb.Job:
        mirror = await self._jobs.mirror(uid)
        message = with_news(described(mirror), mirror)
        runner = self._runner(uid)
        if runner is not None and runner.is_working:
            now, wall = self._clock.monotonic(), self._clock.wall()
            for wait in waiting_for(runner.look()):
                since = wall - (now - runner.waits.since.get(wait.key, now))
                message.waiting.add(who=runner.node, what=wait.what, since=since)
        return message


def _has_ended(mirror: JobMirror) -> bool:
    return mirror.status is not None and mirror.status.record.phase.ended


def _listed(one: JobMirror | Unreadable) -> pb.Job:
    if isinstance(one, JobMirror):
        try:
            return described(one)
        except UnreadableRecord as error:
            name = "" if one.job is None else one.job.record.name
            one = Unreadable(one.keys.uid, name, str(error))
    return pb.Job(uid=one.uid, name=one.name, state=pb.JOB_STATE_UNSPECIFIED, reason=one.why)
