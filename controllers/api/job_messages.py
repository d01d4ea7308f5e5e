"""API messages of jobs, paged job lists, and `JobsServiceBase`, the base class of the service's parts.

A job's message is built from its records in the store, or from their copy in the folder of a finished run. The job's claim on slots is a
separate record: the phases PENDING and RUNNING do not include slots, so the state in the message combines both. The daemon computes the
queue once for each change (`controllers.cluster`), not for each call.

Pages list the newest jobs first, by the creation revision of the job's request key. A page token is bound to the request's filter and the
caller's namespaces. A page may be shorter than requested, even empty; only an empty token ends the list.

A job in a namespace that the caller may not see does not exist for that caller.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import BadFields, JobNotFound, bad_field
from controllers.api.edge.server import StreamLimiter
from controllers.api.store_reader import StoreReader, UnreadableJob, check_namespace
from controllers.identity import node_of
from controllers.rules.waits import current_waits
from gcore.api.rpc import Violation
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.config.base import MOST_SLOTS
from gcore.config.load import stored_spec
from gcore.config.node import ApiConfig
from gcore.config.placement import HIGHEST_PRIORITY
from gcore.errors import SpecError, did_you_mean
from gcore.ledger import archive
from gcore.ledger.evaluation import best_evaluation
from gcore.ledger.mirror import DAMAGED, JobMirror
from gcore.ledger.records.chain import SourceTally
from gcore.ledger.records.cluster import NOTHING, PAUSES, Claim, QueuePosition, Shares, slots_of_share
from gcore.ledger.records.job import Evaluation, JobPhase
from gcore.ledger.selection import planned_steps, resumable_checkpoints, rules_of
from gcore.schema import UnreadableRecord
from gcore.system.clock import Clock

if TYPE_CHECKING:
    from controllers.api.submission.submit import Submitter
    from controllers.job.runner import JobRunner

MOST_TOLD = 2**31 - 1
"""The largest number of slots that the API's field can hold."""

UPDATABLE = ("priority", "slots_min", "slots_max")

SECTION = "scheduling."
"""Optional prefix of field names in an update mask: fields may be named as in the spec."""

Change = Callable[[Claim], Claim]

NO_QUEUE: Mapping[str, QueuePosition] = MappingProxyType({})

_GOES_ON = (pb.JOB_STATE_PENDING, pb.JOB_STATE_RUNNING)

MOST_WARNINGS = 8
"""Maximum number of warnings in a job's message; the newest are kept."""

MOST_SAID = 2000
"""Maximum characters of a warning or rollback reason."""

STATES = {
    JobPhase.PENDING: pb.JOB_STATE_PENDING,
    JobPhase.RUNNING: pb.JOB_STATE_RUNNING,
    JobPhase.SUCCEEDED: pb.JOB_STATE_SUCCEEDED,
    JobPhase.FAILED: pb.JOB_STATE_FAILED,
    JobPhase.CANCELLED: pb.JOB_STATE_CANCELLED,
}

ENDED = frozenset({pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_CANCELLED})

DEFAULT_SIZE, MOST_ON_A_PAGE = 100, 1000

MOST_LOOKED_AT = 2000
"""Maximum number of jobs that one call reads. A filter may match few of very many jobs."""

MOST_BYTES = 16 << 20
"""Maximum size of a page in bytes: a page ends with the job that reaches it. Specs may be long, and gRPC rejects too large responses."""

AT_ONCE = 32
"""How many jobs are read from the store concurrently."""

LONGEST_FILTER = 256

_AGAIN = "Request the first page again, without a token"

LONGEST_NAME = 256
"""Maximum characters of a job's name, uid or namespace in a request."""


def pause_change(*, yes: bool) -> Change:
    """Return a function that changes a job's claim on slots: it pauses the job (the job then gives its slots back) or
    resumes it."""
    return lambda claim: claim.model_copy(update={"paused": yes})


