"""What the page shows: the cluster's jobs, and one of them. Read from the store, from this controller's runner of a job that has not
ended, and from the ends of the files in the run's folder.

Whoever asks is told of the jobs in the namespaces that are theirs; any other is not there. Samples, specs and logs are shown nowhere on the
page. Writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controllers.page import curves, timeline
from controllers.page.kept import Kept
from controllers.service.access import caller, may_see
from controllers.service.described import described, with_news
from controllers.service.events import Event, EventLog
from controllers.service.listing import list_jobs
from controllers.service.queued import stand
from controllers.service.records import StoredJobs
from controllers.service.refusals import NotFound
from controllers.waiting import waiting_for
from gcore.api.v1 import jobs_pb2 as pb
from gcore.clock import Clock
from gcore.config.node import EVERY_ADDRESS
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import Move
from gcore.store.keys import DEFAULT_NAMESPACE, JobKeys, full_name
from placement.move_words import in_words, numbers_in_words, outcome_in_words

if TYPE_CHECKING:  # imported when there is a job: see controllers.wire
    from controllers.job import JobRunner

MOST_JOBS = 200
MOST_EVENTS = 200
MOST_SAID = 2000
"""Characters of one event's message."""
LIST_ANEW_S = 5.0
"""So long is a list of the jobs good: it takes reading the records of each."""
Tree = dict[str, Any]


class Shown:
    """Of one controller. Raises NotFound, StoreUnavailable."""

    def __init__(self, node: str, jobs: StoredJobs, runner: Callable[[str], JobRunner | None], clock: Clock) -> None:
        self._node = node
        self._jobs = jobs
        self._runner = runner
        self._clock = clock
        self._listed: dict[frozenset[str] | None, tuple[float, pb.ListJobsReply]] = {}
        self._listing = asyncio.Lock()
        self._curves = Kept(curves.stamp, curves.read)
        self._timelines = Kept(timeline.stamp, timeline.read)

    async def cluster(self) -> Tree:
        """All jobs, the newest first, with who is there."""
        listing, known = await asyncio.gather(self._jobs.cluster(), self._list())
        return {
            "node": self._node,
            "time": self._clock.wall(),
            "nodes": [{"name": node.name, "slots": len(node.slots)} for node in listing.nodes],
            "jobs": [_told(one) for one in known.jobs],
            "more": bool(known.next_page_token),
        }

    async def targets(self) -> list[Tree]:
        """Where every controller serves its metrics, as Prometheus asks for it (`http_sd_configs`)."""
        nodes = (await self._jobs.cluster()).nodes
        return [
            {"targets": [reached_at(one.metrics_address, one.address)], "labels": {"node": one.name}}
            for one in nodes
            if one.metrics_address
        ]

    async def _list(self) -> pb.ListJobsReply:
        """The newest jobs of whoever asks, as of a moment ago."""
        mine = caller().namespaces
        async with self._listing:
            now = self._clock.monotonic()
            self._listed = {one: known for one, known in self._listed.items() if now - known[0] < LIST_ANEW_S}
            if mine not in self._listed:
                self._listed[mine] = now, await list_jobs(self._jobs, pb.ListJobsRequest(page_size=MOST_JOBS))
            return self._listed[mine][1]

    async def job(self, uid: str, after: int) -> Tree:
        """One job, with the newest of its events after a number."""
        mirror = await self._mirror(uid)
        assert mirror.job is not None
        message = await self._standing(with_news(described(mirror), mirror))
        folder = Path(mirror.job.record.run_dir)
        drawn: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):
            drawn = asdict(await asyncio.to_thread(self._curves.of, folder))
        return {
            **_told(message),
            "node": self._node,
            "time": self._clock.wall(),
            "waiting": self._waiting(uid),
            "warnings": [{"sentence": one.sentence, "node": one.node, "time": one.time} for one in message.warnings],
            "curves": drawn,
            "split": _split(mirror),
            "moves": [_move(one) for one in reversed(mirror.moves.moves)],
            "events": [_event(one) for one in (await self._events(uid, after))[-MOST_EVENTS:]],
        }

    async def _standing(self, message: pb.Job) -> pb.Job:
        """With what the job has of the cluster's slots, and why it waits for some."""
        await stand(self._jobs, [message], await self._jobs.shares())
        return message

    async def slots(self, uid: str) -> Tree:
        """What the slots of a job did in the newest steps."""
        mirror = await self._mirror(uid)
        assert mirror.job is not None
        try:
            found = await asyncio.to_thread(self._timelines.of, Path(mirror.job.record.run_dir))
        except OSError:
            found = timeline.Timeline()
        return found.tree()

    async def _mirror(self, uid: str) -> JobMirror:
        runner = self._runner(uid)
        known = runner is not None and runner.mirror.job is not None and runner.mirror.status is not None
        mirror = runner.mirror if runner is not None and known else await self._jobs.mirror(uid)
        if mirror.job is None or not may_see(_namespace(mirror)):
            raise NotFound(f"there is no job {uid[:40]!r}", fix="The page's list shows the jobs there are")
        return mirror

    def _waiting(self, uid: str) -> list[Tree]:
        runner = self._runner(uid)
        if runner is None or not runner.is_working:
            return []
        now, since = self._clock.monotonic(), runner.waits.since
        waits = waiting_for(runner.look())
        return [{"what": wait.what, "seconds": round(now - since.get(wait.key, now), 1)} for wait in waits]

    async def _events(self, uid: str, after: int) -> list[Event]:
        runner = self._runner(uid)
        if runner is not None:
            return runner.chronicle.events.after(after)
        keys = JobKeys(uid)
        batch = await self._jobs.batch(uid)
        history = EventLog(keys)
        history.note(JobMirror(keys), batch, JobMirror(keys).fold(batch), 0.0)
        return history.after(after)


