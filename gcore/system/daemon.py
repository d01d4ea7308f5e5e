"""Common service functions of gcore's processes: logging and systemd notifications.

A log consists of text lines, or of JSON lines with `time` (UTC), `level`, `logger`, `message` and, if known, `controller` (the node's name),
`worker`, `role`, `job` (its uid), `job_name`, `step` (the newest committed one) and `trace`. These fields follow the task that writes the line:
a task that works on a job sets them once (`set_log_context`), and all tasks that it starts inherit them. The environment selects the format
(`GCORE_LOG_FORMAT`, `GCORE_LOG_LEVEL`), so workers log in the same way as their controller. Messages are cut at `MOST_CHARACTERS`. gcore does
not rotate, keep or send logs.

Notifications (sd_notify) are datagrams to the socket in NOTIFY_SOCKET. A notification that cannot be sent is dropped.
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
"""Environment variable with a JSON object: fields that all log lines of a process have."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_CHARACTERS = 16_000
Fields = Mapping[str, object]
_about: ContextVar[Callable[[], Fields] | None] = ContextVar("about", default=None)


def set_log_context(fields: Callable[[], Fields]) -> None:
    """Set the JSON log fields of this task and of all tasks that it starts from now on. `fields` is called for each line and returns them."""
    _about.set(fields)


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object. `fixed`: fields of every line."""

    def __init__(self, fixed: Fields) -> None:
        super().__init__()
        self._fixed = dict(fixed)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON, which escapes line breaks."""
        context = _about.get()
        tree: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:MOST_CHARACTERS],
            **self._fixed,
            **(context() if context is not None else {}),
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
    """Log to `stream` (default: standard error), in the format and from the level that the environment selects; replace earlier handlers.

    `level`: lowest level to log, if the environment names none. `fixed`: fields of every line, in addition to those in the environment.
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
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise it logs each request


def log_environment(fields: Fields) -> dict[str, str]:
    """Return the environment variables with which a child process adds `fields` to all its log lines; drops fields that are empty or None."""
    return {ABOUT_VARIABLE: json.dumps({name: value for name, value in fields.items() if value not in ("", None)})}


def choose_log_format(log_format: LogFormat, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the log format of this process and its children, unless the environment already has one."""
    environment.setdefault(FORMAT_VARIABLE, log_format)


SOCKET, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
LONGEST_STATUS = 400


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Sends notifications to the service manager (systemd). `address`: its socket; empty: there is none, and nothing is sent.

    `watchdog_s`: seconds within which it expects the next watchdog notification; None: no watchdog.
    """

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager:
        """Read systemd's variables for the process `pid`. Ignores the watchdog of another process."""
        address = environment.get(SOCKET, "")
        if not address.startswith(("/", "@")):
            return cls()
        micros, whose = environment.get(WATCHDOG_USEC, ""), environment.get(WATCHDOG_PID, "")
        mine = whose in ("", str(pid))
        counts = mine and micros.isascii() and micros.isdigit() and len(micros) < 16 and int(micros) > 0
        return cls(address, int(micros) / 1e6 if counts else None)

    def tell(self, *lines: str) -> None:
        """Send one message, such as `READY=1` or `STATUS=...`."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        message = "\n".join(line.replace("\n", " ")[:LONGEST_STATUS] for line in lines)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line,
        ):
            line.setblocking(False)  # do not wait for a manager that does not read
            line.sendto(message.encode(errors="replace"), address)


def clear_environment(environment: dict[str, str] | os._Environ[str]) -> None:
    """Remove the service manager's variables from `environment`, so that the daemon's workers do not send notifications."""
    for name in (SOCKET, WATCHDOG_USEC, WATCHDOG_PID):
        environment.pop(name, None)
