"""The child's end of the control line between a supervisor and its child process.

The line is a Unix socket that the supervisor creates. The child inherits it as the file descriptor named in
`GCORE_CONTROL_FD`. Messages are JSON, one object per line. The supervisor's first line is the launch document. From
then on:

    child -> supervisor   {"event": "serving", "address": "host:port"}      accepts requests at this address
                          {"event": "store", "address": "host:port"}        rank 0 waits for the other ranks here
                          {"event": "progress", "phase": "...", "progress": 17}
                          {"event": "failed", "reason": "one sentence"}     before an orderly exit with a failure
    supervisor -> child   {"command": "rendezvous", "address": "host:port"}     of rank 0, for the other ranks
                          {"command": "stop"}

When the line breaks, the supervisor is dead and the child ends at once: a worker never outlives its supervisor. The
supervisor turns the child's messages and its exit into events. It ignores unknown event names, so that a newer child
may send more. A line that is not a JSON object is a failure.

A daemon sends its blob store `{"command": "nodes", "nodes": {NAME: URL}}` on the same kind of line.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

CONTROL_FD = "GCORE_CONTROL_FD"
ORPHANED_EXIT = 70
"""Exit code of a child whose supervisor has died."""


class ControlLine:
    """The child's end of the control line: receives commands in a thread, sends events. `send` may be called from any
    thread.

    `launch`: the child's launch document. `on_broken`: called when the line breaks; by default it ends the process.
    """

    def __init__(self, sock: socket.socket, on_broken: Callable[[], None] | None = None) -> None:
        self._socket = sock
        self._reader = sock.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()
        self._on_broken = on_broken or (lambda: os._exit(ORPHANED_EXIT))
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        """Commands received after the launch document, oldest first."""
        self.launch: dict[str, Any] = json.loads(self._reader.readline())
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    @classmethod
    def inherit(cls) -> ControlLine | None:
        """Return the line whose descriptor the environment names, or None if the process was started by hand."""
        fd = os.environ.get(CONTROL_FD)
        return cls(socket.socket(fileno=int(fd))) if fd else None

    def send(self, event: str, **fields: Any) -> None:
        """Send an event to the supervisor. A broken line ends the process."""
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            with self._lock:
                self._socket.sendall(line.encode())
        except OSError:
            self._on_broken()

    def report_progress(self, phase: str, progress: int) -> None:
        """Report the child's phase and its progress counter to the supervisor, for its watchdog."""
        self.send("progress", phase=phase, progress=progress)

    def wait_for(self, command: str) -> dict[str, Any]:
        """Block until `command` arrives, and return it; other commands that arrive before are dropped."""
        while True:
            message = self.commands.get()
            if message.get("command") == command:
                return message

    def _listen(self) -> None:
        try:
            for line in self._reader:
                self.commands.put(json.loads(line))
        except (OSError, ValueError):
            pass
        self._on_broken()


def report_serving(control: ControlLine | None, address: str) -> None:
    """Report the address (`host:port`) at which this process serves to the supervisor; without one, print it."""
    if control is None:
        print(f"serving on {address}", flush=True)  # noqa: T201
        return
    control.send("serving", address=address)
    control.report_progress("waiting", 0)
