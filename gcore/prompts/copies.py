"""Parquet files and saved datasets as JSON lines in the cache: made once, and read like any JSONL file from then on.

A stream asks for entries in random order, and a Parquet file gives a row only with its whole row group, often a million
rows: to read it where it lies would cost that time for every prompt, or as much memory as the data. So all rows are written once
into the cache, by a process of its own (`gcore.prompts.tables`): the controller never imports pyarrow, and what it says of
entries, digests and changed files is the same for every format. The digest is over the lines, so it does not depend on
how files are cut, compressed or named.

A copy appears whole or not at all. It is found again by path, split, and the size, time and inode of every file it was made
from; one that no longer fits is made again in its place, while who has it open keeps the old one. Of several processes
that need it at once one makes it, and the others wait for it.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from gcore.errors import DataError
from gcore.prompts.formats import DataFiles
from gcore.prompts.index import FileIdentity, Progress, identify

FORMAT = 1


class Manifest(BaseModel):
    """What a copy was made from, and what came of it. `sources` and `written`: size, mtime_ns, inode."""

    version: int
    sources: list[tuple[str, int, int, int]]
    written: tuple[int, int, int]
    rows: list[int]


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A copy that is there. `path`: the JSON lines. `rows`: of each file, in order."""

    data: DataFiles
    path: Path
    rows: tuple[int, ...]

    def name_of(self, row: int) -> str:
        """How messages name a row (from 0): by its number in its file; of a saved dataset, which is one whole, in it."""
        if self.data.kind == "hf":
            return f"{self.data.path}, row {row}"
        ends = list(itertools.accumulate(self.rows))
        number = min(bisect.bisect_right(ends, row), len(ends) - 1)
        return f"{self.data.files[number]}, row {row - ends[number] + self.rows[number]}"


def copy_of(data: DataFiles, split: str | None, cache_dir: Path, progress: Progress | None = None) -> RowCopy:
    """The copy of those files in `cache_dir`; made now if there is none. Blocks. Raises DataError.

    `progress` is called with rows done and rows in all, only when a copy is made.
    """
    named = blake2b(repr((str(data.path), data.kind, split)).encode(), digest_size=8).hexdigest()
    stem = f".{data.path.name[:40]}.{named}"
    made = _Copy(data, cache_dir / f"{stem}.rows", cache_dir / f"{stem}.copy")
    found = made.find()
    if found is not None:
        touch(made.manifest)
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Held by whoever makes it, and by the process that writes for it: one whose maker was killed goes on for a while,
        # in the very file that the next maker would write. The kernel lets go of it however those two end.
        with (cache_dir / f"{stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return made.find() or made.make(lock.fileno(), progress)
    except OSError as error:
        raise DataError(
            f"cannot keep a copy of {data.path.name} there ({(error.strerror or str(error)).lower()})",
            where=str(cache_dir),
            fix="Make room and make the folder writable, or name another one for the cache",
        ) from error


def touch(file: Path) -> None:
    """It is of use, now: what has not been for long is deleted one day (`controllers.clearing`). Not where it may not be touched."""
    with contextlib.suppress(OSError):
        os.utime(file)


@dataclass(frozen=True, slots=True)
class _Copy:
    data: DataFiles
    lines: Path
    manifest: Path

    def find(self) -> RowCopy | None:
        """The copy, if it is whole and made from what lies there now. Raises DataError if a source is not there."""
        sources = self._sources()
        try:
            manifest = Manifest.model_validate_json(self.manifest.read_bytes())
            whole = manifest.written == _known(identify(self.lines))
        except (OSError, ValidationError, DataError):
            return None
        if manifest.version != FORMAT or not whole or manifest.sources != sources:
            return None
        return RowCopy(self.data, self.lines, tuple(manifest.rows))

    def make(self, lock: int, progress: Progress | None) -> RowCopy:
        """Under the lock, an open file. Raises DataError, OSError."""
        sources = self._sources()
        part = self.lines.with_suffix(".part")
        try:
            rows = _convert(self.data, part, lock, progress)
            if self._sources() != sources:
                raise DataError(
                    "the data changed while they were read",
                    where=str(self.data.path),
                    fix="Wait until they are written",
                )
            if not sum(rows):
                raise DataError("the data hold no prompts", where=str(self.data.path), fix="Name another file")
            part.replace(self.lines)
            written = _known(identify(self.lines))
            manifest = Manifest(version=FORMAT, sources=sources, written=written, rows=rows)
            part.write_text(manifest.model_dump_json())
            part.replace(self.manifest)
        finally:
            part.unlink(missing_ok=True)
        return RowCopy(self.data, self.lines, tuple(rows))

    def _sources(self) -> list[tuple[str, int, int, int]]:
        return [(str(file), *_known(identify(file))) for file in self.data.files]


def _known(identity: FileIdentity) -> tuple[int, int, int]:
    return identity.size, identity.mtime_ns, identity.inode


def _convert(data: DataFiles, to: Path, lock: int, progress: Progress | None) -> list[int]:
    request = {"kind": data.kind, "files": [str(file) for file in data.files], "to": str(to)}
    command = [sys.executable, "-P", "-m", "gcore.prompts.tables"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", pass_fds=(lock,)
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            answer: dict[str, Any] = {}
            for line in process.stdout:
                answer = json.loads(line)
                if progress is not None and "rows" in answer:
                    progress(answer["rows"], max(answer["of"], answer["rows"]))
            said = process.stderr.read().strip()
        finally:
            process.kill()  # it has ended by itself, or is not wanted any more
    if "written" in answer:
        return list(answer["written"])
    if "error" in answer:
        told = answer["error"]
        raise DataError(told["what"], where=told["where"], fix=told["fix"])
    reason = said.split("\n")[-1] or f"it ended with {process.returncode}; was memory short?"
    raise DataError(
        f"the process that reads it failed ({reason})", where=str(data.path), fix="Correct that and try again"
    )
