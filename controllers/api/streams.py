"""The Jobs service's streams: events, step metrics and logs.

A stream takes a few items at a time from the daemon's memory and reads more when its client has received them.

Step metrics follow the order of the chain: old steps come from the run's folder, the others from the log. They are ordered by lineage and
step, so a stream can resume after any step, also across a rollback. A metric's name is unknown if it is neither in the catalogue nor in
any step so far; before the first step every name is accepted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.api.edge.errors import BadFields, CallContext, bad_field, handle_stream_errors
from controllers.api.job_messages import JobsServiceBase, waits_for_slots
from controllers.api.logs import (
    LogStream,
    Source,
    WorkerLog,
    check_log_names,
    check_log_request,
    log_names,
    merge_logs,
    peer_logs,
    select_logs,
)
from controllers.storage.run_folder import collect_records
from controllers.telemetry.events import Event, EventLog
from gcore.api.rpc import Violation
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import StoreUnavailable, did_you_mean, explain_os_errors
from gcore.ledger.archive import ArchivedLog
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry
from gcore.observability.metrics_file import finite_numbers
from gcore.observability.step_metrics import STEP_STATS
from gcore.store.keys import JobKeys

if TYPE_CHECKING:
    from controllers.job.runner import JobRunner

MOST_NAMES = 256

KINDS = ("trained", "filtered", "failed")

COUNTS = ("groups", "filtered", "failed")
"""The names in the API of the metrics that count a step's groups, in the order of `KINDS`."""

LOOK_S, LOOKS = 0.25, 8
"""For a job that waits for slots: seconds between checks whether a controller works on it, and checks until its records are read again."""

AT_ONCE = 256
"""Events or steps taken at once. A slow client delays the removal of at most this many."""

SOON_S, LATER_S = 0.05, 1.0
"""Shortest and longest delay between checks whether this controller works on a job that should run."""

UNKNOWN_TIME = 0.0
"""Time of an event that this controller did not see happen."""

CATCH_UP_S = 20.0
"""Seconds for which a stream waits until this controller works on the job; then it fails."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position after which a stream of steps resumes. `lineage` None: steps of any lineage with a greater number."""

    step: int
    lineage: int | None = None

    def is_before(self, entry: LogEntry) -> bool:
        """Whether the entry's step comes after the position."""
        if self.lineage is None:
            return entry.step > self.step
        return (entry.lineage, entry.step) > (self.lineage, self.step)


def parse_position(request: pb.StreamMetricsRequest) -> StreamPosition:
    """The start position of a stream. Raises BadFields."""
    wrong = []
    if request.after_step < 0:
        wrong.append(Violation("after_step", f"{request.after_step} is negative"))
    if request.HasField("after_lineage") and request.after_lineage < 0:
        wrong.append(Violation("after_lineage", f"{request.after_lineage} is negative"))
    if len(request.names) > MOST_NAMES:
        wrong.append(Violation("names", f"has more than {MOST_NAMES} names"))
    if wrong:
        raise BadFields(wrong)
    return StreamPosition(request.after_step, request.after_lineage if request.HasField("after_lineage") else None)


def stored_steps(mirror: JobMirror, behind: StreamPosition) -> Iterator[LogEntry]:
    """The steps in the store's log after a position, in order."""
    for seq in sorted(mirror.log):
        entry = mirror.log[seq].record
        if entry.kind == "train" and behind.is_before(entry):
            yield entry


def all_steps(run_dir: Path, log: Mapping[int, LogEntry], behind: StreamPosition) -> Iterator[LogEntry]:
    """All steps after a position, including those that only the run's folder has. Raises GcoreError. Blocks on the disk."""
    with explain_os_errors("the run's folder cannot be read", where=run_dir):
        archived = ArchivedLog(run_dir, log)
        for seq in sorted(archived):
            entry = archived.get(seq)
            if entry is not None and entry.kind == "train" and behind.is_before(entry):
                yield entry


def has_no_values(names: Collection[str], entries: Iterable[LogEntry]) -> bool:
    """Check the names of metrics that a client requests against those of the steps in `entries`. Raises BadFields for
    an unknown name. Returns whether some names are still unchecked because there is no step. Blocks if iterating
    `entries` blocks."""
    asked = set(names) - STEP_STATS.keys() - set(COUNTS)
    reported: set[str] = set()
    for entry in entries if asked else ():
        reported |= finite_numbers(entry.stats).keys()
        if asked <= reported:
            return False
    if asked and reported and (unknown := sorted(asked - reported)):
        near = did_you_mean(unknown[0], reported | STEP_STATS.keys() | set(COUNTS))
        raise bad_field(
            "names",
            f"{unknown[0][:80]!r} is not a metric of this job's steps so far{near}",
            "Leave out names to get all metrics",
        )
    return bool(asked)


