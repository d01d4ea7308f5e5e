"""`python -m gcore.prompts.tables`: write the rows of Parquet or Arrow files as JSON lines, in a separate process.

pyarrow needs about 70 MB of memory, and more while it reads, which a controller should not keep. So this module only
runs as a child process. `gcore.data.dataset` starts it with a request on standard input, and reads one JSON object per
line from its standard output: {"rows": done, "of": all} as progress, then {"written": [rows of each file]}, or
{"error": {"what", "where", "fix"}}.

Pictures in the column that `images` names (binary values, or objects with `bytes` and `path` as `datasets` saves them, or
lists of either) are written to files named by their SHA-256, and the lines get their names: `sha256/HEX.png`. A path
without bytes is kept as it is.

Integers, floats, booleans, text, lists and objects are written as JSON; dates, times and decimals as text. Null fields
of a row are kept. Null fields of nested objects are left out, because an object column has every field in every row.
Values that JSON cannot represent (binary data, NaN and Infinity, text that is not UTF-8) raise an error in needed
columns, and are left out elsewhere. `gcore.data.jsonl` checks the entries themselves.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from gcore.errors import DataError
from gcore.media.picture_index import WRITTEN

BATCH_ROWS = 2048

PIECE_BYTES = 16 << 20
"""Approximate size in bytes of the pieces in which batches of large rows are written. As Python objects and as text a
piece is several times larger.
"""

BUFFER_BYTES = 1 << 20

TELL_EVERY = 16
"""Number of batches between two progress reports."""


_SUFFIXES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp"}
"""Ends of the names of picture files by their first bytes."""


class PictureWriter:
    """Writes the pictures of a column to files in `folder`."""

    def __init__(self, column: str, folder: Path) -> None:
        self.column = column
        self.written = 0
        self._folder = folder

    def names(self, value: Any) -> Any:
        """Return a value of the column with the names of its pictures in place of their bytes, after writing them.

        Raises ValueError for a value that is no picture, and OSError.
        """
        if isinstance(value, list):
            if any(item is None for item in value):
                raise ValueError("null in a list of pictures")
            return [self.names(item) for item in value]
        if isinstance(value, bytes):
            return self._write(value)
        if isinstance(value, dict):
            if value.get("bytes") is not None:
                return self._write(value["bytes"])
            if value.get("path") is None:
                raise ValueError("a picture with neither bytes nor path")
            return value["path"]
        return value

    def _write(self, data: bytes) -> str:
        suffix = next((end for begin, end in _SUFFIXES.items() if data.startswith(begin)), "bin")
        name = f"{WRITTEN}{hashlib.sha256(data).hexdigest()}.{suffix}"
        file = self._folder / name
        if not file.exists() or file.stat().st_size != len(data):
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.part")
            part.write_bytes(data)
            part.replace(file)
        self.written += 1
        return name


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Result of a conversion. `rows`: number of rows of each file. `left_out`: for each column of which values were left
    out, the reason. `pictures`: number of pictures that were written to files.
    """

    rows: list[int]
    left_out: dict[str, str]
    pictures: int = 0


class UnsuitableColumn(Exception):
    """JSON cannot represent the type of a column. The text names what the column holds."""


def write_rows(
    kind: str,
    files: list[Path],
    to: Path,
    out: TextIO,
    needed: frozenset[str] = frozenset(),
    *,
    only: bool = False,
    pictures: PictureWriter | None = None,
) -> WrittenRows:
    """Write all rows of `files` to the file `to`, one JSON object per line.

    `kind`: "parquet" or "hf". `out`: stream for progress reports. `needed`: columns in which a value that JSON cannot
    represent is an error. `only`: read no other column. `pictures`: writes the pictures of its column. Raises DataError.
    """
    left_out: dict[str, str] = {}
    readers = [_Reader(kind, file, needed, left_out, only=only, pictures=pictures) for file in files]
    total = sum(reader.rows for reader in readers)
    written: list[int] = []
    with to.open("wb", buffering=BUFFER_BYTES) as lines:
        for reader in readers:
            rows = 0
            pieces = (piece for batch in reader.batches() for piece in _pieces(batch))
            for number, batch in enumerate(pieces):
                text = _as_lines(batch, reader, rows)
                lines.write(text)
                rows += batch.num_rows
                if number % TELL_EVERY == 0 and sum(written) + rows < total:
                    _tell(out, {"rows": sum(written) + rows, "of": total})
            written.append(rows)
        lines.flush()
        os.fsync(lines.fileno())
    _tell(out, {"rows": total, "of": total})
    return WrittenRows(written, left_out, 0 if pictures is None else pictures.written)


