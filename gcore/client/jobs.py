"""The Jobs service behind one or several addresses: each verb of the API as a method, with the API's own messages.

Knows no files and no terminal. Errors are gcore's: `Unreachable` when nobody answered, `StoreUnavailable` when a controller
answered that its store is away, `UsageError` when the answer was that the request is wrong, `NotAllowed` when whoever calls may not,
`GcoreError` for anything else a controller complains of. `gcore.AsyncClient` and `gcore.Client` stand on this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from gcore.api.v1 import jobs_pb2 as pb
from gcore.client.following import Following


class JobsClient(Following):
    """The low-level client."""

    async def create_job(self, spec_json: str, *, request_id: str, mode: pb.StartMode) -> pb.Job:
        """Create the job, or find it: the same `request_id` always means the same job."""
        request = pb.CreateJobRequest(request_id=request_id, spec_json=spec_json, mode=mode)
        return await self._anywhere(
            "create the job", lambda stub, t: stub.CreateJob(request, timeout=t), timeout_s=self._patience.create_s
        )

    async def get_job(self, job: str) -> pb.Job:
        """By name (the newest of that name) or uid."""
        return await self._anywhere("look the job up", lambda s, t: s.GetJob(pb.GetJobRequest(job=job), timeout=t))

    async def list_page(self, request: pb.ListJobsRequest) -> pb.ListJobsReply:
        """A page of the jobs that the caller may see, the newest first."""
        return await self._anywhere("list the jobs", lambda s, t: s.ListJobs(request, timeout=t))

    async def list_jobs(
        self, *, namespace: str = "", states: Sequence[int] = (), name_prefix: str = "", limit: int | None = None
    ) -> list[pb.Job]:
        """All jobs that fit, or the newest `limit` of them, the newest first."""
        found: list[pb.Job] = []
        request = pb.ListJobsRequest(namespace=namespace, name_prefix=name_prefix, page_size=limit or 0)
        request.states.extend(states)  # type: ignore[arg-type]
        while True:
            reply = await self.list_page(request)
            found += reply.jobs
            if not reply.next_page_token or (limit is not None and len(found) >= limit):
                return found[:limit]
            request.page_token = reply.next_page_token

    async def cancel_job(self, job: str, *, drain: bool = False) -> pb.Job:
        """Ask for the end of the job, with `drain` at its next commit. One that has ended stays as it is."""
        request = pb.CancelJobRequest(job=job, mode=pb.CANCEL_MODE_DRAIN if drain else pb.CANCEL_MODE_NOW)
        return await self._anywhere("cancel the job", lambda s, t: s.CancelJob(request, timeout=t))

    async def pause_job(self, job: str) -> pb.Job:
        """Have the job give its slots back at its next commit, and begin nothing until it is resumed."""
        return await self._anywhere("pause the job", lambda s, t: s.PauseJob(pb.PauseJobRequest(job=job), timeout=t))

    async def resume_job(self, job: str) -> pb.Job:
        """Have a paused job go on as soon as there are slots for it."""
        return await self._anywhere("resume the job", lambda s, t: s.ResumeJob(pb.ResumeJobRequest(job=job), timeout=t))

    async def update_job(self, job: str, changes: Mapping[str, int]) -> pb.Job:
        """Change `priority`, `slots_min`, `slots_max` (0: all there are) of a job while it runs."""
        request = pb.UpdateJobRequest(job=job, update_mask=FieldMask(paths=sorted(changes)), **changes)
        return await self._anywhere("change the job", lambda s, t: s.UpdateJob(request, timeout=t))

    async def delete_job(self, job: str, *, files: bool = False) -> None:
        """Forget a job that has ended, and with `files` delete its run's folder."""
        request = pb.DeleteJobRequest(job=job, files=files)
        await self._anywhere("delete the job", lambda s, t: s.DeleteJob(request, timeout=t))

    async def run_eval(self, job: str) -> pb.RunEvalReply:
        """Have the newest weights evaluated; whose that will be."""
        return await self._anywhere("have it evaluated", lambda s, t: s.RunEval(pb.RunEvalRequest(job=job), timeout=t))

    async def list_shards(self, job: str) -> list[pb.Shard]:
        """Who has which shards, and how far each is."""
        request = pb.ListShardsRequest(job=job)
        reply = await self._anywhere("list the shards", lambda s, t: s.ListShards(request, timeout=t))
        return list(reply.shards)

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

    async def drain_node(self, node: str, *, undo: bool = False) -> pb.Node:
        """Have every job leave a node at its next commit, and place nothing there until that is undone."""
        request = pb.DrainNodeRequest(node=node, undo=undo)
        return await self._anywhere("drain the node", lambda s, t: s.DrainNode(request, timeout=t))

    async def get_quotas(self) -> list[pb.Quota]:
        """The most slots that the jobs of each namespace may have together, and what they have."""
        reply = await self._anywhere("look the quotas up", lambda s, t: s.GetQuotas(pb.GetQuotasRequest(), timeout=t))
        return list(reply.quotas)

    async def set_quota(self, namespace: str, slots: int | None) -> list[pb.Quota]:
        """Set a namespace's quota, or take it away (None); the same twice is the same once."""
        request = pb.SetQuotaRequest(namespace=namespace, slots=slots)
        reply = await self._anywhere("set the quota", lambda s, t: s.SetQuota(request, timeout=t))
        return list(reply.quotas)

    async def get_usage(
        self, *, by: Sequence[str] = (), since: float = 0.0, until: float = 0.0, namespace: str = ""
    ) -> list[pb.Usage]:
        """Slot-seconds by namespace, job, owner or pool."""
        request = pb.GetUsageRequest(since=since, until=until, by=list(by), namespace=namespace)
        reply = await self._anywhere("sum the usage up", lambda s, t: s.GetUsage(request, timeout=t))
        return list(reply.usages)
