"""One process that runs foreign code (rewards, tools, agents), from the controller's side: start, calls and end.

A warden process (`gcore.system.guard`) runs between it and the controller: when either of them ends, the warden ends
all processes started by foreign code, in any process group or session. Responses arrive in the order of the calls
(`gcore.worker.sandbox.child`). The pool handles a process that cannot be started, hangs or dies
(`gcore.worker.sandbox.pool`, `gcore.reward.pool`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections import deque
from typing import Any

from gcore.errors import GcoreError, explain_os_errors
from gcore.plugins import PluginFault
from gcore.system.concurrency import limit_time
from gcore.system.process import (
    GUARD,
    CannotStart,
    child_pids,
    exit_sentence,
    identify_process,
    out_of_memory_kills,
    thread_environment,
    wait_child_ended,
)
from gcore.worker.sandbox.child import BEGUN_BYTES, ProgressCell, encode_line

LONGEST_LINE = 1 << 22
"""Maximum bytes of one message of the process."""

LATE_S = 0.25
"""Additional seconds to wait for a response beyond its time limit, because the controller itself may have been delayed.
"""

END_S = 10.0
"""Maximum seconds to wait until the warden has ended everything; a process that hangs in the kernel may take longer."""


class ProcessEnded(GcoreError):
    """The process with foreign code has died, by itself or because it violated the protocol."""


class ProtocolBroken(ProcessEnded):
    """The process sent a message that violates the protocol, so it cannot be used any more."""


def check_ready(value: Any) -> dict[str, Any]:
    """Read the first message of a process: return the facts about the code that it has loaded.

    Raises PluginFault if the code cannot be loaded, ValueError for an invalid message.
    """
    match value:
        case {"ready": True, "facts": dict(facts)}:
            return facts
        case {"failed": {"what": str(what), "where": where, "fix": fix, "trace": str(trace)}}:
            raise PluginFault(what, where=where, fix=fix, trace=trace)
    raise ValueError(f"the process sent {value!r}, which reports neither that it is ready nor that it failed")


class SandboxProcess(asyncio.Protocol):
    """A started process with foreign code, and the controller's end of its socket; created by `of`."""

    def __init__(self) -> None:
        self._answers: deque[Any] = deque()
        self._half = b""
        self._message_received: asyncio.Future[None] | None = None
        self._closed = False
        self._transport: asyncio.Transport | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._begun: ProgressCell | None = None
        self._pid = 0
        self._batches, self._asked = 0, 0
        self._oom_kills = 0
        self.facts: dict[str, Any] = {}
        """What the process reported about the code that it has loaded."""

    @classmethod
    async def of(cls, module: str, setup: bytes, group: str = "") -> SandboxProcess:
        """Start `python -m module FD BEGUN` in the control group `group` (empty: this one), and send it `setup`.

        Raises CannotStart.
        """
        ours, begun, warden = _spawn(module, group)
        ours.setblocking(False)
        try:
            _, made = await asyncio.get_running_loop().create_connection(cls, sock=ours)
        except BaseException:
            warden.kill()
            warden.wait()
            raise
        made._warden, made._begun, made._oom_kills = warden, begun, out_of_memory_kills()
        made.send(setup)
        return made

    def send_batch(self, line: bytes) -> None:
        """Send a call with several items. Only after the previous batch was answered completely."""
        self._batches += 1
        self.send(line)

    @property
    def begun(self) -> int:
        """Number of the item in the last batch that the process has started last; 0 if it has not started the batch."""
        assert self._begun is not None
        return self._begun.read(self._batches)

    def send(self, line: bytes) -> None:
        """Send a line to the process; does nothing if it has died."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(line)

    async def answer(self, timeout_s: float) -> Any:
        """Return the next response. Raises ProcessEnded if the process has died, and TimeoutError after `timeout_s`."""
        if not self._answers:
            with contextlib.suppress(TimeoutError):
                async with limit_time(timeout_s):
                    await self._receive()
            # After a delayed timeout a response may have arrived, or be on its way if only this process was delayed.
            if not self._answers and not self._closed:
                async with limit_time(LATE_S):
                    await self._receive()
        if not self._answers:
            raise ProcessEnded("the process has died")
        return self._answers.popleft()

    def ask(self, call: Any) -> None:
        """Send a call, after the previous one has been answered or abandoned. `result` returns its response.

        Calls are numbered, and responses repeat the number.
        """
        self._asked += 1
        self.send(encode_line((self._asked, call)))

    async def result(self, timeout_s: float) -> Any:
        """Return the response to the last `ask`.

        Raises like `answer`, and ProtocolBroken if foreign code has written to the socket.
        """
        match await self.answer(timeout_s):
            case [int() as number, said] if number == self._asked:
                return said
        raise ProtocolBroken("the process sent a message that is not the result of the call")

    @property
    def says_more(self) -> bool:
        """Whether the process has sent a message that was not read, although no call is open."""
        return bool(self._answers or self._half)

    async def _receive(self) -> None:
        while not self._answers and not self._closed:
            self._message_received = asyncio.get_running_loop().create_future()
            await self._message_received

    async def end(self) -> str:
        """Kill the process and all processes that it started. Return a sentence about how it died.

        If it had died before, the sentence tells how it died by itself.
        """
        warden = self._warden
        assert warden is not None
        assert warden.stdin is not None
        try:
            if self._transport is not None:
                self._transport.abort()
            if self._closed:  # its death closes the socket shortly before its exit status is available
                await _ended_within(warden, LATE_S)
            warden.stdin.close()  # tells the warden to end it
            await _ended_within(warden, END_S)
        finally:
            warden.stdin.close()
            warden.kill()  # no effect if it has ended; the process dies with the warden
            warden.wait()
        killed = out_of_memory_kills() > self._oom_kills
        return exit_sentence(warden.returncode, "", out_of_memory=killed)

    @property
    def has_ended(self) -> bool:
        """Whether the process has closed its socket, so that nothing more will arrive from it."""
        return self._closed

    @property
    def pid(self) -> int:
        """Pid of the process; the warden's if the kernel does not report it. Valid after the process has sent a
        message.
        """
        assert self._warden is not None
        if not self._pid:
            self._pid = next(iter(child_pids(self._warden.pid)), self._warden.pid)
        return self._pid

    def started(self) -> frozenset[int]:
        """Pids of the living children of the process, including orphans but not grandchildren."""
        assert self._warden is not None
        own = self.pid
        found = {*child_pids(self._warden.pid), *child_pids(own)} - {own}
        return frozenset(pid for pid in found if identify_process(pid) is not None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio when the socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio with received bytes: splits them into messages, and breaks off after an invalid one."""
        *lines, self._half = (self._half + data).split(b"\n")
        try:
            self._answers.extend(json.loads(line) for line in lines)
        except ValueError:
            self._half = b""
            self._break_off()
        if len(self._half) > LONGEST_LINE:
            self._break_off()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the socket is closed."""
        self._closed = True
        self._wake()

    def _break_off(self) -> None:
        """Close the connection, because the process sent an invalid message; for example, a reward has written to its
        socket.
        """
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._message_received is not None and not self._message_received.done():
            self._message_received.set_result(None)


async def _ended_within(child: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait until the child process has ended, at most `limit_s` seconds."""
    with contextlib.suppress(TimeoutError, RuntimeError):  # no thread is available either
        async with limit_time(limit_s):
            try:
                await wait_child_ended(child.pid)
            except OSError:  # no descriptor is available to wait with
                await asyncio.to_thread(child.wait)


def _spawn(module: str, group: str) -> tuple[socket.socket, ProgressCell, subprocess.Popen[bytes]]:
    """Start a warden with a process for foreign code. Raises CannotStart.

    Returns the controller's end of the socket, the shared memory for progress, and the warden.
    """
    warden: tuple[str, ...] = (*GUARD, "warden", "")
    if group:
        warden = (*GUARD, "enter", group, *warden)
    fix = "Free memory or descriptors, or use fewer workers"
    with (
        explain_os_errors("cannot start a process for foreign code", CannotStart, fix=fix),
        contextlib.ExitStack() as undo,
    ):
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs, open(os.memfd_create("begun", os.MFD_CLOEXEC), "r+b", buffering=0) as memory:
            memory.truncate(BEGUN_BYTES)
            begun = ProgressCell(memory.fileno())
            process = subprocess.Popen(
                [*warden, sys.executable, "-P", "-m", module, str(theirs.fileno()), str(memory.fileno())],
                env={**os.environ, **thread_environment(1)},
                stdin=subprocess.PIPE,
                pass_fds=(theirs.fileno(), memory.fileno()),
                start_new_session=True,
            )
        undo.pop_all()
    return ours, begun, process
