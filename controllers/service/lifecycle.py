"""The verbs of the Jobs service that begin, find and end jobs."""

from __future__ import annotations

import uuid

from controllers.service.access import caller, may_see
from controllers.service.asking import ask_for_evaluation
from controllers.service.claiming import Change, ending, paused, updated
from controllers.service.deleting import check_ended, delete
from controllers.service.described import STATES
from controllers.service.desk import JobsDesk
from controllers.service.listing import list_jobs
from controllers.service.refusals import Conflict, JobEnded, bad_field
from controllers.service.statuses import Context, edge
from controllers.sharing import change_claim
from gcore.api.v1 import jobs_pb2 as pb
from gcore.schema import UnreadableRecord

LONGEST_REQUEST_ID = 128
LONGEST_SPEC = 1 << 20
"""Characters of a spec as JSON, with the templates that were read into it."""


def check_creation(request: pb.CreateJobRequest) -> None:
    """Raises BadFields."""
    name = request.request_id
    if len(name) > LONGEST_REQUEST_ID or not all(c.isalnum() or c in "._:-" for c in name) or not name.isascii():
        what = f"{name[:40]!r} is no request id"
        raise bad_field("request_id", what, f"Use up to {LONGEST_REQUEST_ID} letters, digits, '.', '_', ':' and '-'")
    if len(request.spec_json) > LONGEST_SPEC:
        raise bad_field("spec_json", f"is longer than {LONGEST_SPEC} characters", "Data and models go into files")
    if request.mode not in pb.StartMode.values():
        raise bad_field("mode", f"{request.mode} is no mode", "Use START_MODE_RESUME or START_MODE_NEW")


class Lifecycle(JobsDesk):
    """Creates, finds, lists, ends."""

    @edge
    async def CreateJob(self, request: pb.CreateJobRequest, context: Context) -> pb.Job:
        """Create, or find, a job."""
        check_creation(request)
        submissions = await self._submissions()
        # Each job has a request key: jobs are listed by them.
        name = request.request_id or uuid.uuid4().hex
        uid = await submissions.create(name, request.spec_json, request.mode == pb.START_MODE_NEW, caller().name)
        if not may_see(await self._jobs.namespace(uid)):
            raise Conflict(
                f"request id {request.request_id!r} is taken", fix="Choose another, that nobody else comes to choose"
            )
        return await self._describe(uid, quick=True)

    @edge
    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.Job:
        """One job."""
        return await self._describe(await self._find(request.job))

    @edge
    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsReply:
        """The jobs that the caller may see, the newest first, a page of them."""
        return await list_jobs(self._jobs, request)

    @edge
    async def PauseJob(self, request: pb.PauseJobRequest, context: Context) -> pb.Job:
        """Have a job give its slots back at its next commit."""
        return await self._change(request.job, paused(yes=True))

    @edge
    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.Job:
        """Have it go on."""
        return await self._change(request.job, paused(yes=False))

    @edge
    async def UpdateJob(self, request: pb.UpdateJobRequest, context: Context) -> pb.Job:
        """Change what may change while a job runs."""
        return await self._change(request.job, updated(request))

    async def _change(self, name: str, change: Change) -> pb.Job:
        uid = await self._find(name)
        if await change_claim(self._jobs.store, uid, change) is None:
            raise JobEnded(f"job {name!r} has ended", fix="`gcore retry` begins it once more")
        return await self._describe(uid)

    @edge
    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Context) -> pb.DeleteJobReply:
        """Forget a job that has ended."""
        uid = await self._find(request.job)
        mirror, workers = await self._jobs.mirror(uid), (await self._jobs.cluster()).workers
        check_ended(mirror, sum(worker.job_uid == uid for worker in workers))
        await delete(self._jobs, mirror, files=request.files)
        return pb.DeleteJobReply()

    @edge
    async def RunEval(self, request: pb.RunEvalRequest, context: Context) -> pb.RunEvalReply:
        """Have the weights of the step that is under way evaluated."""
        uid = await self._find(request.job)
        who, now = caller().name, self._clock.wall()
        version = await ask_for_evaluation(self._jobs.ledger(uid), self._looking(uid), who, now)
        return pb.RunEvalReply(step=version.step, lineage=version.lineage)

    @edge
    async def CancelJob(self, request: pb.CancelJobRequest, context: Context) -> pb.Job:
        """End a job, at once or at its next commit."""
        uid = await self._find(request.job)
        if request.mode not in pb.CancelMode.values():
            raise bad_field("mode", f"{request.mode} is no mode", "Use CANCEL_MODE_NOW or CANCEL_MODE_DRAIN")
        if request.mode == pb.CANCEL_MODE_DRAIN:
            await change_claim(self._jobs.store, uid, ending("cancelled on request"))
            return await self._describe(uid)
        ended = await (await self._submissions()).cancel(uid, "cancelled on request")
        try:
            return await self._describe(uid)
        except UnreadableRecord:  # that it has ended must not look like a failure
            if ended is None:
                raise
            return pb.Job(uid=uid, name=request.job, state=STATES[ended.phase], reason=ended.reason)
