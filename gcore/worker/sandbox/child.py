"""The child's end of the line to its controller: loads foreign code once, then responds to calls in order.

A controller starts `python -m MODULE FD BEGUN` (`gcore.worker.sandbox.process`). Over the socket FD both send JSON, one
value per line:

    controller -> process   {"memory_mb": 4096, ...}                   once: what to load
    process -> controller   {"ready": true, "facts": {...}} or {"failed": {...}}       once: loaded, or failed
    controller -> process   a call                                     MODULE defines calls and responses
    process -> controller   its responses

Foreign code runs in the main thread, because libraries implement time limits with signals. Its output goes to standard
error, which is the controller's log. The process ends when the socket closes; processes forked by foreign code do not
have the socket. BEGUN is the descriptor of shared memory for calls with many items: the process writes into it which
item it begins.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gcore.errors import GcoreError
from gcore.plugins import MAX_TRACE, PluginFault

LONGEST_WORDS = 2000
"""Maximum characters of an error's `what`, `where` and `fix`: a reward's own error may contain any text."""

_BEGUN = struct.Struct("<QQ")
BEGUN_BYTES = _BEGUN.size
"""Size of the shared memory in bytes."""

Answers = Callable[[int, Any], Iterable[bytes]]
"""Yields the encoded responses to a call, each sent as soon as it is yielded.

Its arguments are the call's number (from 1) and its content.
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Foreign code that is loaded and ready for calls.

    `answers`: responds to a call. `facts`: what the pool needs to know of the code, as JSON.
    """

    answers: Answers
    facts: Mapping[str, Any] = field(default_factory=dict)


class ProgressCell:
    """Shared memory in which the process records the item of the current call that it has started last."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BEGUN_BYTES)

    def write(self, call: int, item: int) -> None:
        """Record that item number `item` of call number `call` has started. Called by the process."""
        _BEGUN.pack_into(self._memory, 0, call, item)

    def read(self, call: int) -> int:
        """Return the item of call number `call` that has started last; 0 if the call has not started. Called by the
        controller.
        """
        found, item = _BEGUN.unpack_from(self._memory)
        return item if found == call else 0

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()


def encode_line(value: Any) -> bytes:
    """Encode a value as one line of JSON. ASCII, so that no text can end the line or fail to encode."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def error_fields(error: GcoreError, trace: str) -> dict[str, str | None]:
    """Return the fields in which an error is sent: `what`, `where`, `fix` and `trace`, each of limited length."""
    words = {"where": error.where, "fix": error.fix}
    said = {name: None if word is None else str(word)[:LONGEST_WORDS] for name, word in words.items()}
    return {"what": str(error.what)[:LONGEST_WORDS], **said, "trace": trace[-MAX_TRACE:]}


def serve(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Run the process: load the foreign code, then respond to calls until the socket closes.

    `load` gets the setup message; it raises PluginFault if the code cannot be loaded.
    """
    line = socket.socket(fileno=int(sys.argv[1]))
    guard_answers(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        try:
            loaded = load(setup)
        except PluginFault as fault:
            line.sendall(encode_line({"failed": error_fields(fault, fault.trace)}))
            return
        line.sendall(encode_line({"ready": True, "facts": loaded.facts}))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the controller is gone
            for number, call in enumerate(heard, 1):
                for answer in loaded.answers(number, json.loads(call)):
                    line.sendall(answer)


def serve_calls(load: Callable[[dict[str, Any]], Callable[[Any], Any]]) -> None:
    """Run a process that responds to `SandboxProcess.ask`: a call is [CALL, QUESTION], its response [CALL, ANSWER].

    CALL is the call's number. `load` gets the setup message and returns the function from a question to its answer.
    """

    def load_answers(setup: dict[str, Any]) -> Loaded:
        answer = load(setup)
        return Loaded(lambda _, call: [encode_line((call[0], answer(call[1])))])

    serve(load_answers)


def guard_answers(line: socket.socket) -> None:
    """Disconnect processes that foreign code forks from the socket, so that they cannot respond in place of this one.

    Otherwise every later response would be mistaken for that to another call.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(line.fileno(), False)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, line.fileno(), inheritable=False))


def limit_memory(megabytes: int) -> None:
    """Limit the private memory of the process to `megabytes` MiB; shared libraries and reserved addresses do not
    count.
    """
    most = megabytes << 20
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
