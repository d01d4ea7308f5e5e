"""A worker's log, line by line: what was written until now, from a place on, and what is written then.

A log may be as long as it likes, have lines of any length, be cut short by whoever rotates it, and end in the middle of a line: what is
read at once is bounded, a line is cut at `MOST_CHARACTERS`, and what has no line end yet is told when the log is not followed any
further. Links are not followed: what writes into a run's folder must not choose what a daemon reads. Blocks on the disk.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from gcore.json_line import object_in

MOST_CHARACTERS = 16 * 1024
READ_BYTES = 256 << 10
_BEGIN = re.compile(r"^(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6})\d*)?(Z|[+-]\d\d:?\d\d)?")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def time_of(line: str) -> float:
    """When a line says that it was written, in seconds since the epoch; 0: it does not. Without a zone it is this machine's."""
    if line.startswith("{"):
        told = object_in(line)
        stamp = told.get("time") if told is not None else None
        if isinstance(stamp, int | float) and not isinstance(stamp, bool):
            return float(stamp)
        line = stamp if isinstance(stamp, str) else ""
    found = _BEGIN.match(line)
    if found is None:
        return 0.0
    *whole, fraction, zone = found.groups()
    try:
        moment = datetime(*map(int, whole))  # type: ignore[arg-type]
        if zone == "Z":
            moment = moment.replace(tzinfo=UTC)
        elif zone:
            moment = datetime.strptime(f"{moment.isoformat()}{zone}", "%Y-%m-%dT%H:%M:%S%z")
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except (ValueError, OverflowError, OSError):
        return 0.0


@dataclass
class LogReader:
    """One log from `offset` on. `tail`: begin with the last so many lines of what is there."""

    path: Path
    tail: int = 0
    offset: int = 0
    _rest: bytes = b""
    """Of a line whose end has not come, its beginning."""
    _too_long: bool = False
    """Whether the rest of that line is thrown away."""
    _opened: bool = field(default=False)

    def read(self, *, last: bool = False) -> tuple[list[str], bool]:
        """Some more lines, and whether there may be more at once. `last`: what has no line end is a line, too.

        A log that is not there has none. Raises OSError.
        """
        try:
            handle = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            return [], False
        with os.fdopen(handle, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if not self._opened:
                self._opened = True
                self.offset = _behind(file, size, self.tail) if self.tail else self.offset
            if size < self.offset:  # rotated
                self.offset, self._rest, self._too_long = 0, b"", False
            file.seek(self.offset)
            data = file.read(READ_BYTES)
            self.offset += len(data)
            more = self.offset < size
        lines = list(self._lines(data))
        if last and not more and self._rest:
            lines.append(_text(self._rest))
            self._rest = b""
        return lines, more

    def _lines(self, data: bytes) -> list[str]:
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            if self._too_long:
                self._too_long = False
            else:
                lines.append(_text(self._rest + piece))
            self._rest = b""
        if not self._too_long:
            self._rest += rest
        if len(self._rest) > 4 * MOST_CHARACTERS:  # told now, and the rest of it never
            lines.append(_text(self._rest))
            self._rest, self._too_long = b"", True
        return lines


def _text(data: bytes) -> str:
    text = data.decode(errors="replace").rstrip("\r")
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."


def _behind(file: object, size: int, lines: int) -> int:
    """Where the last `lines` lines begin."""
    at, wanted = size, lines
    last = True
    while at > 0:
        step = min(READ_BYTES, at)
        at -= step
        file.seek(at)  # type: ignore[attr-defined]
        data: bytes = file.read(step)  # type: ignore[attr-defined]
        end = len(data)
        if last and data.endswith(b"\n"):  # it ends the last line, and begins none
            end -= 1
        last = False
        while (place := data.rfind(b"\n", 0, end)) >= 0:
            wanted -= 1
            if wanted == 0:
                return at + place + 1
            end = place
    return 0