class _Reader:
    """Reads one file in batches of rows. `rows`: its number of rows, from its metadata or from a pass over the file."""

    def __init__(
        self,
        kind: str,
        path: Path,
        needed: frozenset[str],
        left_out: dict[str, str],
        *,
        only: bool,
        pictures: PictureWriter | None,
    ) -> None:
        self.path = path
        self.pictures = pictures
        self.needed = needed
        self.left_out = left_out
        self._kind = kind
        with _ArrowErrors(path, kind):
            if kind == "parquet":
                with pq.ParquetFile(path) as file:
                    self.rows, schema = file.metadata.num_rows, file.schema_arrow
            else:
                with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
                    schema, self.rows = stream.schema, sum(batch.num_rows for batch in stream)
        self._names = self._readable(schema, only=only)

    def _readable(self, schema: Any, *, only: bool) -> list[str]:
        """Return the names of the columns to read. Raises DataError for a needed column that JSON cannot represent."""
        names = [name for name in schema.names if not only or name in self.needed]
        for name in list(names):
            if schema.names.count(name) > 1:
                raise DataError(f"two columns have the name {name!r}", where=str(self.path), fix="Rename one of them")
            try:
                if not self.has_pictures(name, schema.field(name).type):
                    _plain(schema.field(name).type)
            except UnsuitableColumn as error:
                if name not in self.needed:
                    self.left_out[name] = f"it holds {error}"
                    names.remove(name)
                    continue
                is_of_pictures = self.pictures is not None and name == self.pictures.column
                raise DataError(
                    f"column {name!r} holds {error}, which JSON cannot represent",
                    where=str(self.path),
                    fix="Write each picture as its bytes, or as an object with bytes and path"
                    if is_of_pictures
                    else "Remove the column from the data, or write it as text",
                ) from error
        if not names and self.left_out:
            name, reason = next(iter(self.left_out.items()))
            raise DataError(
                f"no column can be read: for example {name!r}, {reason}",
                where=str(self.path),
                fix="Write the prompts into a text column",
            )
        return names

    def has_pictures(self, name: str, kind: Any) -> bool:
        """Return whether the column `name` of type `kind` has pictures that are to be written to files."""
        return self.pictures is not None and name == self.pictures.column and _holds_pictures(kind)

    def batches(self) -> Iterator[Any]:
        with _ArrowErrors(self.path, self._kind):
            if self._kind == "parquet":
                # A buffer instead of whole column chunks, because writers often put a million rows into one row group.
                with pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                    yield from file.iter_batches(batch_size=BATCH_ROWS, use_threads=False, columns=self._names)
            else:
                with pa.memory_map(str(self.path)) as source, pa.ipc.open_stream(source) as stream:
                    for batch in stream:
                        for start in range(0, batch.num_rows, BATCH_ROWS):
                            yield batch.select(self._names).slice(start, BATCH_ROWS)


class _ArrowErrors:
    """Turns Arrow's errors about a file into a DataError."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = {"parquet": "a Parquet file", "hf": "an Arrow file as `datasets` saves it"}[kind]

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            reason = (error.strerror or type(error).__name__).lower()
            raise DataError(
                f"cannot read the file ({reason})", where=str(self._path), fix="Name existing, readable files"
            ) from error
        if isinstance(error, pa.ArrowException | OSError | ValueError) and not isinstance(error, BrokenPipeError):
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise DataError(
                f"the file is not {self._kind}, or is damaged ({reason})",
                where=str(self._path),
                fix="Copy or write the file again, or name another `format`",
            ) from error


def _plain(kind: Any) -> Any:
    """Return the type to which a column of type `kind` is converted before it is written as JSON; `kind` if it needs no
    conversion. Raises UnsuitableColumn.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if types.is_dictionary(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(_plain(kind.value_type))
        return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind) or types.is_decimal(kind):
        return pa.string()
    plain = (
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
    )
    if not plain:
        raise UnsuitableColumn("binary data" if "binary" in str(kind) else f"values of the type {kind}")
    return kind


