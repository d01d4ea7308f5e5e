"""Files and folders that are written whole or not at all, and files of lines.

A file is written under a hidden name beside its target and renamed; so is a folder, when everything is in it. A crash at
any moment leaves what was there before, plus at most a hidden remainder, which `sweep_drafts` removes. With `durable`, all
bytes are on the disk before the name is, so that this holds for a machine that loses power too.

A line without its end was being written when its writer died or the disk was full, and does not count. `parse_object` reads
a line of JSON that may be damaged or of another program: no object, nested too deep, or with a number that cannot have been
measured (`NaN`, an infinite one, one beyond `MOST`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gcore.errors import GcoreError

READ_BYTES = 1 << 20

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFull(GcoreError):
    """There was no room for what had to be written; nothing half-written was left."""


def replace_file(target: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `target` in place of what was there. For one writer at a time; whoever has the machine's power cut may find the
    old one. `mode` is less the umask's. Raises OSError; then what was there before still is, and nothing else.
    """
    half = target.with_name(f".{target.name}.part")
    try:
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        half.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_folder(target: Path, *, owner: str, durable: bool, drafts: Path | None = None) -> Iterator[Path]:
    """Yields a new folder to fill; it becomes `target` at the end of the block, in place of one that was there.

    `owner` keeps two writers' unfinished folders apart. `drafts`: where it is filled, on the same file system, if not beside
    the target, where another writer may sweep. If the block raises, what was written is removed. Raises DiskFull where the
    disk was.
    """
    temporary = (drafts or target.parent) / f".{target.name}.{owner}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if durable:
            for path in temporary.rglob("*"):
                sync_path(path)
            sync_path(temporary)
        if drafts is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
        _take_name(temporary, target)
        if durable:
            sync_path(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise DiskFull(
                f"no room to write it ({error.strerror})", where=str(target), fix="Free some space on this disk"
            ) from error
        raise


def read_whole_lines(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The lines from byte `start` on that have an end, without it, each with the byte at which it starts. Raises OSError."""
    file.seek(start)
    rest = b""
    while block := file.read(READ_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield start, line
            start += len(line) + 1


def last_lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """The whole lines in the last `most_bytes` of a file; none where there is no file. Raises OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
        file.seek(start)
        first, *rest = file.read().split(b"\n")
        yield from (rest if start else [first, *rest])[:-1]


def append_lines(path: Path, lines: bytes, *, durable: bool = False) -> None:
    """Append whole lines to a file, on a line of their own if the last one was cut off, as where its writer was killed or the disk was
    full. Raises OSError, also where the folder is not there."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read() == b"\n" else b"\n" + lines
        file.write(lines)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Block until a file or folder is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep_drafts(parent: Path, spared: Callable[[str], bool] = lambda target: False) -> None:
    """Remove the hidden remainders of writers that died, in `parent`; not those of targets whose name is `spared`.

    Only for whoever now is the only writer of the others.
    """
    for path in parent.glob(".*.tmp"):
        if not spared(path.name.removeprefix(".").partition(".")[0]):
            shutil.rmtree(path, ignore_errors=True)


def _take_name(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        # A folder cannot be replaced in one move. Between the two there is no target, which readers take for "not yet".
        aside = temporary.with_name(temporary.name.removesuffix(".tmp") + ".old.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


MOST = 1e18
"""No time, count or size that is written down comes near it."""


def parse_object(line: str) -> dict[str, Any] | None:
    """The object that the line is; None for anything else."""
    try:
        tree = json.loads(line, parse_float=_float, parse_int=_int, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def parse_number(value: Any) -> float:
    """A number of such an object. Raises TypeError for what is none, as text or a truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _float(text: str) -> float:
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError("no number that was measured")
    return value


def _int(text: str) -> int:
    value = int(text)
    if not -MOST <= value <= MOST:
        raise ValueError("no number that was counted")
    return value


def refuse_constant(name: str) -> NoReturn:
    """For `parse_constant`: what Python reads and JSON does not have (NaN, Infinity). Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
