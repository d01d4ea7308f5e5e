"""The supervisor's end of the control line to its child process, and the start of the confined child.

`gcore.system.control_line` describes the line and has the child's end. The supervisor turns the child's messages and its
exit into events. It ignores unknown event names, so that a newer child may send more. A line that is not a JSON object
is a failure.

The child runs in its own process group. When it has ended, the supervisor kills the whole group before it collects the
child's exit status (until then the pid cannot be reused): a process that a server left behind would keep its
accelerator. The supervisor confines itself before it starts the child, so the child and its descendants are confined
from the beginning. If its cores cannot be set, the worker fails, because it would compute on the cores of another. If
its control group cannot be entered, it runs without, because the limits only protect its neighbours, and the group may
have been removed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gcore.errors import explain_os_errors
from gcore.system.cgroups import CannotLimit, enter_group
from gcore.system.control_line import CONTROL_FD
from gcore.system.daemon import log_environment
from gcore.system.process import (
    GUARD,
    CannotStart,
    exit_sentence,
    last_log_lines,
    out_of_memory_kills,
    process_status,
    thread_environment,
    wait_child_ended,
)
from gcore.worker.lifecycle import (
    ChildEnded,
    ChildFailed,
    ChildListens,
    ChildProgressed,
    ChildServes,
    LineClosed,
    WorkerEvent,
)

if TYPE_CHECKING:
    from gcore.worker.records import LaunchSpec

log = logging.getLogger("gcore.worker")
SCRATCH = "tmp"
"""Subfolder of the job's folder for temporary files."""

LONGEST_SCRATCH = 60
"""Maximum characters of the path of the folder for temporary files.

Programs create sockets in it, and a socket's path has at most 107.
"""


def confine_process(spec: LaunchSpec) -> None:
    """Move this process into the control group and onto the cores of `spec`, and create its job's folder.

    Raises CannotStart if it may not run on the cores or cannot create the folder; a missing control group is only
    logged.
    """
    if spec.cgroup:
        try:
            enter_group(spec.cgroup)
        except CannotLimit as error:
            log.warning("runs without its job's limits: %s", error)
    if spec.cpus:
        try:
            os.sched_setaffinity(0, spec.cpus)
        except OSError as error:
            raise CannotStart(
                f"the worker cannot run on the cores of slot {spec.slot} ({error.strerror})",
                fix="Check which cores this machine has and which the daemon's CPU set allows",
            ) from error
        if lacking := sorted(set(spec.cpus) - os.sched_getaffinity(0)):  # the kernel drops cores that are not allowed
            raise CannotStart(
                f"the worker may not run on the core{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))} of slot {spec.slot}",
                fix="Check which cores this machine has and which the daemon's CPU set allows",
            )
    if spec.folder:
        with explain_os_errors(f"cannot create the job's folder {spec.folder} for temporary files", CannotStart):
            Path(spec.folder, SCRATCH).mkdir(parents=True, exist_ok=True)


