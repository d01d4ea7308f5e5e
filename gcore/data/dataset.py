"""Random access to a source's entries, and the conversion of Parquet files and saved datasets to JSON lines.

A source's path is a JSONL file, a Parquet file or folder of Parquet files (sorted by name, without subfolders), or a
dataset saved by the `datasets` library. File names and the first bytes decide which. If file names contain several
splits, as on the Hugging Face hub (`train-00000-of-00002.parquet`), `split` selects one. A saved dataset with several
splits needs `split` too.

Building the index checks the complete file once (`gcore.data.jsonl`), so that a mistake in line nine million is
reported before anything starts. Later only the index is mapped, eight bytes per entry; entries are read by position and
not cached. The file must not change while it is in use: an entry that no longer parses raises DataChanged.

Parquet files and saved datasets are converted once to JSON lines in a cache, by a separate process
(`gcore.data.tables`). Entries are read in random order, but Parquet stores rows in large row groups, often a million
rows. The conversion also means that the controller never imports pyarrow, and that entries and digests work in the same
way for every format. The digest covers the lines, so it does not depend on how files are cut, compressed or named. A
copy appears atomically and is found by path, split, and the size, time and inode of every source file. An outdated copy
is replaced, while open readers keep the old one. If several processes need a copy at once, one makes it and the others
wait.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from gcore.config.data import DataFormat
from gcore.data.jsonl import (
    EntryIndex,
    EntryReader,
    FileIdentity,
    Progress,
    build_index,
    identify_file,
    load_index,
    unreadable_file,
)
from gcore.errors import DataError

Kind = Literal["jsonl", "parquet", "hf"]
PARQUET_MAGIC = b"PAR1"
_NUMBERED = re.compile(r"(?P<split>.+?)-\d+-of-\d+")
_DICT, _STATE = "dataset_dict.json", "state.json"


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files of a source, in the order of their entries. `kind`: their format. `path`: as the user named the data."""

    kind: Kind
    path: Path
    files: tuple[Path, ...]


def find_files(path: Path, declared: DataFormat, split: str | None) -> DataFiles:
    """Find the files of the data at `path`. `declared`: their format, or "auto". `split`: the split to use; None: the
    only one. Raises DataError if there are no such files, or if a split must be named.
    """
    try:
        return _found(path, declared, split)
    except OSError as error:  # a parent folder without permission, a name that is too long
        raise unreadable_file(path, error) from error


def _found(path: Path, declared: DataFormat, split: str | None) -> DataFiles:
    path.stat()  # a missing file has no kind
    kind = _kind(path) if declared == "auto" else declared
    if kind == "jsonl":
        if split is not None:
            raise DataError(
                f"a JSONL file has no splits, but split is {split!r}",
                where=str(path),
                fix="Remove `split`, or name another `format`",
            )
        return DataFiles("jsonl", path, (path,))
    found = _parquet_files(path, split) if kind == "parquet" else _saved_files(path, split)
    return DataFiles(kind, path, found)


def _kind(path: Path) -> Kind:
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if _DICT in names or _STATE in names:
            return "hf"
        if any(name.endswith(".parquet") for name in names):
            return "parquet"
        raise DataError(
            "the folder contains neither Parquet files nor a dataset saved by `datasets` (save_to_disk)",
            where=str(path),
            fix="Name a JSONL file, a Parquet file, or a folder of either kind",
        )
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC:
                return "parquet"
    return "parquet" if path.suffix == ".parquet" else "jsonl"


def _parquet_files(path: Path, split: str | None) -> tuple[Path, ...]:
    if not path.is_dir():
        if split is not None:
            raise DataError(
                f"a single Parquet file has no splits, but split is {split!r}",
                where=str(path),
                fix="Remove `split`, or name a folder",
            )
        return (path,)
    # A broken link counts as a missing file; skipping it would silently train on less data.
    files = sorted(entry for entry in path.iterdir() if entry.suffix == ".parquet" and not entry.is_dir())
    if not files:
        raise DataError(
            "the folder contains no Parquet files", where=str(path), fix="Name the folder with the *.parquet files"
        )
    splits = {file: _split_of(file) for file in files}
    several = set(splits.values())
    if split is None:
        # Files without shard numbers may have any name; shards of two splits are two datasets.
        if None not in several and len(several) > 1:
            raise _which_split(path, [name for name in several if name is not None])
        return tuple(files)
    chosen = tuple(file for file in files if split in (splits[file], file.stem))
    if not chosen:
        raise _no_split(path, split, [name or file.stem for file, name in splits.items()])
    return chosen


def _split_of(file: Path) -> str | None:
    match = _NUMBERED.fullmatch(file.stem)
    return None if match is None else match["split"]


