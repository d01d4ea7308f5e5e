"""The Jobs service. Any controller answers for the whole cluster: it reads the store, and follows its own jobs through their mirrors.

Errors leave as gRPC statuses (`controllers.api.edge.errors`) with a sentence and a constant for programs.

A delete marks the job's head, removes the run's folder, then the records, so that an interrupted delete can be repeated. The folder is
renamed before it is deleted. If nodes share no folder, only this node's folder is deleted. Usage records stay (`gcore.ledger.usage`).

`RunEval` requests an evaluation of the weights that the running step produces. Every peer sees the request before the
commit, so either all peers evaluate these weights or none. If head's weights are or were evaluated, their version is
returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import (
    CallContext,
    Conflict,
    JobEnded,
    JobNotEnded,
    bad_field,
    handle_errors,
    handle_stream_errors,
)
from controllers.api.fleet import FleetMethods, QuotaMethods
from controllers.api.job_messages import (
    STATES,
    Change,
    JobsServiceBase,
    end_change,
    list_jobs,
    pause_change,
    update_change,
)
from controllers.api.run_reader import audit_report, find_accounts, find_samples, list_checkpoints
from controllers.api.store_reader import StoreReader
from controllers.api.streams import StreamMethods
from controllers.cluster.shares import change_claim
from controllers.identity import node_of
from controllers.storage.run_folder import collect_accounts, collect_samples
from gcore.api.v1 import jobs_pb2
from gcore.config.load import stored_spec
from gcore.data.order import ShardCursor
from gcore.errors import GcoreError, StoreUnavailable, UsageError
from gcore.ledger import transactions
from gcore.ledger.evaluation import ask
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import EvalAsked, JobRecord, Pin
from gcore.ledger.selection import is_over, rules_of
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.types import Store
from gcore.types import Pool, Version
from placement.slots import sizes_of

PIN_TRIES = 5

POOLS: tuple[Pool, ...] = ("rollout", "reward", "train")

GOING = ".going"
"""Suffix of a folder's name while it is being deleted."""

ASK_TRIES = 10

LONGEST_REQUEST_ID = 128

LONGEST_SPEC = 1 << 20
"""Maximum characters of a spec as JSON, including the templates that were read into it."""

T = TypeVar("T")


def describe_placement(mirror: JobMirror, nodes: frozenset[str]) -> jobs_pb2.PlacementReply:
    """Build the message about a job's placement: its policy, the plan with the use of each slot, the moves in progress,
    and its pin. `nodes`: the registered nodes."""
    record, plan = mirror.job_record, mirror.plan
    placement = stored_spec(record.spec).placement
    leader = mirror.leader
    return jobs_pb2.PlacementReply(
        uid=record.uid,
        name=record.name,
        policy=placement.policy,
        dry_run=placement.dry_run,
        lends=placement.is_live and placement.lends,
        step=mirror.head.record.step if mirror.head is not None else 0,
        leader=leader.record.node if leader is not None else "",
        plan=plan.record.encode() if plan is not None else b"",
        moves=mirror.moves.encode(),
        pin=mirror.pin.encode(),
        away=sorted(plan.record.nodes - nodes) if plan is not None else [],
        folder=record.run_dir,
    )


