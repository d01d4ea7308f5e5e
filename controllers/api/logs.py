"""Worker logs: `logs/INSTANCE.log` in the run's folder.

If all nodes share the folder, any controller reads all logs. Otherwise the controller that serves the call reads its own node's logs and
requests the others from its peers; a failing peer becomes a line of the response. Lines of one worker are in order; lines of several
workers are not, because their clocks differ. A client that requests positions can resume the stream at another controller.

A log may have any length and lines of any length, may be truncated by rotation, and may end within a line. Reads are bounded, a line is
cut at `MOST_CHARACTERS`, and text without a line end is sent when the log is not followed further. Links are not followed, because workers
write into that folder. Reading blocks on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import grpc

from controllers.api.edge.errors import BadFields, NodeNotFound, WorkerNotFound, bad_field
from gcore.api.rpc import VersionedStub, Violation
from gcore.api.tls import Connector
from gcore.api.v1 import jobs_pb2 as pb
from gcore.api.v1 import jobs_pb2_grpc
from gcore.errors import did_you_mean, explain_os_errors
from gcore.ledger.mirror import JobMirror
from gcore.system.clock import Clock
from gcore.system.concurrency import cancel_all, gather_or_cancel
from gcore.system.files import parse_object
from gcore.worker.records import WorkerRecord

MOST_CHARACTERS = 16 * 1024

READ_BYTES = 256 << 10

HEAD_BYTES = 256
"""The first bytes of a log identify it, because the first line of a worker contains its time."""

_BEGIN = re.compile(r"^(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6})\d*)?(Z|[+-]\d\d:?\d\d)?")

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

ROLES = ("rollout", "reward", "train")

LOOK_S = 0.5
"""Seconds between two reads of followed logs."""

FOLDER_EVERY = 4
"""The folder is searched for logs of new workers at every fourth read of the followed logs."""

MOST_TAIL = 100_000

Source = Callable[[], AsyncGenerator[pb.LogLine, None]]

HELD = 64
"""Maximum number of lines that wait for a slow client; then reading pauses."""


def line_time(line: str) -> float:
    """The time that a line contains, in seconds since the epoch; 0 if it contains none. Without a zone it is this machine's local time."""
    if line.startswith("{"):
        tree = parse_object(line)
        stamp = tree.get("time") if tree is not None else None
        if isinstance(stamp, int | float) and not isinstance(stamp, bool):
            return float(stamp)
        line = stamp if isinstance(stamp, str) else ""
    found = _BEGIN.match(line)
    if found is None:
        return 0.0
    *whole, fraction, zone = found.groups()
    try:
        moment = datetime(*map(int, whole))  # type: ignore[arg-type]
        if zone == "Z":
            moment = moment.replace(tzinfo=UTC)
        elif zone:
            moment = datetime.strptime(f"{moment.isoformat()}{zone}", "%Y-%m-%dT%H:%M:%S%z")
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, OverflowError, OSError):
        return 0.0


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a log, valid at any controller. `beginning`: digest of the first bytes (`_name`), to detect that the log was replaced.
    `within`: inside a line that is too long, whose rest is skipped."""

    offset: int = 0
    beginning: int = 0
    within: bool = False


@dataclass(frozen=True, slots=True)
class PositionedLine:
    """A line of a log, and the position after it."""

    text: str
    behind: LogPosition


@dataclass
class LogReader:
    """Reads one log from a position. `tail`: start with this many of the existing last lines."""

    path: Path
    tail: int = 0
    begin: LogPosition = LogPosition()
    _offset: int = 0
    """Bytes read so far."""
    _head: bytes = b""
    """The first bytes of the log, as far as they were read."""
    _rest: bytes = b""
    """The start of a line whose end has not been read."""
    _too_long: bool = False
    """Whether the rest of the current line is skipped."""
    _opened: bool = field(default=False)

    def start(self) -> LogPosition | None:
        """The position at which reading starts; None if the log is missing or shorter than the position. Raises OSError."""
        with self._open() as file:
            return None if file is None or not self._is_open(file, last=False) else self._place(self._offset)

    def read(self, *, last: bool = False) -> tuple[list[PositionedLine], bool]:
        """Read some lines; also return whether more are available now. `last`: return a last line without a line end too.

        A missing log has no lines. Raises OSError.
        """
        with self._open() as file:
            if file is None or not self._is_open(file, last=last):
                return [], False
            size = os.fstat(file.fileno()).st_size
            file.seek(self._offset)
            data = file.read(READ_BYTES)
            begin, self._offset = self._offset, self._offset + len(data)
            self._head = _head_of(file, min(HEAD_BYTES, self._offset))
            more = self._offset < size
        lines = list(self._lines(begin, data))
        if last and not more and self._rest:
            lines.append(PositionedLine(_text(self._rest), self._place(self._offset)))
            self._rest = b""
        return lines, more

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        try:
            handle = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            yield None
            return
        with os.fdopen(handle, "rb", buffering=0) as file:
            yield file

    def _is_open(self, file: BinaryIO, *, last: bool) -> bool:
        """Set the read position if that is not done yet, or back to the beginning if the log was truncated or replaced.
        False: the log is still shorter than the position, so nothing can be read now."""
        size = os.fstat(file.fileno()).st_size
        if self._opened:
            if size < self._offset or _head_of(file, len(self._head)) != self._head:
                self._offset, self._head, self._rest, self._too_long = 0, b"", b"", False
            return True
        begin = self.begin
        if begin.offset:
            compared = min(begin.offset, HEAD_BYTES)
            if size >= compared and _name(_head_of(file, compared)) != begin.beginning:
                begin = LogPosition()  # the log was replaced
            elif size < begin.offset:
                if not last:
                    return False  # other nodes see a longer file: a shared folder may lag
                begin = LogPosition()
            self._offset, self._too_long = begin.offset, begin.within
        elif self.tail:
            self._offset = _behind(file, size, self.tail)
        self._head = _head_of(file, min(HEAD_BYTES, self._offset))
        self._opened = True
        return True

    def _place(self, offset: int, *, within: bool = False) -> LogPosition:
        return LogPosition(offset, _name(self._head[:offset]), within) if offset else LogPosition()

    def _lines(self, begin: int, data: bytes) -> Iterator[PositionedLine]:
        """The lines in `data`, which starts at offset `begin`."""
        *whole, rest = data.split(b"\n")
        end = begin
        for piece in whole:
            end += len(piece) + 1
            if self._too_long:
                self._too_long = False
            else:
                yield PositionedLine(_text(self._rest + piece), self._place(end))
            self._rest = b""
        if self._too_long:
            return
        self._rest += rest
        if len(self._rest) > 4 * MOST_CHARACTERS:  # return the start now and skip the rest
            yield PositionedLine(_text(self._rest), self._place(end + len(rest), within=True))
            self._rest, self._too_long = b"", True


def _name(head: bytes) -> int:
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "big")


def _head_of(file: BinaryIO, size: int) -> bytes:
    file.seek(0)
    return file.read(size)


def _text(data: bytes) -> str:
    text = data.decode(errors="replace").rstrip("\r")
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


def _behind(file: object, size: int, lines: int) -> int:
    """The offset in the file at which the last `lines` lines begin."""
    at, wanted = size, lines
    last = True
    while at > 0:
        step = min(READ_BYTES, at)
        at -= step
        file.seek(at)  # type: ignore[attr-defined]
        data: bytes = file.read(step)  # type: ignore[attr-defined]
        end = len(data)
        if last and data.endswith(b"\n"):  # this line end ends the last line
            end -= 1
        last = False
        while (place := data.rfind(b"\n", 0, end)) >= 0:
            wanted -= 1
            if wanted == 0:
                return at + place + 1
            end = place
    return 0


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """One log file of one worker."""

    path: Path
    instance: str
    node: str
    role: str
    rank: int | None = None


def check_log_request(request: pb.StreamLogsRequest) -> None:
    """Check a log request. Raises BadFields."""
    wrong = []
    if request.role and request.role not in ROLES:
        wrong.append(Violation("role", f"{request.role[:40]!r} is not one of {', '.join(ROLES)}"))
    if request.HasField("rank") and (request.rank < 0 or request.role not in ("", "train")):
        wrong.append(Violation("rank", "only train ranks have a rank, which starts at 0"))
    if not math.isfinite(request.since) or request.since < 0:
        wrong.append(Violation("since", "is not a time in seconds since the epoch"))
    if request.tail > MOST_TAIL:
        wrong.append(Violation("tail", f"is more than {MOST_TAIL}"))
    if any(one.offset < 0 or not math.isfinite(one.time) or one.time < 0 for one in request.after):
        wrong.append(Violation("after", "contains an invalid position"))
    if wrong:
        raise BadFields(wrong)
    if request.follow and request.previous:
        raise bad_field("previous", "cannot be followed: ended workers write no more lines", "Leave out --follow")


def select_logs(
    names: Collection[str],
    run_dir: Path,
    mirror: JobMirror,
    workers: Mapping[str, WorkerRecord],
    ask: pb.StreamLogsRequest,
) -> list[WorkerLog]:
    """The log files that a request selects, sorted by name."""
    uid = mirror.keys.uid
    living = {name for name, worker in workers.items() if worker.job_uid == uid}
    ranks = {stored.record.instance: int(key.rpartition("/")[2]) for key, stored in mirror.claims.items()}
    ranks |= {name: worker.rank for name, worker in workers.items() if worker.rank is not None}
    ended = mirror.has_ended
    begun = {
        one.instance for one in ask.after
    }  # logs already being read are read to their end even if the worker has ended
    found = []
    for name in sorted(names):
        if (split := _split(name)) is None:
            continue
        instance, role, node = split
        log = WorkerLog(run_dir / "logs" / name, instance, node, role, ranks.get(instance))
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


def check_log_names(
    ask: pb.StreamLogsRequest, nodes: Collection[str], workers: Collection[str], *, names: Collection[str], whole: bool
) -> None:
    """Raise NodeNotFound or WorkerNotFound if a request names a node or worker that is neither registered nor has a
    log. `names`: the log files that were found; `whole`: whether they include those of all nodes."""
    logs = [split for name in names if (split := _split(name)) is not None]
    known = {*nodes, *(node for _, _, node in logs)}
    if ask.node and ask.node not in known:
        raise NodeNotFound(
            f"there is no node {ask.node[:80]!r}{did_you_mean(ask.node, known)}",
            fix="`gcore nodes` lists the nodes",
        )
    known = {*workers, *(instance for instance, _, _ in logs)}
    if whole and ask.instance and ask.instance not in known:
        raise WorkerNotFound(
            f"the job has no worker {ask.instance[:80]!r}{did_you_mean(ask.instance, known)}",
            fix="`gcore nodes` lists the workers, and each log line names its worker",
        )


def _split(name: str) -> tuple[str, str, str] | None:
    """The instance, role and node of a log's file name; None if it is not a worker's log."""
    instance, dot, kind = name.rpartition(".")
    role, _, rest = instance.partition("-")
    return (instance, role, rest.rpartition("-")[0]) if dot and kind == "log" and role in ROLES else None


@dataclass
class _Read:
    """A log that is being streamed, and its reader, which holds the position."""

    log: WorkerLog
    reader: LogReader
    time: float
    """The time of the newest line that had one, in seconds since the epoch."""


@dataclass
class LogStream:
    """Streams the lines of several logs of a job, also of those that appear later. `look`: returns the current log
    files, and whether the job has ended, so that nothing more is written. `ask`: the request."""

    look: Callable[[], Awaitable[tuple[Sequence[WorkerLog], bool]]]
    ask: pb.StreamLogsRequest
    clock: Clock
    _reads: dict[str, _Read] = field(default_factory=dict)

    async def lines(self) -> AsyncGenerator[pb.LogLine, None]:
        """Yield lines until all logs were read, or, if they are followed, until the job has ended."""
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
                    with explain_os_errors("a log cannot be read", where=one.log.path):
                        lines, more = await asyncio.to_thread(one.reader.read, last=last)
                    for line in lines:
                        if (message := self._line(one, line)) is not None:
                            yield message
            if last:
                return
            await self.clock.sleep(LOOK_S)

    async def _begin(self, log: WorkerLog, *, first: bool) -> pb.LogLine | None:
        """Start to read a log. Returns a message with its start position if the client requested positions.

        The position of the `tail` would otherwise be lost with this stream. A client that resumes sends the positions of the logs that it has
        read, so other logs are new to it and are read from their beginning, like the logs of workers that start later.
        """
        after = next((one for one in self.ask.after if one.instance == log.instance), None)
        if after is not None:
            place = LogPosition(after.offset, after.beginning, after.within)
            self._reads[log.instance] = _Read(log, LogReader(log.path, begin=place), after.time)
            return None
        reader = LogReader(log.path, tail=self.ask.tail if first and not self.ask.after else 0)
        self._reads[log.instance] = _Read(log, reader, 0.0)
        if not (self.ask.places and first):
            return None
        with explain_os_errors("a log cannot be read", where=log.path):
            begin = await asyncio.to_thread(reader.start)
        return None if begin is None else pb.LogLine(mark=pb.LOG_MARK_BEGIN, place=_placed(log, begin, 0.0))

    def _line(self, one: _Read, line: PositionedLine) -> pb.LogLine | None:
        """The message of a line; None if it is older than requested. A line without a time has the time of the line before it."""
        time = line_time(line.text)
        one.time = time or one.time
        if self.ask.since and one.time < self.ask.since:
            return None
        log = one.log
        message = pb.LogLine(instance=log.instance, node=log.node, role=log.role, text=line.text, time=time)
        if log.rank is not None:
            message.rank = log.rank
        if self.ask.places:
            message.place.CopyFrom(_placed(log, line.behind, one.time))
        return message


def _placed(log: WorkerLog, place: LogPosition, time: float) -> pb.LogPlace:
    return pb.LogPlace(
        instance=log.instance, offset=place.offset, beginning=place.beginning, within=place.within, time=time
    )


def log_names(run_dir: Path) -> list[str]:
    """The file names in the folder of logs; empty if there is no such folder. Raises GcoreError. Blocks."""
    with explain_os_errors("the run's folder cannot be read", where=run_dir):
        try:
            return [entry.name for entry in (run_dir / "logs").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []


def peer_logs(connector: Connector, node: str, address: str, request: pb.StreamLogsRequest) -> Source:
    """A source that streams a peer's own logs. `request` must name the job by its uid: the peer's caller is this daemon, and in its
    namespace a name may refer to another job."""

    async def lines() -> AsyncGenerator[pb.LogLine, None]:
        asked = pb.StreamLogsRequest()
        asked.CopyFrom(request)
        asked.node = node
        async with connector.channel(address) as channel:
            stub = VersionedStub(jobs_pb2_grpc.JobsStub(channel), more=connector.metadata(address))
            try:
                async for line in stub.StreamLogs(asked):
                    # The marks of the peer's stream are not those of this one.
                    if line.HasField("place") or not line.mark:
                        yield line
            except grpc.aio.AioRpcError as error:
                why = " ".join((error.details() or error.code().name).split())
                yield pb.LogLine(node=node, text=f"[the logs of {node} cannot be read: {why[:500]}]")

    return lines


async def merge_logs(sources: Sequence[Source]) -> AsyncGenerator[pb.LogLine, None]:
    """Merge the lines of all sources; lines of one source stay in order. Raises what a source raises."""
    if len(sources) == 1:
        async with aclosing(sources[0]()) as lines:
            async for line in lines:
                yield line
        return
    waiting: asyncio.Queue[pb.LogLine] = asyncio.Queue(HELD)

    async def bring(source: Source) -> None:
        async with aclosing(source()) as lines:
            async for line in lines:
                await waiting.put(line)

    bringing = asyncio.create_task(gather_or_cancel(bring(source) for source in sources), name="logs of peers")
    try:
        while not (bringing.done() and waiting.empty()):
            getting = asyncio.ensure_future(waiting.get())
            try:
                await asyncio.wait({getting, bringing}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    continue
                message = getting.result()
            finally:
                getting.cancel()
            yield message
        bringing.result()
    finally:
        await cancel_all([bringing])