def _holds_pictures(kind: Any) -> bool:
    """Return whether the values of a type have the bytes of pictures."""
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_pictures(kind.storage_type)
    if types.is_dictionary(kind):
        return _holds_pictures(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _holds_pictures(kind.value_type)
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_pictures(kind.field("bytes").type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _pieces(batch: Any) -> Iterator[Any]:
    rows = max(1, batch.num_rows * PIECE_BYTES // max(1, batch.nbytes))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _as_lines(batch: Any, reader: _Reader, first: int) -> bytes:
    """Return the rows of a batch as JSON lines. `first`: number of the first row in the file."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if reader.has_pictures(name, column.type):
            columns[name] = _written_pictures(column, reader, first)
            continue
        plain = _plain(column.type)
        try:
            values = (column if plain == column.type else column.cast(plain)).to_pylist(maps_as_pydicts="strict")
        except (ValueError, LookupError, pa.ArrowException) as error:
            said, number = str(error).split("\n")[0], _bad_row(column)
            if name in reader.needed:
                raise _of_row(number, reader.path, first, name, said) from error
            reader.left_out.setdefault(name, f"{said} in row {first + number}")
            continue
        columns[name] = [_without_null(value) for value in values] if types.is_nested(plain) else values
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    try:
        return "".join([_encode(row) + "\n" for row in rows]).encode("utf-8")
    except ValueError:
        return _slowly(rows, reader, first)


def _written_pictures(column: Any, reader: _Reader, first: int) -> list[Any]:
    """Write the pictures of a column to files, and return their names, by row. Raises DataError, OSError."""
    assert reader.pictures is not None
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    names = []
    for number, value in enumerate(stored):  # one row at a time, because pictures are large
        try:
            names.append(reader.pictures.names(value.as_py()))
        except ValueError as error:
            raise _of_row(number, reader.path, first, reader.pictures.column, str(error)) from error
    return names


def _slowly(rows: list[dict[str, Any]], reader: _Reader, first: int) -> bytes:
    """Convert rows to JSON lines one by one, without values that JSON cannot represent.

    Raises DataError for such a value in a needed column.
    """
    for number, row in enumerate(rows):
        for name, value in list(row.items()):
            try:
                _encode(value).encode("utf-8")
            except ValueError as error:
                said = "a lone surrogate" if isinstance(error, UnicodeEncodeError) else "NaN or Infinity"
                if name in reader.needed:
                    raise _of_row(number, reader.path, first, name, f"{said} is not JSON") from error
                reader.left_out.setdefault(name, f"values that are no JSON, such as {said} in row {first + number}")
                del row[name]
    return "".join([_encode(row) + "\n" for row in rows]).encode("utf-8")


def _bad_row(column: Any) -> int:
    """Return the index of the first row of a column that does not convert to Python values."""
    for number in range(len(column)):
        try:
            column.slice(number, 1).to_pylist(maps_as_pydicts="strict")
        except (ValueError, LookupError, pa.ArrowException):
            return number
    return 0


def _of_row(number: int, path: Path, first: int, name: str, problem: str) -> DataError:
    return DataError(
        f"column {name!r} cannot be read ({problem})",
        where=f"{path}, row {first + number}",
        fix="Correct the value, or write null",
    )


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _tell(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()


def main() -> int:
    """Read the request from standard input, write the rows, report the result, and return the exit code."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    request = json.loads(sys.stdin.read())
    pictures = PictureWriter(request["images"], Path(request["pictures"])) if request.get("images") else None
    try:
        written = write_rows(
            request["kind"],
            [Path(file) for file in request["files"]],
            Path(request["to"]),
            sys.stdout,
            frozenset(request.get("needed", ())),
            only=request.get("only", False),
            pictures=pictures,
        )
    except BrokenPipeError:
        return 1  # the parent has ended
    except OSError as error:
        what = f"cannot write the rows ({(error.strerror or str(error)).lower()})"
        _tell(
            sys.stdout, {"error": {"what": what, "where": str(Path(request["to"]).parent), "fix": "Free space there"}}
        )
        return 2
    except DataError as error:
        _tell(sys.stdout, {"error": {"what": error.what, "where": error.where, "fix": error.fix}})
        return 2
    _tell(sys.stdout, {"written": written.rows, "left_out": written.left_out, "pictures": written.pictures})
    return 0