def end_change(reason: str) -> Change:
    """Return a function that changes a job's claim on slots: it makes the job end at its next commit."""
    return lambda claim: claim if claim.ends else claim.model_copy(update={"ends": reason})


def update_change(request: pb.UpdateJobRequest) -> Change:
    """Return a function that changes a job's claim on slots as an update request asks: the fields that the request's
    mask names. Raises BadFields."""
    paths = [path.removeprefix(SECTION) for path in request.update_mask.paths]
    if not paths:
        raise bad_field("update_mask", "is empty", f"Name at least one of {', '.join(UPDATABLE)}")
    wrong = [
        Violation("update_mask", f"{path[:60]!r} cannot be changed while a job runs{did_you_mean(path, UPDATABLE)}")
        for path in dict.fromkeys(paths)
        if path not in UPDATABLE
    ]
    if "priority" in paths and not -HIGHEST_PRIORITY <= request.priority <= HIGHEST_PRIORITY:
        wrong.append(
            Violation("priority", f"{request.priority} is not between -{HIGHEST_PRIORITY} and {HIGHEST_PRIORITY}")
        )
    if "slots_min" in paths and not 1 <= request.slots_min <= MOST_SLOTS:
        wrong.append(Violation("slots_min", f"{request.slots_min} is not a valid number of slots"))
    if "slots_max" in paths and not 0 <= request.slots_max <= MOST_SLOTS:
        wrong.append(Violation("slots_max", f"{request.slots_max} is not a valid number of slots (0 means no limit)"))
    if wrong:
        raise BadFields(wrong)

    def change(claim: Claim) -> Claim:
        new: dict[str, int | None] = {}
        if "priority" in paths:
            new["priority"] = request.priority
        if "slots_min" in paths:
            new["least"] = -(-request.slots_min // claim.unit) * claim.unit  # round up to whole engines
        if "slots_max" in paths:
            new["most"] = request.slots_max or None
        made = claim.model_copy(update=new)
        if made.most is not None and made.most < made.least:
            raise bad_field(
                "slots_max" if "slots_max" in paths else "slots_min",
                f"slots_max {made.most} is less than slots_min {made.least}",
                "Lower slots_min, or raise slots_max",
            )
        return made

    return change


def add_claim(
    message: pb.Job, claim: Claim | None, shares: Shares | None, queue: Mapping[str, QueuePosition] = NO_QUEUE
) -> pb.Job:
    """Add the job's claim and slots to its message. `claim` None: the job has ended. `shares` None: slots are not divided between jobs yet,
    because the cluster has a daemon of an earlier version."""
    if claim is None:
        return message
    # A claim of an earlier version may hold any number; one that overflows the field would break the whole list.
    least, most = min(claim.least, MOST_TOLD), min(claim.most or 0, MOST_TOLD)
    message.priority, message.slots_min, message.slots_max = claim.priority, least, most
    if shares is None:
        return message
    share = shares.jobs.get(message.uid, NOTHING)
    granted, held = len(slots_of_share(share.granted)), len(slots_of_share(share.held))
    message.slots = granted
    if message.state not in _GOES_ON:
        return message
    waits = queue.get(message.uid) if not granted else None
    message.queue_position = waits.position if waits is not None else 0
    why = waits.reason if waits is not None else ""
    message.state, message.reason = job_status(message.state, message.reason, claim, why, granted, held)
    return message


def waits_for_slots(claim: Claim | None, shares: Shares | None, uid: str) -> bool:
    """Whether a job waits for slots. Only then is its queue position computed."""
    if claim is None or shares is None or not claim.wants:
        return False
    return not slots_of_share(shares.jobs.get(uid, NOTHING).granted)


def job_status(
    state: pb.JobState, reason: str, claim: Claim, why: str, granted: int, held: int
) -> tuple[pb.JobState, str]:
    """The state and reason that users see of a job that has not ended. `state` and `reason`: those of its phase, which
    do not include slots. `why`: why it waits for slots; `granted` and `held`: its slots by the shares, and those that
    it still uses."""
    leaves = f"; it still has to release {held} slots" if held else ""
    if claim.ends:
        return state, f"the job ends at its next commit ({claim.ends}){leaves}"
    if claim.paused:
        return (state if held else pb.JOB_STATE_PAUSED), (f"{PAUSES}{leaves}" if held else "paused")
    if not granted and not held:
        return pb.JOB_STATE_QUEUED, why or f"waiting for {claim.least} {'slot' if claim.least == 1 else 'slots'}"
    if not granted:
        return state, f"the job gives its slots to other jobs at its next commit{leaves}"
    return state, reason


def slot_users(shares: Shares, namespaces: Mapping[str, str], sees: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """Which job uses each slot, by node and slot. For a job that the caller may not see, the text is empty."""
    found: dict[str, dict[str, str]] = {}
    for uid, share in shares.jobs.items():
        shown = uid if sees(namespaces.get(uid, "")) else ""
        for node, slot in slots_of_share(share.held):
            found.setdefault(node, {})[slot] = shown
    return found


def source_reports(mirror: JobMirror) -> list[pb.SourceReport]:
    """A report for every known source, sorted by name."""
    tallies = mirror.head.record.tally.sources if mirror.head is not None else {}
    evaluation = newest_evaluation(mirror)
    scores = evaluation.by_source if evaluation is not None else {}
    shown_only = mirror.job is not None and mirror.job.record.spec.get("train", {}).get("loss") == "sft"
    reports = []
    for name in sorted(tallies.keys() | scores.keys()):
        tally = tallies.get(name, SourceTally())
        report = pb.SourceReport(name=name, trained=tally.kept, filtered=tally.filtered, failed=tally.failed)
        if tally.kept and not shown_only:  # demonstrations are not scored
            report.mean_reward = tally.reward / tally.kept
        if tally.samples:
            report.mean_length = tally.tokens / tally.samples
            report.truncated = tally.truncated / tally.samples
        if name in scores:
            score = scores[name]
            report.accuracy = score.accuracy
            report.metrics.update(score.metrics)
            report.eval_samples, report.eval_unscored = score.samples, score.unscored
        reports.append(report)
    return reports


def best_checkpoint(mirror: JobMirror, metric: str | None) -> pb.BestCheckpoint | None:
    """The committed weights with the best value of `metric` in an evaluation, and their checkpoint if there is one;
    None without an evaluation."""
    if mirror.job is None or mirror.head is None:
        return None
    head, evaluations = mirror.head.record, [stored.record for stored in mirror.evaluations.values()]
    best = best_evaluation(head, evaluations, metric)
    if best is None:
        return None
    known = mirror.checkpoints.record.entries if mirror.checkpoints is not None else ()
    file = next((c.file for c in resumable_checkpoints(head, known) if c.step == best.version.step and c.file), "")
    return pb.BestCheckpoint(
        step=best.version.step,
        lineage=best.version.lineage,
        metric=best.metric,
        value=best.value,
        checkpoint=f"{mirror.job.record.run_dir}/{file}" if file else "",
    )


def newest_evaluation(mirror: JobMirror) -> Evaluation | None:
    """The most recently stored evaluation."""
    newest = max(mirror.evaluations.values(), key=lambda stored: stored.revision, default=None)
    return newest.record if newest is not None else None


def describe_run(run_dir: Path) -> pb.Job | None:
    """The message of a run that has ended, from the copy of its records in `run_dir`, with paths in that folder; None without a copy.

    Raises UnreadableRecord, OSError.
    """
    copy = archive.read_copy(run_dir)
    if copy is None:
        return None
    message = describe_job(archive.mirror_of(copy.uid, copy.batch))
    for shown in (message, message.best) if message.HasField("best") else (message,):
        shown.checkpoint = shown.checkpoint.replace(message.run_dir, str(run_dir), 1)
    message.run_dir = str(run_dir)
    return message


def describe_job(mirror: JobMirror) -> pb.Job:
    """The job's message from its records, without waits, which only a controller that works on the job knows.

    Raises UnreadableRecord if a record is missing or this version cannot read its spec.
    """
    if mirror.job is None or mirror.status is None:
        absent = mirror.keys.job if mirror.job is None else mirror.keys.state
        raise UnreadableRecord("the store has lost a record of the job", where=absent, fix=DAMAGED)
    job, status = mirror.job.record, mirror.status.record
    try:
        spec = stored_spec(job.spec)
    except SpecError as error:
        raise UnreadableRecord(error.what, where=error.where, fix=DAMAGED) from error
    message = pb.Job(
        uid=job.uid,
        name=job.name,
        state=STATES[status.phase],
        reason=status.reason,
        spec_json=json.dumps(job.spec),
        run_dir=job.run_dir,
        namespace=job.namespace,
        owner=job.owner,
        created=job.created,
        steps=_planned_steps(mirror),
        ended=status.changed if status.phase.ended else 0.0,
    )
    if mirror.head is not None:
        message.step = mirror.head.record.step
        message.lineage = mirror.head.record.lineage
    if mirror.assign is not None:
        for member in mirror.assign.record.members:
            shards = mirror.assign.record.shards_of(member)
            message.shares.add(node=node_of(member), incarnation=member, shards=shards)
    message.sources.extend(source_reports(mirror))
    best = best_checkpoint(mirror, spec.best_metric)
    if best is not None:
        message.best.CopyFrom(best)
    newest = _newest_checkpoint(mirror)
    if newest is not None:
        message.checkpoint = f"{job.run_dir}/{newest}"
    return message


def add_news(message: pb.Job, mirror: JobMirror) -> pb.Job:
    """Add the newest warnings and the newest rollback to a job's message, for clients that do not watch events."""
    newest = sorted(mirror.troubles.values(), key=lambda stored: (stored.record.time, stored.revision), reverse=True)
    for trouble in (stored.record for stored in newest[:MOST_WARNINGS]):
        sentence = trouble.sentence[:MOST_SAID]
        message.warnings.add(topic=trouble.topic, node=trouble.node, sentence=sentence, time=trouble.time)
    last = max((seq for seq, stored in mirror.log.items() if stored.record.kind == "rollback"), default=None)
    if last is not None:
        entry = mirror.log[last].record
        rollback = pb.LastRollback(step=entry.step, lineage=entry.lineage, reason=entry.reason[:MOST_SAID])
        message.rollback.CopyFrom(rollback)
    return message


def _planned_steps(mirror: JobMirror) -> int:
    """The planned number of steps; an estimate for a job that counts epochs. 0: unknown yet."""
    rules = rules_of(mirror.job_record)
    if mirror.head is None:
        return rules.steps or 0
    return planned_steps(rules, mirror.head.record) or 0


def _newest_checkpoint(mirror: JobMirror) -> str | None:
    if mirror.head is None or mirror.checkpoints is None:
        return None
    on_chain = resumable_checkpoints(mirror.head.record, mirror.checkpoints.record.entries)
    return next((c.file for c in on_chain if c.file), None)


async def add_queue_positions(
    jobs: StoreReader, messages: Sequence[pb.Job], shares: Shares | None, *, quick: bool = False
) -> None:
    """Add the claim, slots and queue position to each message. `quick`: skip the queue position. Raises StoreUnavailable."""
    going_on = [message for message in messages if message.state not in ENDED]
    claims = await asyncio.gather(*(jobs.claim(message.uid) for message in going_on))
    found = [(message, claim) for message, claim in zip(going_on, claims, strict=True) if claim is not None]
    waiting = [claim for message, claim in found if waits_for_slots(claim.record, shares, message.uid)]
    queue: Mapping[str, QueuePosition] = await jobs.queue(*waiting) if waiting and not quick else {}
    for message, claim in found:
        add_claim(message, claim.record, shares, queue)


@dataclass(frozen=True, slots=True)
class JobQuery:
    """The filter of a list request. `namespaces`: those that are listed; None: all."""

    size: int
    before: int | None
    namespace: str
    states: frozenset[int]
    name_prefix: str
    namespaces: frozenset[str] | None

    def has(self, job: pb.Job) -> bool:
        """Whether the query matches a job."""
        namespace = (
            job.namespace
        )  # empty if the record is unreadable; then only callers with access to all namespaces see it
        return (
            (self.namespaces is None or namespace in self.namespaces)
            and (not self.namespace or namespace == self.namespace)
            and (not self.states or job.state in self.states)
            and job.name.startswith(self.name_prefix)
        )

    @property
    def binding(self) -> str:
        """A digest of the filter. A page token contains it, so that a token cannot be used with another filter."""
        seen = None if self.namespaces is None else sorted(self.namespaces)
        said = json.dumps(["ListJobs", self.namespace, sorted(self.states), self.name_prefix, seen])
        return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()[:16]

    def token(self, before: int) -> str:
        """The token for the next page."""
        return base64.urlsafe_b64encode(json.dumps([before, self.binding]).encode()).decode()


def parse_query(request: pb.ListJobsRequest, namespaces: frozenset[str] | None) -> JobQuery:
    """Parse a list request. Raises BadFields."""
    if request.page_size < 0:
        raise bad_field("page_size", f"{request.page_size} is negative", f"Ask for 1 to {MOST_ON_A_PAGE}, or 0 for 100")
    for field in ("namespace", "name_prefix"):
        if len(getattr(request, field)) > LONGEST_FILTER:
            raise bad_field(field, f"is longer than {LONGEST_FILTER} characters")
    unknown = [state for state in request.states if state not in pb.JobState.values() or not state]
    if unknown:
        known = ", ".join(name for name, number in pb.JobState.items() if number)
        raise bad_field("states", f"{unknown[0]} is not a job state", f"Use {known}")
    size = min(request.page_size or DEFAULT_SIZE, MOST_ON_A_PAGE)
    first = JobQuery(size, None, request.namespace, frozenset(request.states), request.name_prefix, namespaces)
    if not request.page_token:
        return first
    before = _begin(request.page_token, first.binding)
    return JobQuery(size, before, first.namespace, first.states, first.name_prefix, namespaces)


def _begin(token: str, binding: str) -> int:
    """Read a page token: the page contains jobs that were created before this store revision. Raises BadFields if the
    token is malformed or belongs to a list with another filter."""
    wrong = bad_field("page_token", "is not a page token of this API", _AGAIN)
    try:
        tree = json.loads(base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as error:
        raise wrong from error
    match tree:
        case [int(before), str(bound)] if 0 < before < 2**63 and not isinstance(before, bool):
            if bound != binding:
                raise bad_field("page_token", "belongs to a list with other filters or of another caller", _AGAIN)
            return before
    raise wrong


async def list_jobs(jobs: StoreReader, request: pb.ListJobsRequest) -> pb.ListJobsReply:
    """Return one page. Raises BadFields, NamespaceNotFound, StoreUnavailable."""
    ask, shares = parse_query(request, current_caller().namespaces), await jobs.shares()
    found: list[pb.Job] = []
    before, looked, taken = ask.before, 0, 0
    while True:
        limit = min(max(ask.size, AT_ONCE), MOST_LOOKED_AT - looked)
        named = await jobs.newest(limit, before)
        for start in range(0, len(named), AT_ONCE):
            some = named[start : start + AT_ONCE]
            read = await asyncio.gather(*(jobs.summary(uid) for uid, _ in some))
            summaries = [None if one is None else summarize_job(one) for one in read]
            await add_queue_positions(jobs, [job for job in summaries if job is not None], shares)
            for (_, revision), job in zip(some, summaries, strict=True):
                looked, before = looked + 1, revision
                if job is not None and ask.has(job):
                    found.append(job)
                    taken += job.ByteSize()
                if len(found) == ask.size or looked == MOST_LOOKED_AT or taken >= MOST_BYTES:
                    return pb.ListJobsReply(jobs=found, next_page_token=ask.token(revision))
        if len(named) < limit:
            if ask.namespace and not found and ask.before is None:
                await check_namespace(jobs.store, ask.namespace)
            return pb.ListJobsReply(jobs=found)


def summarize_job(one: JobMirror | UnreadableJob) -> pb.Job:
    """The job's message in a list; a job with an unreadable record has the state UNSPECIFIED."""
    if isinstance(one, JobMirror):
        try:
            return describe_job(one)
        except UnreadableRecord as error:
            name = "" if one.job is None else one.job.record.name
            one = UnreadableJob(one.keys.uid, name, str(error))
    return pb.Job(uid=one.uid, name=one.name, state=pb.JOB_STATE_UNSPECIFIED, reason=one.why)


class JobsServiceBase(jobs_pb2_grpc.JobsServicer):
    """Base class of the classes that implement the RPCs of `Jobs`: the store, the clock, the mirrors and the limits
    that they use."""

    def __init__(
        self,
        jobs: StoreReader,
        submissions: Callable[[], Awaitable[Submitter]],
        runner: Callable[[str], JobRunner | None],
        clock: Clock,
        trouble: Callable[[], str] = str,
        room: StreamLimiter | None = None,
    ) -> None:
        """`trouble`: returns the known reason why the store is unavailable, or nothing. `room`: limits streams; None: the default limit."""
        self.trouble = trouble
        self._jobs = jobs
        self._submissions = submissions
        self._runner = runner
        self._clock = clock
        self._room = room or StreamLimiter(ApiConfig().streams)

    async def _find(self, name: str) -> str:
        """The uid of the job that a request names. Raises JobNotFound, BadFields, StoreUnavailable."""
        if not name:
            raise bad_field("job", "is empty", "Give the job's uid, NAMESPACE/NAME or NAME")
        if len(name) > LONGEST_NAME:
            raise bad_field(
                "job", f"{name[:40]!r}... is longer than {LONGEST_NAME} characters", "`gcore list` shows the jobs"
            )
        uid = await self._jobs.find(name, current_caller().home)
        namespace = "" if uid is None else await self._jobs.namespace(uid)
        if uid is None or not may_see(namespace):
            raise JobNotFound(f"there is no job {name!r}", fix="`gcore list` shows the jobs")
        if not namespace:
            await self._jobs.check_record(uid)
        return uid

    async def _mirror(self, name: str) -> JobMirror:
        """The current records of the job that a request names."""
        return await self._jobs.mirror(await self._find(name))

    async def _describe(self, uid: str, *, quick: bool = False) -> pb.Job:
        """The job's message. `quick`: without its queue position, which may take a while to compute."""
        mirror = await self._jobs.mirror(uid)
        message = add_news(describe_job(mirror), mirror)
        await add_queue_positions(self._jobs, [message], await self._jobs.shares(), quick=quick)
        runner = self._runner(uid)
        if runner is not None and runner.is_working:
            now, wall = self._clock.monotonic(), self._clock.wall()
            for wait in current_waits(runner.look()):
                since = wall - (now - runner.waits.since.get(wait.key, now))
                message.waiting.add(who=runner.node, what=wait.what, since=since, cause=wait.cause)
        return message

    def _looking(self, uid: str) -> Callable[[], Awaitable[JobMirror]]:
        return functools.partial(self._jobs.mirror, uid)
