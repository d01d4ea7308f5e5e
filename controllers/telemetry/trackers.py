"""Runs the process that sends a job's metrics to one experiment tracker (such as W&B): start, notify, watch, restart.

One controller at a time runs the process: the first in the tracker's order of turns. When another one becomes first, or
the controller dies, the input of the process ends; it sends the remaining data to the tracker and exits. The next
controller starts its own process, which continues at the stored position in the metrics file. A process that died, or
that makes no progress although there is more data, is restarted with increasing delays; a warning event reports each
reason once. Nothing else waits for trackers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from controllers.changes import ChangeSignal
from controllers.rules.view import turn_of
from gcore.config.spec import TrackerSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import METRICS_FILE, JobRecord
from gcore.observability.tracking import BUSY, TrackerDocument, tracker_folder
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time

WarnPeople = Callable[[str, str], Awaitable[None]]
"""Posts a warning event; arguments: its topic and its sentence."""

log = logging.getLogger(__name__)
FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 120.0
LOG = "output.log"

LET_GO_S = 5.0
"""Timeout for a process to exit after its input was closed."""

LOOK_S = 1.0

MOST_OUTPUT, KEPT_OUTPUT = 16 << 20, 1 << 20
"""Maximum bytes of the log file with the output of a tracker process, and bytes that are kept of its end when it is
truncated."""


@dataclass(frozen=True, slots=True)
class TrackerTimeouts:
    """Timeouts of a tracker's process, in seconds."""

    stall_s: float = 180.0
    """Time without a message from the process, while there is unsent data or before it has opened the tracker; then it
    is killed."""
    end_s: float = 30.0
    """Time to send the last lines after the job has ended."""


@dataclass(slots=True)
class _Heard:
    """What a tracker process has reported. `offset`: bytes of the metrics file that it has sent. `ready`: whether it
    has opened the tracker.

    `error`: its last error. `moved`: when it last made progress, in monotonic seconds.
    """

    offset: int = 0
    ready: bool = False
    error: str = ""
    moved: float = 0.0