def _saved_files(path: Path, split: str | None) -> tuple[Path, ...]:
    folder = path
    if (path / _DICT).is_file():
        splits = _read_object(path / _DICT).get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
            raise DataError("the file lists no splits", where=str(path / _DICT), fix="Save the dataset again")
        if split is None and len(splits) != 1:
            raise _which_split(path, splits)
        chosen = splits[0] if split is None else split
        if chosen not in splits:
            raise _no_split(path, chosen, splits)
        folder = path / chosen
    elif not (path / _STATE).is_file():
        raise DataError(
            f"the folder is not a dataset saved by `datasets`: it has no {_STATE}",
            where=str(path),
            fix="Save it with save_to_disk, or name another `format`",
        )
    state = _read_object(folder / _STATE)
    if folder == path and split is not None and state.get("_split") != split:
        raise _no_split(path, split, [str(state["_split"])] if state.get("_split") else [])
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "an old version of `datasets` saved the dataset with a separate file for the order of its rows",
            where=str(folder),
            fix="Load it with that version, call flatten_indices(), and save it again",
        )
    listed = state.get("_data_files")
    items = listed if isinstance(listed, list) else []
    names = [item.get("filename") if isinstance(item, dict) else None for item in items]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError("the file lists no data files", where=str(folder / _STATE), fix="Save the dataset again")
    return tuple(folder / str(name) for name in names)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable_file(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the dataset again") from error
    if not isinstance(value, dict):
        raise DataError("the file does not contain a JSON object", where=str(path), fix="Save the dataset again")
    return value


def _which_split(path: Path, splits: Iterable[str]) -> DataError:
    return DataError(
        f"there are several splits ({', '.join(sorted(splits))})", where=str(path), fix="Name one in `split`"
    )


def _no_split(path: Path, split: str, splits: Iterable[str]) -> DataError:
    known = ", ".join(sorted(set(splits)))
    return DataError(
        f"there is no split {split!r}" + (f", only {known}" if known else ""),
        where=str(path),
        fix="Name another in `split`" if known else "Remove `split`",
    )


FORMAT = 1


class CopyManifest(BaseModel):
    """Manifest of a converted copy, which shows whether the copy is current.

    `sources`: path, size, mtime_ns and inode of each source file. `written`: size, mtime_ns and inode of the copy.
    `rows`: number of rows of each source file. `left_out`: reason by column that is not in the copy. `pictures`: number
    of pictures that the rows name, in a folder beside the copy.
    """

    version: int
    sources: list[tuple[str, int, int, int]]
    written: tuple[int, int, int]
    rows: list[int]
    left_out: dict[str, str] = {}
    pictures: int = 0


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A converted copy of a source. `path`: file with the JSON lines. `rows`: number of rows of each source file, in
    order.

    `left_out`: for each column that is not in the copy, the reason. `pictures`: folder with the pictures that were in the
    source itself; None if there were none.
    """

    data: DataFiles
    path: Path
    rows: tuple[int, ...]
    left_out: Mapping[str, str]
    pictures: Path | None = None

    def name_of(self, row: int) -> str:
        """Return how errors name row number `row` (from 0) of the copy: file and row in it, or the row of a saved
        dataset.
        """
        if self.data.kind == "hf":
            return f"{self.data.path}, row {row}"
        ends = list(itertools.accumulate(self.rows))
        number = min(bisect.bisect_right(ends, row), len(ends) - 1)
        return f"{self.data.files[number]}, row {row - ends[number] + self.rows[number]}"


@dataclass(frozen=True, slots=True)
class WantedColumns:
    """Which columns of a table to read. `needed`: these must convert to JSON. `only`: whether to skip all others.
    `images`: the column with pictures.
    """

    needed: frozenset[str] = frozenset()
    only: bool = False
    images: str | None = None

    @classmethod
    def of(
        cls, prompt: str, answers: Iterable[str], columns: Sequence[str] | None, images: str | None = None
    ) -> WantedColumns:
        """Return the columns that contain the prompt field, the answer fields (dotted paths) and the pictures, and
        `columns` if given.
        """
        fields = (*answers, *(() if images is None else (images,)))
        roots = {prompt, *fields, *(field.partition(".")[0] for field in fields)}
        return cls(frozenset(roots | set(columns or ())), columns is not None, images)


def find_or_make_copy(
    data: DataFiles,
    split: str | None,
    cache_dir: Path,
    progress: Progress | None = None,
    wanted: WantedColumns = WantedColumns(),
) -> RowCopy:
    """Return the converted copy of these files in `cache_dir`; make it if there is no current one. Blocks.

    `split`: distinguishes copies of one path. `progress`: called with rows done and total rows while a copy is made.
    Raises DataError, also for a needed column that does not convert to JSON; other such columns are left out.
    """
    key = (str(data.path), data.kind, split, *(sorted(wanted.needed) if wanted.only else ()))
    if wanted.images is not None:
        key = (*key, {"images": wanted.images})
    named = blake2b(repr(key).encode(), digest_size=8).hexdigest()
    stem = f".{data.path.name[:40]}.{named}"
    lines, manifest, pictures = (cache_dir / f"{stem}.{end}" for end in ("rows", "copy", "pictures"))
    made = _Copy(data, lines, manifest, pictures, wanted)
    found = made.find()
    if found is not None:
        mark_used(made.manifest)
        if found.pictures is not None:
            mark_used(found.pictures)
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Both the maker and its child process hold the lock: the child of a killed maker continues for a while and would write the
        # same file as the next maker. The kernel releases the lock when both have ended.
        with (cache_dir / f"{stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return made.find() or made.make(lock.fileno(), progress)
    except OSError as error:
        raise DataError(
            f"cannot store a copy of {data.path.name} there ({(error.strerror or str(error)).lower()})",
            where=str(cache_dir),
            fix="Free space and make the folder writable, or name another cache folder",
        ) from error


def mark_used(file: Path) -> None:
    """Set a cache file's modification time to now, because files that are not used for long are deleted
    (`controllers.storage.garbage`). Ignores missing permission.
    """
    with contextlib.suppress(OSError):
        os.utime(file)


@dataclass(frozen=True, slots=True)
class _Copy:
    data: DataFiles
    lines: Path
    manifest: Path
    pictures: Path
    wanted: WantedColumns

    def find(self) -> RowCopy | None:
        """Return the copy if it is complete and made from the present source files, else None.

        Raises DataError if a source file is missing.
        """
        sources = self._sources()
        try:
            manifest = CopyManifest.model_validate_json(self.manifest.read_bytes())
            whole = manifest.written == _known(identify_file(self.lines))
        except (OSError, ValidationError, DataError):
            return None
        if manifest.version != FORMAT or not whole or manifest.sources != sources:
            return None
        if self.wanted.needed & manifest.left_out.keys():
            return None  # make it again, which reports why the column cannot be read
        if manifest.pictures and not self.pictures.is_dir():
            return None
        return self._copy(manifest)

    def _copy(self, manifest: CopyManifest) -> RowCopy:
        pictures = self.pictures if manifest.pictures else None
        return RowCopy(self.data, self.lines, tuple(manifest.rows), manifest.left_out, pictures)

    def make(self, lock: int, progress: Progress | None) -> RowCopy:
        """Convert the source files and store the copy. `lock`: file descriptor of the held lock. Raises DataError,
        OSError.
        """
        sources = self._sources()
        part = self.lines.with_suffix(".part")
        try:
            answer = _convert(self.data, part, self.pictures, self.wanted, lock, progress)
            rows, left_out = list(answer["written"]), dict(answer["left_out"])
            if self._sources() != sources:
                raise DataError(
                    "the data changed while gcore read them",
                    where=str(self.data.path),
                    fix="Wait until they are written completely",
                )
            if not sum(rows):
                raise DataError("the data contain no prompts", where=str(self.data.path), fix="Name another file")
            part.replace(self.lines)
            written = _known(identify_file(self.lines))
            manifest = CopyManifest(
                version=FORMAT,
                sources=sources,
                written=written,
                rows=rows,
                left_out=left_out,
                pictures=answer["pictures"],
            )
            part.write_text(manifest.model_dump_json())
            part.replace(self.manifest)
        finally:
            part.unlink(missing_ok=True)
        return self._copy(manifest)

    def _sources(self) -> list[tuple[str, int, int, int]]:
        return [(str(file), *_known(identify_file(file))) for file in self.data.files]


def _known(identity: FileIdentity) -> tuple[int, int, int]:
    return identity.size, identity.mtime_ns, identity.inode


def _convert(
    data: DataFiles, to: Path, pictures: Path, wanted: WantedColumns, lock: int, progress: Progress | None
) -> dict[str, Any]:
    """Run `gcore.data.tables`, and return its last answer: `written`, `left_out` and `pictures`. Raises DataError."""
    request: dict[str, Any] = {"kind": data.kind, "files": [str(file) for file in data.files], "to": str(to)}
    request |= {"needed": sorted(wanted.needed), "only": wanted.only}
    request |= {"images": wanted.images, "pictures": str(pictures)}
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
            process.kill()  # it has ended, or is no longer needed
    if "written" in answer:
        return answer
    if "error" in answer:
        error = answer["error"]
        raise DataError(error["what"], where=error["where"], fix=error["fix"])
    reason = said.split("\n")[-1] or f"exit code {process.returncode}; it may have run out of memory"
    raise DataError(
        f"the process that reads the data failed ({reason})", where=str(data.path), fix="Correct that and try again"
    )


class DataChanged(DataError):
    """The data changed after they were checked, so no entry of the file can be trusted."""


class Dataset:
    """A dataset whose entries are read by number. Thread-safe.

    The file is closed by `close`, at the end of a `with` block, or when nothing refers to the dataset any more. The last
    is for jobs, whose threads and tasks share a dataset and end in any order.
    """

    def __init__(
        self, path: Path, prompt_field: str, reader: EntryReader, index: EntryIndex, copy: RowCopy | None = None
    ) -> None:
        self.path = path
        """Path of the user's data."""
        self.prompt_field = prompt_field
        self._reader = reader
        self._index = index
        self._copy = copy
        lines = path if copy is None else copy.path
        try:
            self._file = lines.open("rb")
        except OSError as error:
            raise unreadable_file(lines, error) from error
        self._closing = weakref.finalize(self, self._file.close)

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        prompt_field: str,
        answer_fields: tuple[str, ...] = (),
        format: DataFormat = "auto",
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: str | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> Dataset:
        """Open the data at `path`. The first time, and after a change, check all entries and build the index.

        `prompt_field`: name of the field with the prompt. `answer_fields`: must be present in every entry. `columns`:
        further columns to read; None: all that convert to JSON. `images`: field with the paths of an entry's pictures;
        None: entries have no pictures. `cache_dir`: folder for the index, and for the copy of
        data that are not JSONL; None: next to the data. `progress`: called with the amount done and the total while a
        copy (in rows) or an index (in bytes) is made. Raises DataError.
        """
        path = Path(path).absolute()
        data = find_files(path, format, split)
        cache_dir = cache_dir or path.parent
        wanted = WantedColumns.of(prompt_field, answer_fields, columns, images)
        if data.kind == "jsonl":
            copy, lines, name_line = None, path, None
        else:
            copy = find_or_make_copy(data, split, cache_dir, progress, wanted)
            lines, name_line = copy.path, lambda line: copy.name_of(line - 1)
        reader = EntryReader(
            path, prompt_field, answer_fields, name_line, wanted.needed, only=wanted.only, images=images
        )
        identity = identify_file(lines)
        # The checked fields are part of the name, so that a spec with other fields does not reuse this check.
        named = (
            str(lines),
            prompt_field,
            sorted(set(answer_fields)),
            *([sorted(columns)] if columns is not None else []),
            *([{"images": images}] if images is not None else []),
        )
        checked = blake2b(repr(named).encode(), digest_size=8)
        index_path = cache_dir / f".{path.name[:40]}.{checked.hexdigest()}.index"
        index = load_index(index_path, identity) or build_index(lines, index_path, reader, progress)
        mark_used(index_path)
        return cls(path, prompt_field, reader, index, copy)

    def __len__(self) -> int:
        return len(self._index.offsets) - 1

    @property
    def folder(self) -> Path:
        """The folder to which paths in the entries are relative: that of the data file, or the data's own."""
        return self.path if self._copy is not None and self.path.is_dir() else self.path.parent

    @property
    def digest(self) -> str:
        """Digest of the entries' content, 32 hex digits; equal on every machine with the same bytes."""
        return self._index.digest.hex()

    def entry(self, i: int) -> dict[str, Any]:
        """Return entry `i` (from 0, without blank lines) as its JSON object.

        Raises IndexError outside range(len), and DataChanged if the file changed since it was indexed.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"the data have {len(self)} entries, so there is no entry {i}; entries are counted from 0")
        start, end = int(self._index.offsets[i]), int(self._index.offsets[i + 1])
        try:
            line = os.pread(self._file.fileno(), end - start, start).decode("utf-8").strip()
            return self._reader.parse(line, self.name_of(i))
        except (OSError, UnicodeDecodeError, DataError) as error:
            raise DataChanged(
                f"the entry cannot be read ({error.what if isinstance(error, DataError) else error}); "
                "the file was changed or damaged after it was checked",
                where=self.name_of(i),
                fix="Restore the file, or submit the job again"
                if self._copy is None
                else f"Remove the copy of the data, {self._copy.path}",
            ) from error

    @property
    def pictures(self) -> Path | None:
        """The folder with the pictures that were in the data themselves; None if there were none."""
        return None if self._copy is None else self._copy.pictures

    @property
    def left_out(self) -> Mapping[str, str]:
        """For each column of the data that is not read, the reason."""
        return {} if self._copy is None else self._copy.left_out

    def name_of(self, i: int) -> str:
        """Return how errors name entry `i`: path and number."""
        return f"{self.path}, entry {i}" if self._copy is None else self._copy.name_of(i)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.entry(i) for i in range(len(self)))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._closing()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
