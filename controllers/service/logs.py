"""What a job's workers wrote to their logs, for whoever asks: `logs/INSTANCE.log` in the run's folder.

Where all nodes share the folder, any controller reads all logs. Where they share none, the one that was asked reads its own and asks
each of the others for theirs. A log's name says of which worker it is; which rank that was, the records of the job's train worlds say.
Lines of one worker come in their order; those of several are told apart by their instance and not put into one order, for their
clocks are several.

Whoever asks for the places of lines can go on at another controller when this one is gone: what was told of each worker's log is what the
places say, and the rest is read there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controllers.service.log_lines import Line, LogReader, Place, time_of
from controllers.service.refusals import BadFields, NodeNotFound, WorkerNotFound, bad_field
from gcore.api.v1 import jobs_pb2 as pb
from gcore.clock import Clock
from gcore.errors import GcoreError
from gcore.ledger.mirror import JobMirror
from gcore.nearest import did_you_mean
from gcore.rpc_status import Violation
from gcore.worker.records import WorkerRecord

ROLES = ("rollout", "reward", "train")
LOOK_S = 0.5
"""Between two looks at logs that are followed."""
FOLDER_EVERY = 4
"""Looks between two at the folder, for new workers."""
MOST_TAIL = 100_000


@dataclass(frozen=True, slots=True)
class Log:
    """One worker's."""

    path: Path
    instance: str
    node: str
    role: str
    rank: int | None = None


def check(request: pb.StreamLogsRequest) -> None:
    """Raises BadFields."""
    wrong = []
    if request.role and request.role not in ROLES:
        wrong.append(Violation("role", f"{request.role[:40]!r} is none of {', '.join(ROLES)}"))
    if request.HasField("rank") and (request.rank < 0 or request.role not in ("", "train")):
        wrong.append(Violation("rank", "only train ranks have one, from 0 on"))
    if not math.isfinite(request.since) or request.since < 0:
        wrong.append(Violation("since", "is no time in seconds since the epoch"))
    if request.tail > MOST_TAIL:
        wrong.append(Violation("tail", f"is more than {MOST_TAIL}"))
    if any(one.offset < 0 or not math.isfinite(one.time) or one.time < 0 for one in request.after):
        wrong.append(Violation("after", "names a place that no line of a log has"))
    if wrong:
        raise BadFields(wrong)
    if request.follow and request.previous:
        raise bad_field("previous", "workers that are gone write nothing more", "Leave out --follow")


def wanted(
    names: Collection[str],
    run_dir: Path,
    mirror: JobMirror,
    workers: Mapping[str, WorkerRecord],
    ask: pb.StreamLogsRequest,
) -> list[Log]:
    """Of the files of the folder, those that are asked for, by name."""
    uid = mirror.keys.uid
    living = {name for name, worker in workers.items() if worker.job_uid == uid}
    ranks = {stored.record.instance: int(key.rpartition("/")[2]) for key, stored in mirror.claims.items()}
    ranks |= {name: worker.rank for name, worker in workers.items() if worker.rank is not None}
    ended = mirror.status is not None and mirror.status.record.phase.ended
    begun = {one.instance for one in ask.after}  # what those wrote who have gone since is told to its end
    found = []
    for name in sorted(names):
        if (split := _split(name)) is None:
            continue
        instance, role, node = split
        log = Log(run_dir / "logs" / name, instance, node, role, ranks.get(instance))
        is_there = instance in living
        if (
            (instance in begun or (not is_there if ask.previous else is_there or ended))
            and (not ask.role or log.role == ask.role)
            and (not ask.node or log.node == ask.node)
            and (not ask.instance or log.instance == ask.instance)
            and (not ask.HasField("rank") or log.rank == ask.rank)
        ):
            found.append(log)
    return found


def check_named(
    ask: pb.StreamLogsRequest, nodes: Collection[str], workers: Collection[str], *, names: Collection[str], whole: bool
) -> None:
    """Raises NodeNotFound, WorkerNotFound for what is neither registered nor has a log in `names`. `whole`: these are all."""
    logs = [split for name in names if (split := _split(name)) is not None]
    known = {*nodes, *(node for _, _, node in logs)}
    if ask.node and ask.node not in known:
        raise NodeNotFound(
            f"there is no node {ask.node[:80]!r}{did_you_mean(ask.node, known)}",
            fix="`gcore nodes` shows those there are",
        )
    known = {*workers, *(instance for instance, _, _ in logs)}
    if whole and ask.instance and ask.instance not in known:
        raise WorkerNotFound(
            f"the job has no worker {ask.instance[:80]!r}{did_you_mean(ask.instance, known)}",
            fix="`gcore nodes` shows those there are; each line of a log names its own",
        )