def step_message(entry: LogEntry, names: Collection[str]) -> pb.StepMetrics:
    """Convert the log entry of a step to a message with its metrics. `names`: the requested metrics; empty: all."""
    kinds = (float(sum(one.kind == kind for one in entry.delta)) for kind in KINDS)
    values = {**finite_numbers(entry.stats), **dict(zip(COUNTS, kinds, strict=True))}
    chosen = {name: value for name, value in values.items() if (not names or name in names) and math.isfinite(value)}
    return pb.StepMetrics(lineage=entry.lineage, step=entry.step, values=chosen)


class StreamMethods(JobsServiceBase):
    """Implements the streams of Jobs: events, steps, logs. Each ends with the job."""

    @handle_stream_errors
    async def WatchJob(self, request: pb.WatchJobRequest, context: CallContext) -> AsyncGenerator[pb.JobEvent, None]:
        """Stream a job's events after a number; ends with the job."""
        with self._room.place():
            uid = await self._find(request.job)
            if request.after < 0:
                raise bad_field("after", f"{request.after} is negative", "Give an event's number, or 0")
            followed = self._follow(uid, request.after, newest=request.newest, once=request.once)
            async with aclosing(followed) as events:
                async for event in events:
                    yield pb.JobEvent(
                        sequence=event.sequence,
                        time=event.time,
                        kind=event.kind,
                        message=event.message,
                        data_json=event.data_json,
                    )

    @handle_stream_errors
    async def StreamMetrics(
        self, request: pb.StreamMetricsRequest, context: CallContext
    ) -> AsyncGenerator[pb.StepMetrics, None]:
        """Stream the metrics of a job's steps as they are committed."""
        place, names = parse_position(request), frozenset(request.names)
        with self._room.place():
            uid = await self._find(request.job)
            async with aclosing(self._steps(uid, place, names, follow=request.follow)) as steps:
                async for entry in steps:
                    yield step_message(entry, names)

    @handle_stream_errors
    async def StreamLogs(self, request: pb.StreamLogsRequest, context: CallContext) -> AsyncGenerator[pb.LogLine, None]:
        """Stream the logs of a job's workers."""
        check_log_request(request)
        with self._room.place():
            sources = await self._logs(await self._find(request.job), request)
            if request.places:
                yield pb.LogLine(mark=pb.LOG_MARK_BEGIN)
            async with aclosing(merge_logs(sources)) as lines:
                async for line in lines:
                    yield line
            if request.places:
                yield pb.LogLine(mark=pb.LOG_MARK_END)

    async def _logs(self, uid: str, request: pb.StreamLogsRequest) -> list[Source]:
        """The sources of the logs: this controller, and its peers if nodes share no folder."""
        mirror, me = await self._jobs.mirror(uid), self._jobs.node
        here = LogStream(self._looking_for_logs(uid, request), request, self._clock).lines
        await self._check_named(uid, mirror, request)
        if request.node == me or not self._jobs.is_apart(mirror):
            return [here]
        peers = await self._jobs.peers()
        others = {name: at for name, at in peers.items() if request.node in ("", name)}
        # A job's name is resolved in the caller's namespace, and the caller of a peer is this daemon, so the uid is sent.
        ask = pb.StreamLogsRequest()
        ask.CopyFrom(request)
        ask.job = uid
        far = [peer_logs(self._jobs.connector, name, at, ask) for name, at in sorted(others.items())]
        return far if request.node else [here, *far]

    async def _check_named(self, uid: str, mirror: JobMirror, request: pb.StreamLogsRequest) -> None:
        """Raise NotFound for an unknown node or worker."""
        if not request.node and not request.instance:
            return
        listing, apart = await self._jobs.cluster(), self._jobs.is_apart(mirror)
        names = await asyncio.to_thread(log_names, mirror.run_dir)
        workers = [worker.instance for worker in listing.workers if worker.job_uid == uid]
        nodes = [node.name for node in listing.nodes]
        # If nodes share no folder, this node cannot see the logs of ended workers on other nodes.
        check_log_names(request, nodes, workers, names=[] if apart else names, whole=not apart)

    def _looking_for_logs(
        self, uid: str, request: pb.StreamLogsRequest
    ) -> Callable[[], Awaitable[tuple[Sequence[WorkerLog], bool]]]:
        async def look() -> tuple[Sequence[WorkerLog], bool]:
            runner = self._runner(uid)
            known = runner is not None and runner.mirror.job is not None and runner.mirror.status is not None
            mirror = runner.mirror if request.follow and runner is not None and known else await self._jobs.mirror(uid)
            listing = await self._jobs.cluster()
            run_dir = mirror.run_dir
            names = await asyncio.to_thread(log_names, run_dir)
            workers = {worker.instance: worker for worker in listing.workers}
            return select_logs(names, run_dir, mirror, workers, request), mirror.has_ended

        return look

    async def _steps(
        self, uid: str, place: StreamPosition, names: Collection[str], *, follow: bool
    ) -> AsyncGenerator[LogEntry, None]:
        mirror = await self._jobs.mirror(uid)
        await self._jobs.collect(mirror, collect_records)
        log = {seq: one.record for seq, one in mirror.log.items()}
        run_dir = mirror.run_dir
        in_doubt = await asyncio.to_thread(has_no_values, names, all_steps(run_dir, log, StreamPosition(0)))
        before = all_steps(run_dir, log, place)
        while some := await asyncio.to_thread(list, islice(before, AT_ONCE)):
            for entry in some:
                place = StreamPosition(entry.step, entry.lineage)
                yield entry
        runner = await self._settled(uid) if follow else None
        while runner is not None:
            seen, over = runner.changes.count, runner.closed or runner.mirror.has_ended
            for entry in islice(stored_steps(runner.mirror, place), AT_ONCE):
                place = StreamPosition(entry.step, entry.lineage)
                in_doubt = in_doubt and has_no_values(names, [entry])
                yield entry
            if over and next(stored_steps(runner.mirror, place), None) is None:
                return
            if not over and runner.changes.count == seen:
                await runner.changes.wait()

    async def _follow(
        self, uid: str, after: int, *, newest: int = 0, once: bool = False
    ) -> AsyncGenerator[Event, None]:
        goes_on = after > 0
        while True:
            runner = await self._settled(uid)
            log = runner.telemetry.events if runner is not None else await self._history(uid)
            if newest and len(known := log.after(after, goes_on=goes_on)) > newest:
                after = known[-newest - 1].sequence
            newest = 0
            if runner is None or once:
                for event in log.after(after, goes_on=goes_on):
                    after, goes_on = event.sequence, True
                    yield event
                if once or (runner is None and not await self._waits(uid)):
                    return
                continue
            # Read before the events, so that changes during sending cause another round.
            seen, over, ended = runner.changes.count, runner.closed, runner.mirror.has_ended
            some = log.after(after, goes_on=goes_on)[:AT_ONCE]
            for event in some:
                after, goes_on = event.sequence, True
                yield event
            if len(some) == AT_ONCE:
                continue
            if ended or over:
                return
            if runner.changes.count == seen:
                await runner.changes.wait()

    async def _waits(self, uid: str) -> bool:
        """Wait for a while, or until this controller works on the job. Return False if the job has ended."""
        for _ in range(LOOKS):
            if self._runner(uid) is not None:
                return True
            await self._clock.sleep(LOOK_S)
        return not (await self._jobs.mirror(uid)).has_ended

    async def _settled(self, uid: str) -> JobRunner | None:
        """The runner of a job on this controller. Waits if the job is new and its runner will soon start. None: the job
        waits for slots, or has ended without one. Raises StoreUnavailable."""
        end, rest = self._clock.monotonic() + CATCH_UP_S, SOON_S
        while self._clock.monotonic() < end:
            runner = self._runner(uid)
            if runner is not None and not runner.closed:
                return runner
            mirror = await self._jobs.mirror(uid)
            if mirror.status is None or mirror.has_ended:
                return runner
            claim = await self._jobs.claim(uid)
            if claim is not None and not claim.record.wants:
                return None
            if claim is not None and waits_for_slots(claim.record, await self._jobs.shares(), uid):
                return None
            await self._clock.sleep(rest)
            rest = min(2 * rest, LATER_S)
        raise StoreUnavailable(f"this controller has not started to work on job {uid} yet", fix="Retry the request")

    async def _history(self, uid: str) -> EventLog:
        """The events of a job on which no controller works, from its records, which do not say when they were written."""
        keys = JobKeys(uid)
        batch = await self._jobs.batch(uid)
        history = EventLog(keys)
        history.note(JobMirror(keys), batch, JobMirror(keys).fold(batch), UNKNOWN_TIME)
        return history
