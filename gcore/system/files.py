"""Atomic writes of files and folders, and files of lines.

A file or folder is written completely under a temporary hidden name next to its target, and then renamed. A crash at any moment leaves the
previous content, plus at most a temporary file or folder; `sweep_drafts` removes temporary folders. With `durable`, all bytes are on disk before the rename, so that
this also holds after a power failure.

A line without a newline is incomplete, because its writer died or the disk was full, and is ignored. `parse_object` reads a line of JSON that
may be damaged or foreign. It rejects non-objects, too deep nesting, and numbers that cannot be measurements (`NaN`, infinite, or beyond `MOST`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gcore.errors import GcoreError

READ_BYTES = 1 << 20

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFull(GcoreError):
    """The disk was full. No incomplete file is left."""


def replace_file(target: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write `target` atomically, replacing the old file. After a power failure the old file may be there. `mode` is reduced by the umask.

    Several threads and processes may write `target` at a time; the last one remains. Raises OSError, and then the old file is unchanged.
    """
    half = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        half.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replace_shared_file(target: Path) -> Iterator[BinaryIO]:
    """Yield a new empty file; it becomes `target` at the end of the block, replacing an old one. Creates the folder.

    Several processes may write `target` at a time; the last one remains. Raises OSError, and then the old file is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_folder(target: Path, *, owner: str, durable: bool, drafts: Path | None = None) -> Iterator[Path]:
    """Yield a new folder to fill; it becomes `target` at the end of the block, replacing an old one.

    `owner`: a name for the writer, part of the temporary name, so that two writers of one target do not collide. `drafts`: parent of the temporary
    folder, on the same file system; by default the target's parent. Set it if another writer may call `sweep_drafts` on the target's parent. If the
    block raises, the temporary folder is removed. Raises DiskFull if the disk is full.
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
                f"the disk is full ({error.strerror})", where=str(target), fix="Free space on this disk"
            ) from error
        raise


def read_whole_lines(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the complete lines from byte `start` on, without newlines, each with its start byte. Raises OSError."""
    file.seek(start)
    rest = b""
    while block := file.read(READ_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield start, line
            start += len(line) + 1


def last_lines(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the complete lines in the last `most_bytes` of a file; none if it does not exist. Raises OSError."""
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
    """Append complete lines to a file (created if missing). First end an incomplete last line, which a killed writer or a full disk may have left. Raises OSError, also
    if the folder does not exist."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read() == b"\n" else b"\n" + lines
        file.write(lines)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def check_regular_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file or a link to one. Opening a FIFO would block, and a device may have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json_file(path: Path) -> Any:
    """Return the content of a JSON file in UTF-8. Raises OSError, also if it is not a regular file, and ValueError, also if it is nested
    too deeply."""
    check_regular_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def sync_path(path: Path) -> None:
    """Block until a file or folder is on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep_drafts(parent: Path, spared: Callable[[str], bool] = lambda target: False) -> None:
    """Remove the temporary folders that dead writers (`replace_folder`) left in `parent`.

    `spared`: gets the name of a target; where it returns true, the temporary folder stays. The caller must be the only writer of the other targets.
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
        # A folder cannot be replaced in one step. Between the two renames there is no target, which readers treat as "not yet".
        aside = temporary.with_name(temporary.name.removesuffix(".tmp") + ".old.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


MOST = 1e18
"""Largest accepted number of a JSON line; larger than any recorded time, count or size."""


def parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object on the line; None for anything else."""
    try:
        tree = json.loads(line, parse_float=_float, parse_int=_int, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def parse_number(value: Any) -> float:
    """Return a number from a JSON object (`parse_object`) as float. Raises TypeError for other types, including text and booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _float(text: str) -> float:
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError(f"{text[:40]} is not between -{MOST:g} and {MOST:g}")
    return value


def _int(text: str) -> int:
    value = int(text)
    if not -MOST <= value <= MOST:
        raise ValueError(f"{text[:40]} is not between -{MOST:g} and {MOST:g}")
    return value


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity and -Infinity, which Python's parser accepts but JSON does not have. For `json.loads(parse_constant=...)`."""
    raise ValueError(f"{name} is not JSON")