def _split(name: str) -> tuple[str, str, str] | None:
    """Instance, role and node of a log's file; None: it is no worker's log."""
    instance, dot, kind = name.rpartition(".")
    role, _, rest = instance.partition("-")
    return (instance, role, rest.rpartition("-")[0]) if dot and kind == "log" and role in ROLES else None


@dataclass
class _Read:
    """A log that is being told."""

    log: Log
    reader: LogReader
    time: float
    """The newest that a line said."""


@dataclass
class LogStream:
    """Reads what `look` finds: the logs now, and whether nothing more will be written."""

    look: Callable[[], Awaitable[tuple[Sequence[Log], bool]]]
    ask: pb.StreamLogsRequest
    clock: Clock
    _reads: dict[str, _Read] = field(default_factory=dict)

    async def lines(self) -> AsyncGenerator[pb.LogLine, None]:
        """Until all was told, or where it is followed, until the job has ended."""
        looks, over = 0, False
        while True:
            if looks % FOLDER_EVERY == 0:
                logs, over = await self.look()
                for log in logs:
                    if (
                        log.instance not in self._reads
                        and (mark := await self._begin(log, first=looks == 0)) is not None
                    ):
                        yield mark
            looks += 1
            last = over or not self.ask.follow
            for one in self._reads.values():
                more = True
                while more:
                    with _reading(one.log):
                        lines, more = await asyncio.to_thread(one.reader.read, last=last)
                    for line in lines:
                        if (told := self._line(one, line)) is not None:
                            yield told
            if last:
                return
            await self.clock.sleep(LOOK_S)

    async def _begin(self, log: Log, *, first: bool) -> pb.LogLine | None:
        """Where it is begun with, for whoever wants to know: where the last lines begin is lost with this stream. Who goes on knows it of
        those that were there, so that of the others all is new, as it is of a worker that came while others were followed."""
        after = next((one for one in self.ask.after if one.instance == log.instance), None)
        if after is not None:
            place = Place(after.offset, after.beginning, after.within)
            self._reads[log.instance] = _Read(log, LogReader(log.path, begin=place), after.time)
            return None
        reader = LogReader(log.path, tail=self.ask.tail if first and not self.ask.after else 0)
        self._reads[log.instance] = _Read(log, reader, 0.0)
        if not (self.ask.places and first):
            return None
        with _reading(log):
            begin = await asyncio.to_thread(reader.start)
        return None if begin is None else pb.LogLine(mark=pb.LOG_MARK_BEGIN, place=_placed(log, begin, 0.0))

    def _line(self, one: _Read, line: Line) -> pb.LogLine | None:
        """None for what was written too early. A line that says no time was written when the one before it was."""
        time = time_of(line.text)
        one.time = time or one.time
        if self.ask.since and one.time < self.ask.since:
            return None
        log = one.log
        told = pb.LogLine(instance=log.instance, node=log.node, role=log.role, text=line.text, time=time)
        if log.rank is not None:
            told.rank = log.rank
        if self.ask.places:
            told.place.CopyFrom(_placed(log, line.behind, one.time))
        return told


def _placed(log: Log, place: Place, time: float) -> pb.LogPlace:
    return pb.LogPlace(
        instance=log.instance, offset=place.offset, beginning=place.beginning, within=place.within, time=time
    )


@contextlib.contextmanager
def _reading(log: Log) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GcoreError(f"a log cannot be read ({error.strerror or error})", where=str(log.path)) from error


def names_in(run_dir: Path) -> list[str]:
    """The files of the folder of logs; none where there is no such folder. Raises GcoreError. Blocks."""
    try:
        return [entry.name for entry in (run_dir / "logs").iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise GcoreError(f"the run's folder cannot be read ({error.strerror or error})", where=str(run_dir)) from error
