"""The child's end of the line to its controller: loads foreign code once, then responds to calls in order.

A controller starts `python -m MODULE FD BEGUN` (`gcore.worker.sandbox.process`). Over the socket FD both send JSON, one
value per line:

    controller -> process   {"memory_mb": 4096, ...}                   once: what to load
    process -> controller   {"ready": true} or {"failed": {...}}       once: loaded, or failed
    controller -> process   a call                                     MODULE defines calls and responses
    process -> controller   its responses

Foreign code runs in the main thread, because libraries implement time limits with signals. Its output goes to standard
error, which is the controller's log. The process ends when the socket closes; processes forked by foreign code do not
have the socket. BEGUN is shared memory for calls of many items: the process writes which item it begins.
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
from collections.abc import Callable, Iterable
from typing import Any

from gcore.errors import GcoreError
from gcore.plugins import MAX_TRACE, PluginFault

LONGEST_WORDS = 2000
"""Characters of what an error says, where, and what to do: a reward's own may hold any text."""

_BEGUN = struct.Struct("<QQ")
BEGUN_BYTES = _BEGUN.size

Answers = Callable[[int, Any], Iterable[bytes]]
"""The encoded answers to a call, given its number (from 1) and what it holds; each item is sent as soon as it is there."""


class ProgressCell:
    """Which item of which call a process has begun last: memory that it shares with its controller."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BEGUN_BYTES)

    def write(self, call: int, item: int) -> None:
        """The process: `item` of `call` is begun."""
        _BEGUN.pack_into(self._memory, 0, call, item)

    def read(self, call: int) -> int:
        """The controller: the item of `call` that was begun last; 0 if the call was not."""
        found, item = _BEGUN.unpack_from(self._memory)
        return item if found == call else 0

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def encode_line(value: Any) -> bytes:
    """One line. ASCII, so that nothing in a text can end it or cannot be written."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def error_fields(error: GcoreError, trace: str) -> dict[str, str | None]:
    """An error as it is sent: `what`, `where`, `fix` and `trace`, each of bounded length."""
    words = {"where": error.where, "fix": error.fix}
    said = {name: None if word is None else str(word)[:LONGEST_WORDS] for name, word in words.items()}
    return {"what": str(error.what)[:LONGEST_WORDS], **said, "trace": trace[-MAX_TRACE:]}


def serve(load: Callable[[dict[str, Any]], Answers]) -> None:
    """Run the process. `load`: given the setup; raises PluginFault for what cannot be had."""
    line = socket.socket(fileno=int(sys.argv[1]))
    guard_answers(line)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with line, line.makefile("rb") as heard:
        setup = json.loads(heard.readline())
        limit_memory(setup["memory_mb"])
        try:
            answers = load(setup)
        except PluginFault as fault:
            line.sendall(encode_line({"failed": error_fields(fault, fault.trace)}))
            return
        line.sendall(encode_line({"ready": True}))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the controller has gone
            for number, call in enumerate(heard, 1):
                for answer in answers(number, json.loads(call)):
                    line.sendall(answer)


def serve_calls(load: Callable[[dict[str, Any]], Callable[[Any], Any]]) -> None:
    """Run a process that is asked by `SandboxProcess.ask`: a call is [CALL, QUESTION], its answer [CALL, ANSWER].

    `load` gives the function from a question to its answer.
    """

    def answers(setup: dict[str, Any]) -> Answers:
        answer = load(setup)
        return lambda _, call: [encode_line((call[0], answer(call[1])))]

    serve(answers)


def guard_answers(line: socket.socket) -> None:
    """A process that foreign code forks cannot answer in this one's place: every answer after that would be another call's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(line.fileno(), False)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, line.fileno(), inheritable=False))


def limit_memory(megabytes: int) -> None:
    """What the process may write to: its own data, not the libraries it shares or the addresses it reserves."""
    most = megabytes << 20
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