def parse_pin(
    request: jobs_pb2.PinPlacementRequest, known: Pin, job: JobRecord, slots: int, node: str, time: float
) -> Pin:
    """Build the pin of a job's placement (fixed sizes of pools, or no moves at all) that results from a request.
    `known`: the present pin, to which the request is added. `slots`: those of the cluster. Raises UsageError,
    Conflict."""
    spec = stored_spec(job.spec)
    placement, spans = spec.placement, sizes_of(spec)
    sizes = {pool: getattr(request, pool) for pool in POOLS if request.HasField(pool)}
    if not placement.is_live:
        raise Conflict(
            f"job {job.name!r} has placement.policy {placement.policy}, which never moves slots, so there is nothing to pin",
            fix="Submit it with another placement.policy, such as dynamic",
        )
    if request.release and (sizes or request.freeze):
        raise UsageError(
            "release removes all pins and cannot be combined with other options", fix="Give either release or pins"
        )
    if not request.release and not sizes and not request.freeze:
        raise UsageError("the request pins nothing", fix="Give --freeze, --rollout, --reward, --train or --release")
    if request.release:
        return Pin(by=node, time=time)
    if wrong := next((pool for pool, size in sizes.items() if size < 1), None):
        raise UsageError(f"{wrong} cannot have {sizes[wrong]} slots", fix="Give it at least one slot")
    judged = bool(spec.served_judges)
    if "reward" in sizes and not judged:
        raise UsageError(
            "the reward pool cannot have slots: the cluster serves no judge of this job", fix="Leave --reward out"
        )
    if parted := next((pool for pool in POOLS if sizes.get(pool, 0) % spans.of(pool)), None):
        what = "sequence groups of {} ranks" if parted == "train" else "engines of {} slots"
        what = f"{parted} {sizes[parted]} is not a whole number of {what.format(spans.of(parted))} each"
        raise UsageError(what, fix=f"Use a multiple of {spans.of(parted)}")
    together = known.sizes | sizes
    apart = "rollout" in together or "reward" in together
    # If a pool has its own slots, every other pool needs at least the slots of one engine or rank.
    least = {
        "rollout": apart * spans.rollout,
        "reward": (apart and judged) * spans.reward,
        "train": apart * spans.train,
    }
    others = {pool: size for pool, size in least.items() if size and pool not in together}
    if sum(together.values()) + sum(others.values()) > slots:
        said = ", ".join(f"{pool} {together[pool]}" for pool in POOLS if pool in together)
        leaves = [f"{'one' if size == 1 else size} for {pool}" for pool, size in others.items()]
        more = f", with {' and '.join(leaves)}," if leaves and sum(together.values()) <= slots else ""
        fix = "Lower one of them" if len(together) > 1 else f"Lower {next(iter(together))}, or release the pins"
        raise UsageError(f"{said}{more} need more than the {slots} slots of the cluster", fix=fix)
    return Pin.model_validate({"frozen": known.frozen or request.freeze, "by": node, "time": time, **together})


async def write_pin(
    ledger: TransactionExecutor,
    look: Callable[[], Awaitable[JobMirror]],
    request: jobs_pb2.PinPlacementRequest,
    slots: int,
    node: str,
    time: float,
) -> None:
    """Write the pin that a request asks for. Retries if other requests change the pin at the same time. `look`: reads
    the job's current records. Raises GcoreError."""
    for _ in range(PIN_TRIES):
        mirror = await look()
        if mirror.has_ended:
            raise Conflict(
                f"job {mirror.job_record.name!r} has ended", fix="Only a job that has not ended can be pinned"
            )
        new = parse_pin(request, mirror.pin, mirror.job_record, slots, node, time)
        known = mirror.written(mirror.keys.pin, mirror.pins.get(""))
        report = await ledger.run(transactions.pin(mirror.keys, known, new))
        if report.outcome is TxnOutcome.WON:
            return
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(
                "the store did not answer, so it is unknown whether the placement was pinned", fix="Retry the request"
            )
    raise StoreUnavailable("other requests pin the placement of this job at the same time", fix="Retry the request")


def check_job_ended(mirror: JobMirror, workers: int) -> None:
    """Raise Conflict if the job has not ended or still has running workers."""
    name = mirror.job_record.name
    if not mirror.has_ended:
        raise JobNotEnded(f"job {name!r} has not ended", fix="`gcore cancel` ends it")
    if workers:
        raise Conflict(f"{workers} workers of job {name!r} are still shutting down", fix="Retry in a few seconds")


def remove_folder(run_dir: Path, uid: str) -> None:
    """Delete a run's folder with its contents. Raises GcoreError. Blocks."""
    going = run_dir.with_name(run_dir.name + GOING)
    if not run_dir.name.endswith(f"-{uid}"):  # the record was edited by hand
        raise GcoreError(
            "the job's record names a folder that is not the folder of its run, so it was not deleted",
            where=str(run_dir),
        )
    try:
        with contextlib.suppress(FileNotFoundError):
            run_dir.rename(going)
        with contextlib.suppress(FileNotFoundError):
            if not going.is_symlink():
                shutil.rmtree(going)
    except OSError as error:
        raise GcoreError(
            f"the run's folder cannot be deleted ({error.strerror or error})",
            where=error.filename if isinstance(error.filename, str) else str(going),
            fix="The job's records are kept. Delete it again when the folder is writable",
        ) from error