def scratch_environment(folder: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put temporary files into the job's folder `folder`.

    Empty if `base`, the environment of the starting process, names another folder, or if the path is too long for a
    socket.
    """
    scratch = str(Path(folder, SCRATCH))
    return {"TMPDIR": scratch} if folder and "TMPDIR" not in base and len(scratch) <= LONGEST_SCRATCH else {}


LONGEST_LINE = 1 << 20
"""Maximum bytes of a message of the child."""

LAST_WORD_S = 1.0
"""Maximum seconds to read the line of a child that has ended, in case a process outside its group keeps it open."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """The output of one child: a log file from byte `start` on."""

    path: Path
    start: int


class _Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    log: LogPart


def parse_event(line: bytes) -> WorkerEvent | None:
    """Convert a message of the child to an event; an invalid message is a failure of the child.

    None: the message has an event name that this version does not know.
    """
    try:
        message = json.loads(line)
        match message:
            case {"event": "serving", "address": str(address)}:
                return ChildServes(address)
            case {"event": "store", "address": str(address)}:
                return ChildListens(address)
            case {"event": "progress", "phase": str(phase), "progress": int(progress)}:
                return ChildProgressed(phase, progress)
            case {"event": "failed", "reason": str(reason)}:
                return ChildFailed(reason)
            case {"event": str(name)} if name not in ("serving", "store", "progress", "failed"):
                return None
    except ValueError:
        pass
    return ChildFailed(f"sent a line that its supervisor cannot parse: {line[:200].decode(errors='replace').strip()}")


def child_environment(spec: LaunchSpec, base: Mapping[str, str], control_fd: int) -> dict[str, str]:
    """Return the child's environment: `base` with thread settings, temporary folder, variables of the spec and control
    line.

    Thread settings of `base`, the environment of the starting process, are replaced by those of the spec.
    """
    return {
        **base,
        **thread_environment(spec.threads),
        **scratch_environment(spec.folder, base),
        **spec.env,
        **log_environment(spec.about),
        CONTROL_FD: str(control_fd),
    }


class ChildProcess:
    """A running engine or train rank, with the supervisor's end of its control line; created by `start`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log: LogPart,
        oom_kills: int,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._log = log
        self._oom_kills = oom_kills
        self._ended = False

    @classmethod
    async def start(cls, spec: LaunchSpec) -> ChildProcess:
        """Start the child of `spec` and send it its launch document. Raises CannotStart."""
        confine_process(spec)
        oom_kills = out_of_memory_kills()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process, log = _spawn(spec, theirs)
        except OSError as error:
            ours.close()
            raise CannotStart(
                f"cannot start {spec.command[0]!r} with output to {spec.log_file} ({error.strerror or error})"
            ) from error
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE)
        child = cls(process, reader, writer, log, oom_kills)
        child._write(spec.child)
        return child

    @property
    def pid(self) -> int:
        """The pid of the child, and of its process group."""
        return self._process.pid

    def is_stopped(self) -> bool:
        """Whether the child's process is stopped by a signal (SIGSTOP)."""
        status = None if self._ended else process_status(self.pid)
        return status is not None and status.state == "T"

    def tell(self, command: str, **fields: Any) -> None:
        """Send a command to the child. Does not block if the child does not read its line."""
        self._write({"command": command, **fields})

    def kill(self) -> None:
        """Send SIGKILL to the child's whole process group."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def run(self, emit: Callable[[WorkerEvent], None]) -> None:
        """Emit the child's messages as events until it has ended, then `ChildEnded`. Cancellation kills the child."""
        listener = asyncio.create_task(self._listen(emit))
        try:
            await wait_child_ended(self.pid)
            self.kill()  # kills processes that it left behind
            await asyncio.wait({listener}, timeout=LAST_WORD_S)
        finally:
            listener.cancel()
            self.kill()
            self._process.wait()  # it is dead, or about to die from the SIGKILL
            self._ended = True
            self._writer.close()
        killed = out_of_memory_kills() > self._oom_kills
        words = last_log_lines(self._log.path, self._log.start)
        emit(ChildEnded(exit_sentence(self._process.returncode, words, out_of_memory=killed)))

    async def _listen(self, emit: Callable[[WorkerEvent], None]) -> None:
        try:
            while line := await self._reader.readline():
                event = parse_event(line)
                if event is not None:
                    emit(event)
        except ValueError:
            emit(ChildFailed(f"sent a line longer than {LONGEST_LINE} bytes to its supervisor"))
        except ConnectionError:
            pass
        emit(LineClosed())

    def _write(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")


def _spawn(spec: LaunchSpec, line: socket.socket) -> _Spawned:
    path = Path(spec.log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            [*GUARD, "tether", str(os.getpid()), *spec.command],
            env=child_environment(spec, os.environ, line.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(line.fileno(),),
            process_group=0,
            cwd=spec.folder or None,
        )
    return _Spawned(process, LogPart(path, start))
