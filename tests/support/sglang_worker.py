"""An engine in an environment of its own, with a test in the role of its supervisor: SGLang's worker, or vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore.system.control_line import CONTROL_FD
from gcore.system.process import ProcessId, identify_process, wait_process_ended

LONG_S = 120.0
"""Only reached when something is broken."""


SGLANG_WORKER = (sys.executable, "-m", "gcore.rollout.sglang")


def start_worker(document: dict[str, Any], log: Path, command: Sequence[str] = SGLANG_WORKER) -> Worker:
    """The program `command`, told `document`, in a process group of its own."""
    ours, theirs = socket.socketpair()
    with theirs, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, CONTROL_FD: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    ours.sendall(json.dumps(document).encode() + b"\n")
    return Worker(process, ours, log)


@dataclass
class Worker:
    """A worker."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    log: Path

    def __post_init__(self) -> None:
        self._reader = self.line.makefile("r")

    def hear(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next message of that kind with those fields; others are passed over."""
        for text in self._reader:
            message: dict[str, Any] = json.loads(text)
            if message["event"] == event and fields.items() <= message.items():
                return message
        raise AssertionError(f"the line ended before {event} {fields}:\n{self.log.read_text()[-3000:]}")

    def read_on(self) -> None:
        """Drop its messages until it ends: it blocks once its line is full."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            for _ in self._reader:
                pass

    def say(self, command: str) -> None:
        """To the worker."""
        self.line.sendall(json.dumps({"command": command}).encode() + b"\n")

    def close(self) -> None:
        """Kill it, if it lives."""
        self.process.kill()
        self.process.wait()
        self._reader.close()
        self.line.close()

    def below(self) -> list[ProcessId]:
        """All processes that came from it and live: the warden, the server and what that started; parents first."""
        found, pids = [], children_of(self.process.pid)
        while pids:
            pid = pids.pop(0)
            process = identify_process(pid)
            if process is not None:
                found.append(process)
                pids += children_of(pid)
        return found


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in file.read_text().split()]
        except OSError:
            continue
    return found


def check_ended(processes: list[ProcessId]) -> None:
    """All of them, sooner or later."""
    left = [process.pid for process in processes if not wait_process_ended(process, LONG_S)]
    assert not left, [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in left]