async def delete_job(jobs: StoreReader, mirror: JobMirror, *, files: bool) -> None:
    """Delete a job that has ended: mark its head, remove the run's folder, then the records. Can be repeated after an
    error. Raises GcoreError; StoreUnavailable if it is unknown whether the records were deleted."""
    job, ledger = mirror.job_record, jobs.ledger(mirror.keys.uid)
    while mirror.job is not None:
        head = mirror.head
        check_job_ended(mirror, 0)  # it may have been extended meanwhile
        assert mirror.status is not None
        if head is not None and not head.record.deleted:
            # From here on, every transaction of a controller that still works on the job fails its compare.
            report = await ledger.run(transactions.delete_job(mirror.keys, head, mirror.status))
        else:
            if files:
                await asyncio.to_thread(remove_folder, Path(job.run_dir), job.uid)
            named = await _named(jobs.store, job)
            report = await ledger.run(transactions.delete_rest(mirror.keys, head, mirror.status, named))
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"it is unknown whether the job was deleted ({report.why})", fix="Retry the request")
        mirror = await jobs.mirror(mirror.keys.uid)


async def _named(store: Store, job: JobRecord) -> dict[str, int]:
    """The keys outside the job's own records that refer to it, with their revisions: that of its name and that of its
    request ID. A key that now belongs to another job is left out."""
    found = {}
    for key in (keys.name(job.name, job.namespace), keys.request(job.request_id) if job.request_id else ""):
        known = await store.get(key) if key else None
        if known is not None and known.value == job.uid.encode():
            found[key] = known.mod_revision
    return found


async def request_evaluation(
    ledger: TransactionExecutor, look: Callable[[], Awaitable[JobMirror]], by: str, time: float
) -> Version:
    """Request an evaluation of the weights that the next commit produces, unless one is running or done; return the
    version of the weights. `look`: reads the job's records. Raises Conflict, StoreUnavailable."""
    for _ in range(ASK_TRIES):
        mirror = await look()
        version = _known(mirror)
        if version is not None:
            return version
        assert mirror.head is not None
        head = mirror.head
        known = mirror.written(mirror.keys.asked, mirror.askings.get(""))
        asked = EvalAsked(step=head.record.step + 1, by=by, time=time)
        report = await ledger.run(ask(mirror.keys, head, known, asked))
        if report.outcome is TxnOutcome.WON:
            return Version(head.record.lineage, asked.step)
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(
                "the store did not answer, so it is unknown whether the evaluation was requested",
                fix="Retry the request",
            )
    raise StoreUnavailable("the job's steps commit faster than the request can be written", fix="Retry the request")


def _known(mirror: JobMirror) -> Version | None:
    """The version of the weights for which no request needs to be written: head's, if it is or will be evaluated, or
    the next, if it was requested already. None otherwise. Raises Conflict if the job cannot be evaluated."""
    job = mirror.job_record
    spec = stored_spec(job.spec)
    if mirror.has_ended:
        raise JobEnded(f"job {job.name!r} has ended", fix="`gcore describe` shows its last evaluation")
    if not spec.eval.wanted:
        raise Conflict(f"job {job.name!r} has no held-out prompts", fix="Submit it with eval.path")
    if mirror.head is None:
        raise Conflict(f"job {job.name!r} has not started", fix="Retry when it has started")
    head = mirror.head.record
    over = is_over(rules_of(job), head)
    if spec.evaluates_after(head.step, last=over) or str(head.version) in mirror.evaluations:
        return head.version
    asked = mirror.asked
    if asked is not None and asked.step == head.step:  # the evaluation is running
        return head.version
    if asked is not None and asked.step == head.step + 1:
        return Version(head.lineage, asked.step)
    return None


def check_creation(request: jobs_pb2.CreateJobRequest) -> None:
    """Check the fields of a create request. Raises BadFields."""
    name = request.request_id
    if len(name) > LONGEST_REQUEST_ID or not all(c.isalnum() or c in "._:-" for c in name) or not name.isascii():
        what = f"{name[:40]!r} is not a valid request id"
        raise bad_field("request_id", what, f"Use up to {LONGEST_REQUEST_ID} letters, digits, '.', '_', ':' and '-'")
    if len(request.spec_json) > LONGEST_SPEC:
        raise bad_field("spec_json", f"is longer than {LONGEST_SPEC} characters", "Put data and models into files")
    if request.mode not in jobs_pb2.StartMode.values():
        raise bad_field("mode", f"{request.mode} is not a start mode", "Use START_MODE_RESUME or START_MODE_NEW")