def reached_at(listens: str, address: str) -> str:
    """Where others reach what a node serves at `listens`: one that listens at every address is reached as its daemon at `address` is."""
    host, _, port = listens.rpartition(":")
    return f"{address.rpartition(':')[0]}:{port}" if host.strip("[]") in EVERY_ADDRESS else listens


def _namespace(mirror: JobMirror) -> str:
    assert mirror.job is not None
    return mirror.job.record.namespace


def _told(message: pb.Job) -> Tree:
    accuracy = [one.accuracy for one in message.sources if one.HasField("accuracy")]
    return {
        "uid": message.uid,
        "name": full_name(message.name, message.namespace or DEFAULT_NAMESPACE),
        "state": pb.JobState.Name(message.state).removeprefix("JOB_STATE_").replace("UNSPECIFIED", "UNREADABLE"),
        "reason": message.reason[:MOST_SAID],
        "created": message.created,
        "ended": message.ended,
        "step": message.step,
        "steps": message.steps,
        "lineage": message.lineage,
        "slots": message.slots,
        "place": message.queue_position,
        "accuracy": accuracy[0] if len(accuracy) == 1 else None,
        "shares": {share.node: len(share.shards) for share in message.shares},
    }


def _split(mirror: JobMirror) -> Tree:
    if mirror.plan is None:
        return {}
    places: dict[str, int] = {"train": len(mirror.plan.record.ranks)}
    for place in mirror.plan.record.engines:
        if not place.asleep:
            pool = "reward" if place.judge else "rollout"
            places[pool] = places.get(pool, 0) + 1
    return places


def _move(move: Move) -> Tree:
    return {
        "time": move.time,
        "step": move.step,
        "state": move.state,
        "said": in_words(move),
        "expected": numbers_in_words(move),
        "outcome": outcome_in_words(move),
    }


def _event(event: Event) -> Tree:
    return {"sequence": event.sequence, "time": event.time, "kind": event.kind, "message": event.message[:MOST_SAID]}
