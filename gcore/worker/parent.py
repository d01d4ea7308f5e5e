"""The supervisor's end of the control line, and the child process behind it (the other end: `gcore.worker.child`).

The child runs in a process group of its own. When it has ended, and before it is collected (until then its pid cannot
be anybody else's), the whole group is killed: what a server left behind would hold on to its accelerator.

Turns what the child says and how it ends into events; decides nothing. Event names it does not know are passed over,
so that a newer child may say more; a line that is no JSON object is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gcore import logs
from gcore.worker import death
from gcore.worker.child import CONTROL_FD
from gcore.worker.confining import confine, scratch_environment
from gcore.worker.events import (
    ChildEnded,
    ChildFailed,
    ChildListens,
    ChildProgressed,
    ChildServes,
    Event,
    LineClosed,
)
from gcore.worker.process import CannotStart, child_ended, status_of
from gcore.worker.records import LaunchSpec
from gcore.worker.threads import thread_environment

TETHER = Path(__file__).with_name("tether.py")
WARDEN = TETHER.with_name("warden.py")
ENTER = TETHER.with_name("enter.py")
LONGEST_LINE = 1 << 20
LAST_WORD_S = 1.0
"""How long a dead child's line is read on, should something outside its group hold it open."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """A log file from byte `start` on: what one child wrote."""

    path: Path
    start: int


class _Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    log: LogPart


def understand(line: bytes) -> Event | None:
    """What the child said. None: something this version does not know."""
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
    return ChildFailed(f"said what its supervisor does not understand: {line[:200].decode(errors='replace').strip()}")


def child_environment(spec: LaunchSpec, base: Mapping[str, str], control_fd: int) -> dict[str, str]:
    """The child's whole environment. What the starter's says of threads does not count, but for what a spec names."""
    return {
        **base,
        **thread_environment(spec.threads),
        **scratch_environment(spec.folder, base),
        **spec.env,
        **logs.told_of(spec.about),
        CONTROL_FD: str(control_fd),
    }


class ChildProcess:
    """A started child. `start` makes it."""

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
        confine(spec)
        oom_kills = death.out_of_memory_kills()
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
        """Its pid, and its process group's."""
        return self._process.pid

    def is_stopped(self) -> bool:
        """Whether a signal stopped it (SIGSTOP)."""
        status = None if self._ended else status_of(self.pid)
        return status is not None and status.state == "T"

    def tell(self, command: str, **fields: Any) -> None:
        """Send a command. A child that does not read its line is not waited for."""
        self._write({"command": command, **fields})

    def kill(self) -> None:
        """SIGKILL to its whole group."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def run(self, emit: Callable[[Event], None]) -> None:
        """Report what it says, and last, `ChildEnded`. Cancelling this kills the child."""
        listener = asyncio.create_task(self._listen(emit))
        try:
            await child_ended(self.pid)
            self.kill()  # what it left behind
            await asyncio.wait({listener}, timeout=LAST_WORD_S)
        finally:
            listener.cancel()
            self.kill()
            self._process.wait()  # it is dead, or dies of the SIGKILL
            self._ended = True
            self._writer.close()
        out_of_memory = death.out_of_memory_kills() > self._oom_kills
        words = death.last_words(self._log.path, self._log.start)
        emit(ChildEnded(death.sentence(self._process.returncode, words, out_of_memory=out_of_memory)))

    async def _listen(self, emit: Callable[[Event], None]) -> None:
        try:
            while line := await self._reader.readline():
                event = understand(line)
                if event is not None:
                    emit(event)
        except ValueError:
            emit(ChildFailed(f"said a line longer than {LONGEST_LINE} bytes to its supervisor"))
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
            [sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *spec.command],
            env=child_environment(spec, os.environ, line.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(line.fileno(),),
            process_group=0,
            cwd=spec.folder or None,
        )
    return _Spawned(process, LogPart(path, start))