class LifecycleMethods(JobsServiceBase):
    """RPCs that create, find, list, change and end jobs."""

    @handle_errors
    async def CreateJob(self, request: jobs_pb2.CreateJobRequest, context: CallContext) -> jobs_pb2.Job:
        """Create a job, or find the job that the request refers to."""
        check_creation(request)
        submissions = await self._submissions()
        # Every job has a request key, because lists of jobs are ordered by it.
        name = request.request_id or uuid.uuid4().hex
        anew, caller = request.mode == jobs_pb2.START_MODE_NEW, current_caller().name
        uid = await submissions.create(name, request.spec_json, anew, caller, request.owner_key)
        if not may_see(await self._jobs.namespace(uid)):
            raise Conflict(
                f"request id {request.request_id!r} is already used in another namespace", fix="Use a random request id"
            )
        return await self._describe(uid, quick=True)

    @handle_errors
    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: CallContext) -> jobs_pb2.Job:
        """Return one job."""
        return await self._describe(await self._find(request.job))

    @handle_errors
    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: CallContext) -> jobs_pb2.ListJobsReply:
        """List the jobs that the caller may see, newest first, one page at a time."""
        return await list_jobs(self._jobs, request)

    @handle_errors
    async def PauseJob(self, request: jobs_pb2.PauseJobRequest, context: CallContext) -> jobs_pb2.Job:
        """Pause a job: it gives its slots back at its next commit."""
        return await self._change(request.job, pause_change(yes=True))

    @handle_errors
    async def ResumeJob(self, request: jobs_pb2.ResumeJobRequest, context: CallContext) -> jobs_pb2.Job:
        """Resume a paused job."""
        return await self._change(request.job, pause_change(yes=False))

    @handle_errors
    async def UpdateJob(self, request: jobs_pb2.UpdateJobRequest, context: CallContext) -> jobs_pb2.Job:
        """Change the fields of a job that may change while it runs."""
        return await self._change(request.job, update_change(request))

    async def _change(self, name: str, change: Change) -> jobs_pb2.Job:
        uid = await self._find(name)
        if await change_claim(self._jobs.store, uid, change) is None:
            raise JobEnded(f"job {name!r} has ended", fix="`gcore retry` starts it again")
        return await self._describe(uid)

    @handle_errors
    async def DeleteJob(self, request: jobs_pb2.DeleteJobRequest, context: CallContext) -> jobs_pb2.DeleteJobReply:
        """Delete a job that has ended."""
        uid = await self._find(request.job)
        mirror, workers = await self._jobs.mirror(uid), (await self._jobs.cluster()).workers
        check_job_ended(mirror, sum(worker.job_uid == uid for worker in workers))
        await delete_job(self._jobs, mirror, files=request.files)
        return jobs_pb2.DeleteJobReply()

    @handle_errors
    async def RunEval(self, request: jobs_pb2.RunEvalRequest, context: CallContext) -> jobs_pb2.RunEvalReply:
        """Request an evaluation of the weights that the running step produces."""
        uid = await self._find(request.job)
        who, now = current_caller().name, self._clock.wall()
        version = await request_evaluation(self._jobs.ledger(uid), self._looking(uid), who, now)
        return jobs_pb2.RunEvalReply(step=version.step, lineage=version.lineage)

    @handle_errors
    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: CallContext) -> jobs_pb2.Job:
        """End a job, now or at its next commit."""
        uid = await self._find(request.job)
        if request.mode not in jobs_pb2.CancelMode.values():
            raise bad_field("mode", f"{request.mode} is not a cancel mode", "Use CANCEL_MODE_NOW or CANCEL_MODE_DRAIN")
        if request.mode == jobs_pb2.CANCEL_MODE_DRAIN:
            await change_claim(self._jobs.store, uid, end_change("cancelled on request"))
            return await self._describe(uid)
        ended = await (await self._submissions()).cancel(uid, "cancelled on request")
        try:
            return await self._describe(uid)
        except UnreadableRecord:  # the cancellation succeeded, so the call must not fail
            if ended is None:
                raise
            return jobs_pb2.Job(uid=uid, name=request.job, state=STATES[ended.phase], reason=ended.reason)