class TrackerProcess:
    """Runs one tracker of one job in a separate process, while it is this controller's turn.

    `look`: returns the job's newest records. `told`: notified when the metrics file has new lines. `warn`: posts a
    warning event.
    """

    def __init__(
        self,
        me: str,
        home: Path,
        tracker: TrackerSpec,
        look: Callable[[], JobMirror],
        told: ChangeSignal,
        warn: WarnPeople,
        clock: Clock,
        patience: TrackerTimeouts | None = None,
    ) -> None:
        self._me = me
        self._home = home
        self._tracker = tracker
        self._look = look
        self._told = told
        self._warn = warn
        self._clock = clock
        self._patience = patience or TrackerTimeouts()
        self._warned = ""

    async def run(self) -> None:
        """Keep the process running whenever it is this controller's turn. Returns when the job has ended and its data
        were sent, by this controller's process or by that of another controller whose turn it is."""
        retry = FIRST_RETRY_S
        while True:
            while not self._is_mine():
                if self._ended():
                    return
                await self._told.wait(timeout=LOOK_S)
            heard = _Heard(moved=self._clock.monotonic())
            code = await self._live(heard)
            if code == 0 and self._ended():
                return
            if code not in (0, BUSY):
                reason = heard.error or f"its process exited with {code}"
                await self._tell(f"tracker {self._tracker.name!r} failed and is being restarted: {reason}")
            retry = FIRST_RETRY_S if code in (0, BUSY) else min(2 * retry, LONGEST_RETRY_S)
            await self._clock.sleep(retry)

    async def _live(self, heard: _Heard) -> int:
        """Start the process, watch it and wait for its end. Returns its exit code, negative for a signal; 1 if it could
        not start."""
        job = self._job()
        folder = tracker_folder(Path(job.run_dir), self._tracker.name)
        try:
            output = await asyncio.to_thread(_open_log, folder)
        except OSError as error:
            heard.error = f"{folder} cannot be written ({error.strerror or error})"
            return 1
        try:
            with output:
                process = await self._started(job, output)
        except OSError as error:  # No memory, or too many processes.
            heard.error = f"its process cannot be started ({error.strerror or error})"
            return 1
        assert process.stdin is not None
        process.stdin.write(TrackerDocument(job.uid, job.name, job.spec, dict(self._tracker.options)).encode())
        listening = asyncio.create_task(self._listen(process, heard))
        try:
            await self._watch(process, heard)
            if process.returncode is None:
                await self._let_go(process)
        except BaseException:
            await self._let_go(process)
            raise
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await asyncio.to_thread(_bound, folder / LOG)  # The process may have ended because the disk was full.
        assert process.returncode is not None
        return process.returncode

    async def _started(self, job: JobRecord, output: BinaryIO) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gcore.tracking", "--home", str(self._home)),
            *("--run-dir", job.run_dir, "--tracker", self._tracker.name),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            start_new_session=True,
        )

    async def _watch(self, process: asyncio.subprocess.Process, heard: _Heard) -> None:
        """Watch the process until it exits, until it is another controller's turn, or until `TrackerTimeouts.end_s`
        after the end of the job.

        Kills a process that makes no progress. Wakes the process when the metrics file has new lines.
        """
        assert process.stdin is not None
        ended_at: float | None = None
        waiting = asyncio.create_task(process.wait())
        try:
            while not waiting.done():
                now = self._clock.monotonic()
                ended_at = now if ended_at is None and self._ended() else ended_at
                if ended_at is not None and now - ended_at > self._patience.end_s:
                    return
                if ended_at is None and not self._is_mine():
                    return
                await asyncio.to_thread(_bound, tracker_folder(Path(self._job().run_dir), self._tracker.name) / LOG)
                if await self._stalled(heard, now):
                    heard.error = f"no progress for {self._patience.stall_s:.0f} s"
                    _kill(process)
                    await waiting
                    return
                if not process.stdin.transport.get_write_buffer_size():
                    with contextlib.suppress(ConnectionError):
                        process.stdin.write(b"\n")
                news = asyncio.create_task(self._told.wait(timeout=LOOK_S))
                await asyncio.wait({waiting, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
        finally:
            waiting.cancel()

    async def _stalled(self, heard: _Heard, now: float) -> bool:
        size = await asyncio.to_thread(_size, Path(self._job().run_dir) / METRICS_FILE)
        if heard.ready and heard.offset >= size:
            heard.moved = now
        return now - heard.moved > self._patience.stall_s

    async def _listen(self, process: asyncio.subprocess.Process, heard: _Heard) -> None:
        """Read the messages of the process (JSON lines on its standard output) into `heard`."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            heard.moved = self._clock.monotonic()
            heard.offset = said.get("offset", heard.offset)
            heard.ready = heard.ready or "ready" in said
            heard.error = str(said.get("error", heard.error))

    async def _let_go(self, process: asyncio.subprocess.Process) -> None:
        """Close the input of the process, so that it sends the remaining data and exits; kill it after `LET_GO_S`
        seconds."""
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with limit_time(LET_GO_S):
                await process.wait()
        except TimeoutError:
            _kill(process)
            await process.wait()

    async def _tell(self, sentence: str) -> None:
        log.warning("%s", sentence)
        if sentence != self._warned:
            self._warned = sentence
            await self._warn(f"tracker-{self._tracker.name}", sentence)

    def _is_mine(self) -> bool:
        members = self._look().members
        return self._me in members and turn_of(members, self._me, f"tracker {self._tracker.name}") == 0

    def _ended(self) -> bool:
        return self._look().has_ended

    def _job(self) -> JobRecord:
        job = self._look().job
        assert job is not None
        return job.record


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process group of the process, including its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _open_log(folder: Path) -> BinaryIO:
    folder.mkdir(parents=True, exist_ok=True)
    _bound(folder / LOG)
    return (folder / LOG).open("ab")


def _bound(output: Path) -> None:
    """If the log file `output` exceeds `MOST_OUTPUT` bytes, keep only its end, so that a tracker's package cannot fill
    the disk of the run."""
    with contextlib.suppress(OSError):
        if output.stat().st_size <= MOST_OUTPUT:
            return
        with output.open("r+b") as file:
            file.seek(-KEPT_OUTPUT, os.SEEK_END)
            end = file.read(KEPT_OUTPUT)
            file.truncate(0)
        with output.open("ab") as file:  # Append, like the process, after anything written meanwhile.
            file.write(b"(earlier output was removed)\n" + end)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
