"""How every process of gcore writes its log: lines of text for people, or lines of JSON for whoever collects them.

A JSON line has `time` (UTC), `level`, `logger`, `message`, and what it is about, as far as that is known: `controller` (the node's name), `worker`,
`role`, `job` (its uid), `job_name` and `step` (the newest committed one). A trace stands under `trace`. What a line is about follows the task that writes
it: whoever works on a job says so once (`about`), and everything begun from there has it.

Which of the two a process writes stands in its environment (`GCORE_LOG_FORMAT`, `GCORE_LOG_LEVEL`), so that workers write as their controller does.
Messages are cut at `MOST_CHARACTERS`. Does not rotate, keep or send logs, and adds nothing to a message.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, TextIO, get_args

from gcore.json_line import object_in

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
FORMAT_VARIABLE, LEVEL_VARIABLE = "GCORE_LOG_FORMAT", "GCORE_LOG_LEVEL"
ABOUT_VARIABLE = "GCORE_LOG_ABOUT"
"""What all lines of a process that was started for something are about, as JSON."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MOST_CHARACTERS = 16_000
Fields = Mapping[str, object]

_about: ContextVar[Callable[[], Fields] | None] = ContextVar("about", default=None)


def about(fields: Callable[[], Fields]) -> None:
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


def set_up(
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
        JsonFormatter({**(object_in(environment.get(ABOUT_VARIABLE, "{}")) or {}), **fixed})
        if is_json
        else logging.Formatter(TEXT)
    )
    wanted = environment.get(LEVEL_VARIABLE, level).upper()
    known = wanted if wanted in logging.getLevelNamesMapping() else level
    logging.basicConfig(level=known, handlers=[handler], force=True)


def told_of(fields: Fields) -> dict[str, str]:
    """The environment of a process whose lines are all about `fields`; what is empty or None is nothing."""
    return {ABOUT_VARIABLE: json.dumps({name: value for name, value in fields.items() if value not in ("", None)})}


def choose(log_format: LogFormat, environment: MutableMapping[str, str] = os.environ) -> None:
    """What this process and those that it starts write, unless the environment says already."""
    environment.setdefault(FORMAT_VARIABLE, log_format)