def list_shards(mirror: JobMirror) -> jobs_pb2.ListShardsReply:
    """All shards in order. Before a job has started, each is at its first prompt and has no owner."""
    shape = rules_of(mirror.job_record).shape
    assigned = mirror.assign.record if mirror.assign is not None else None
    cursors = mirror.head.record.cursors.shards if mirror.head is not None else ()
    reply = jobs_pb2.ListShardsReply()
    for shard, length in enumerate(shape.lengths):
        owner = (assigned.owner(shard) if assigned is not None and shard < len(assigned.owners) else None) or ""
        cursor = cursors[shard] if shard < len(cursors) else ShardCursor()
        epoch, seq = divmod(cursor.low_water, length) if length else (0, 0)
        reply.shards.add(
            shard=shard,
            node=node_of(owner) if owner else "",
            incarnation=owner,
            data_epoch=epoch,
            seq=seq,
            length=length,
            ahead=cursor.beyond.bit_count(),
        )
    return reply


class ReportMethods(JobsServiceBase):
    """RPCs that read a job's records and run folder, and the RPC that pins its placement."""

    @handle_errors
    async def AuditJob(self, request: jobs_pb2.AuditJobRequest, context: CallContext) -> jobs_pb2.AuditReport:
        """Audit a job."""
        uid = await self._find(request.job)
        return audit_report(await self._jobs.audit(uid))

    @handle_errors
    async def ListCheckpoints(
        self, request: jobs_pb2.ListCheckpointsRequest, context: CallContext
    ) -> jobs_pb2.ListCheckpointsReply:
        """List a job's registered checkpoints."""
        mirror = await self._mirror(request.job)
        return await list_checkpoints(mirror, await self._jobs.holders(mirror))

    @handle_errors
    async def ListShards(self, request: jobs_pb2.ListShardsRequest, context: CallContext) -> jobs_pb2.ListShardsReply:
        """List the shards with their owners and positions."""
        return list_shards(await self._mirror(request.job))

    @handle_errors
    async def GetPlacement(
        self, request: jobs_pb2.GetPlacementRequest, context: CallContext
    ) -> jobs_pb2.PlacementReply:
        """Return the placement of a job's slots."""
        return await self._placement(await self._find(request.job))

    @handle_errors
    async def PinPlacement(
        self, request: jobs_pb2.PinPlacementRequest, context: CallContext
    ) -> jobs_pb2.PlacementReply:
        """Pin a job's placement, or release it."""
        uid = await self._find(request.job)
        slots = sum(len(node.slots) for node in (await self._jobs.cluster()).nodes)
        ledger, look = self._jobs.ledger(uid), self._looking(uid)
        await write_pin(ledger, look, request, slots, self._jobs.node, self._clock.wall())
        return await self._placement(uid)

    async def _placement(self, uid: str) -> jobs_pb2.PlacementReply:
        mirror, listing = await self._jobs.mirror(uid), await self._jobs.cluster()
        return describe_placement(mirror, frozenset(node.name for node in listing.nodes))

    @handle_stream_errors
    async def GetSamples(
        self, request: jobs_pb2.GetSamplesRequest, context: CallContext
    ) -> AsyncGenerator[jobs_pb2.SampleGroup, None]:
        """Stream the samples of one step, as far as they are kept."""
        with self._room.place():
            async with aclosing(_one_by_one(await self._samples(request))) as groups:
                async for group in groups:
                    yield group

    @handle_stream_errors
    async def GetBooks(
        self, request: jobs_pb2.GetBooksRequest, context: CallContext
    ) -> AsyncGenerator[jobs_pb2.BookOfNode, None]:
        """Stream the slot accounting of a job, node by node."""
        with self._room.place():
            async with aclosing(_one_by_one(await self._books(request))) as books:
                async for book in books:
                    yield book

    # The two methods below do not keep the job's mirror in memory while the client reads the stream.

    async def _samples(self, request: jobs_pb2.GetSamplesRequest) -> Iterator[jobs_pb2.SampleGroup]:
        mirror = await self._mirror(request.job)
        await self._jobs.collect(mirror, collect_samples)
        return await find_samples(mirror, request)

    async def _books(self, request: jobs_pb2.GetBooksRequest) -> Iterator[jobs_pb2.BookOfNode]:
        mirror = await self._mirror(request.job)
        if request.HasField("step"):
            await self._jobs.collect(mirror, collect_accounts)
        return await find_accounts(mirror, request.step if request.HasField("step") else None)


async def _one_by_one(messages: Iterator[T]) -> AsyncGenerator[T, None]:
    """Yield the messages of a blocking iterator. Each one is read in a thread, and only when the client wants it."""
    while (one := await asyncio.to_thread(next, messages, None)) is not None:
        yield one


class JobsService(LifecycleMethods, StreamMethods, ReportMethods, FleetMethods, QuotaMethods):
    """Implements gcore.api.v1.Jobs."""
