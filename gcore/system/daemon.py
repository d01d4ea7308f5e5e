"""What every process of gcore does as a service: logging and systemd's notifications.

A log is lines of text for people, or lines of JSON: `time` (UTC), `level`, `logger`, `message`, and as far as it is known
`controller` (the node's name), `worker`, `role`, `job` (its uid), `job_name`, `step` (the newest committed one) and `trace`. What a
line is about follows the task that writes it: a task that works on a job says so once (`about`), and everything begun from it has it.
The environment says which of the two (`GCORE_LOG_FORMAT`, `GCORE_LOG_LEVEL`), so workers write as their controller does. Messages are
cut at `MOST_CHARACTERS`. Logs are not rotated, kept or sent.

Notifications (sd_notify) are datagrams to the socket that NOTIFY_SOCKET names. One that cannot be sent is not repeated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO

from gcore.system.files import parse_object

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE, LEVEL_VARIABLE = "GCORE_LOG_FORMAT", "GCORE_LOG_LEVEL"

ABOUT_VARIABLE = "GCORE_LOG_ABOUT"
"""What all lines of a process that was started for something are about, as JSON."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_CHARACTERS = 16_000
Fields = Mapping[str, object]
_about: ContextVar[Callable[[], Fields] | None] = ContextVar("about", default=None)


def set_log_context(fields: Callable[[], Fields]) -> None:
    """What this task, and all that it begins from now on, writes of. `fields` is called for each line."""
    _about.set(fields)


class JsonFormatter(logging.Formatter):
    """A line is one JSON object. `fixed`: what every line of the process is about."""

    def __init__(self, fixed: Fields) -> None:
        super().__init__()
        self._fixed = dict(fixed)

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter. A line break in a message is written as one in JSON, so a line stays a line."""
        told = _about.get()
        tree: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:MOST_CHARACTERS],
            **self._fixed,
            **(told() if told is not None else {}),
        }
        if record.exc_info:
            tree["trace"] = self.formatException(record.exc_info)[-MOST_CHARACTERS:]
        return json.dumps(tree, default=str)


def set_up_logging(
    fixed: Fields = MappingProxyType({}),
    *,
    level: str = "INFO",
    environment: Mapping[str, str] = os.environ,
    stream: TextIO | None = None,
) -> None:
    """Write to `stream` (standard error) as the environment says; what else wrote the log so far does no more.

    `level`: of a process whose environment names none. `fixed`: what every line is about, beside what whoever started the process has said of it.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    is_json = environment.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(
        JsonFormatter({**(parse_object(environment.get(ABOUT_VARIABLE, "{}")) or {}), **fixed})
        if is_json
        else logging.Formatter(TEXT)
    )
    wanted = environment.get(LEVEL_VARIABLE, level).upper()
    known = wanted if wanted in logging.getLevelNamesMapping() else level
    logging.basicConfig(level=known, handlers=[handler], force=True)


def log_environment(fields: Fields) -> dict[str, str]:
    """The environment of a process whose lines are all about `fields`; what is empty or None is nothing."""
    return {ABOUT_VARIABLE: json.dumps({name: value for name, value in fields.items() if value not in ("", None)})}


def choose_log_format(log_format: LogFormat, environment: MutableMapping[str, str] = os.environ) -> None:
    """What this process and those that it starts write, unless the environment says already."""
    environment.setdefault(FORMAT_VARIABLE, log_format)


SOCKET, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
LONGEST_STATUS = 400


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where to tell, and how often it wants to hear. `address` empty: nobody listens. `watchdog_s` None: nobody counts."""

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """As systemd says it to the process `pid`. A watchdog that is another process's is none."""
        address = environment.get(SOCKET, "")
        if not address.startswith(("/", "@")):
            return cls()
        micros, whose = environment.get(WATCHDOG_USEC, ""), environment.get(WATCHDOG_PID, "")
        mine = whose in ("", str(pid))
        counts = mine and micros.isascii() and micros.isdigit() and len(micros) < 16 and int(micros) > 0
        return cls(address, int(micros) / 1e6 if counts else None)

    def tell(self, *lines: str) -> None:
        """One message: `READY=1`, `STATUS=...`."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(line.replace("\n", " ")[:LONGEST_STATUS] for line in lines)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line,
        ):
            line.setblocking(False)  # a manager that does not read is not waited for
            line.sendto(message.encode(errors="replace"), address)


def clear_environment(environment: dict[str, str] | os._Environ[str]) -> None:
    """Take out what is this process's alone: its workers must not speak for it."""
    for name in (SOCKET, WATCHDOG_USEC, WATCHDOG_PID):
        environment.pop(name, None)
