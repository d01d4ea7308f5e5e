"""The worker process's end of the line to its supervisor.

A Unix socket that the supervisor made, inherited as the file descriptor named in `GCORE_CONTROL_FD`; JSON, one object a
line. The supervisor's first line is the launch document. From then on:

    child → supervisor   {"event": "serving", "address": "host:port"}      requests are answered there
                         {"event": "store", "address": "host:port"}        rank 0's rendezvous
                         {"event": "progress", "phase": "...", "progress": 17}
                         {"event": "failed", "reason": "one sentence"}     before an orderly exit with a failure
    supervisor → child   {"command": "rendezvous", "address": "host:port"}
                         {"command": "stop"}

When the line breaks the supervisor is dead, and the child ends at once: a worker never outlives its supervisor.
Imports nothing heavy.
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


class Control:
    """The line, from the child's side. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket, on_broken: Callable[[], None] | None = None) -> None:
        self._socket = sock
        self._reader = sock.makefile("r", encoding="utf-8")
        self._lock = threading.Lock()
        self._on_broken = on_broken or (lambda: os._exit(ORPHANED_EXIT))
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        """What the supervisor said after the launch document, oldest first."""
        self.launch: dict[str, Any] = json.loads(self._reader.readline())
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    @classmethod
    def inherit(cls) -> Control | None:
        """The line named in the environment, or None when the process was started by hand."""
        fd = os.environ.get(CONTROL_FD)
        return cls(socket.socket(fileno=int(fd))) if fd else None

    def send(self, event: str, **fields: Any) -> None:
        """Tell the supervisor. A broken line ends the process."""
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            with self._lock:
                self._socket.sendall(line.encode())
        except OSError:
            self._on_broken()

    def wait_for(self, command: str) -> dict[str, Any]:
        """Block until `command` comes; others that come before it are dropped."""
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
