"""A worker's log, line by line: what was written until now, from a place on, and what is written then.

A log may be as long as it likes, have lines of any length, be cut short by whoever rotates it, and end in the middle of a line: what is
read at once is bounded, a line is cut at `MOST_CHARACTERS`, and what has no line end yet is told when the log is not followed any
further. Where a line ends is told with it, so that whoever reads the same log elsewhere can go on there. Links are not followed: what
writes into a run's folder must not choose what a daemon reads. Blocks on the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from gcore.json_line import object_in

MOST_CHARACTERS = 16 * 1024
READ_BYTES = 256 << 10
HEAD_BYTES = 256
"""By so many of its first bytes a log is known: the lines of a worker begin with when it wrote them."""
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


@dataclass(frozen=True, slots=True)
class Place:
    """Up to where a log was read, the same for whoever reads it. `beginning` names its first bytes (`_name`), so that a log that was begun
    anew is told apart; `within`: inside of a line that is too long, whose rest is passed over."""

    offset: int = 0
    beginning: int = 0
    within: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """What it says, and where one that follows begins."""

    text: str
    behind: Place


@dataclass
class LogReader:
    """One log from a place on. `tail`: begin with the last so many lines of what is there."""

    path: Path
    tail: int = 0
    begin: Place = Place()
    _offset: int = 0
    """Up to which byte it was read."""
    _head: bytes = b""
    """Its first bytes, as far as they were read."""
    _rest: bytes = b""
    """Of a line whose end has not come, its beginning."""
    _too_long: bool = False
    """Whether the rest of that line is thrown away."""
    _opened: bool = field(default=False)

    def start(self) -> Place | None:
        """Where it begins to read; None: the log is not there, or not as far as it was read elsewhere. Raises OSError."""
        with self._open() as file:
            return None if file is None or not self._is_open(file, last=False) else self._place(self._offset)

    def read(self, *, last: bool = False) -> tuple[list[Line], bool]:
        """Some more lines, and whether there may be more at once. `last`: what has no line end is a line, too.

        A log that is not there has none. Raises OSError.
        """
        with self._open() as file:
            if file is None or not self._is_open(file, last=last):
                return [], False
            size = os.fstat(file.fileno()).st_size
            file.seek(self._offset)
            data = file.read(READ_BYTES)
            begin, self._offset = self._offset, self._offset + len(data)
            self._head = _head_of(file, min(HEAD_BYTES, self._offset))
            more = self._offset < size
        lines = list(self._lines(begin, data))
        if last and not more and self._rest:
            lines.append(Line(_text(self._rest), self._place(self._offset)))
            self._rest = b""
        return lines, more

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        try:
            handle = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            yield None
            return
        with os.fdopen(handle, "rb", buffering=0) as file:
            yield file

    def _is_open(self, file: BinaryIO, *, last: bool) -> bool:
        """Where to read on is known. A log that was cut short, or is another than it was, is read from its beginning."""
        size = os.fstat(file.fileno()).st_size
        if self._opened:
            if size < self._offset or _head_of(file, len(self._head)) != self._head:
                self._offset, self._head, self._rest, self._too_long = 0, b"", b"", False
            return True
        begin = self.begin
        if begin.offset:
            compared = min(begin.offset, HEAD_BYTES)
            if size >= compared and _name(_head_of(file, compared)) != begin.beginning:
                begin = Place()  # it was begun anew
            elif size < begin.offset:
                if not last:
                    return False  # as other nodes see it, it is longer: a shared folder may be a moment late
                begin = Place()
            self._offset, self._too_long = begin.offset, begin.within
        elif self.tail:
            self._offset = _behind(file, size, self.tail)
        self._head = _head_of(file, min(HEAD_BYTES, self._offset))
        self._opened = True
        return True

    def _place(self, offset: int, *, within: bool = False) -> Place:
        return Place(offset, _name(self._head[:offset]), within) if offset else Place()

    def _lines(self, begin: int, data: bytes) -> Iterator[Line]:
        """Of `data`, which were read from `begin` on."""
        *whole, rest = data.split(b"\n")
        end = begin
        for piece in whole:
            end += len(piece) + 1
            if self._too_long:
                self._too_long = False
            else:
                yield Line(_text(self._rest + piece), self._place(end))
            self._rest = b""
        if self._too_long:
            return
        self._rest += rest
        if len(self._rest) > 4 * MOST_CHARACTERS:  # told now, and the rest of it never
            yield Line(_text(self._rest), self._place(end + len(rest), within=True))
            self._rest, self._too_long = b"", True


def _name(head: bytes) -> int:
    return int.from_bytes(blake2b(head, digest_size=8).digest(), "big")


def _head_of(file: BinaryIO, size: int) -> bytes:
    file.seek(0)
    return file.read(size)


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
