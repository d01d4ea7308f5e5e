"""Entries of a JSONL file: their format, and an index of their positions that is built once and mapped into memory.

An entry is a JSON object on one line. Its prompt field is a string, or a list of chat messages. Answer fields are
present and not null. The parser is stricter than Python's in two points: it rejects NaN and Infinity, and lone
surrogates, which no tokenizer accepts. Each error names the file and the line.

Building the index reads the complete file once, in blocks, checks every line and stores where entries begin; blank
lines are skipped. Memory use does not grow with the file. The index records the file's size, modification time and
inode; it is built again if they differ or if it is damaged. It is written to a temporary file and renamed, so that
several processes may build it at once.

Layout, little-endian: a header of 72 bytes (magic, format, reserved, then size, mtime_ns, inode and entries as uint64,
and 16 bytes of BLAKE2b over the file's content), then entries + 1 offsets as uint64. Entry i is in bytes [offset i,
offset i+1).
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gcore.data.messages import parts_problem
from gcore.errors import DataError, explain_os_errors
from gcore.system.files import refuse_constant, replace_shared_file
from gcore.types import entry_value

SHOWN_FIELDS = 8
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

# Created once, because it runs for every line of files with millions of lines.
_decode = json.JSONDecoder(parse_constant=refuse_constant).raw_decode


class EntryReader:
    """Parses and checks the lines of one data file. Stateless and thread-safe."""

    def __init__(
        self,
        path: Path,
        prompt_field: str,
        answer_fields: tuple[str, ...] = (),
        name_line: Callable[[int], str] | None = None,
        needed: frozenset[str] = frozenset(),
        *,
        only: bool = False,
        images: str | None = None,
    ) -> None:
        """`answer_fields`: must be present and not null. `name_line`: returns how errors name a line (from 1) of a
        converted file. `needed`: fields that must be valid; other fields with NaN or lone surrogates are left out.
        `only`: read no other field than the needed ones. `images`: field with the paths of an entry's pictures; None:
        entries have no pictures, so messages must not have parts of type image.
        """
        self._images = images
        self._needed = needed | {prompt_field}
        self._only = only
        self._path = path
        self._name_line = name_line
        self._prompt_field = prompt_field
        self._answer_fields = answer_fields

    def where(self, line: int) -> str:
        """Return how errors name a line. Lines count from 1."""
        return f"{self._path}:{line}" if self._name_line is None else self._name_line(line)

    def blank_lines(self, text: str, first: int, *, cut_off: bool = False) -> list[int]:
        """Check all lines of `text`, and return the indexes of the blank ones.

        `first`: number of its first line in the file. `cut_off`: whether its last line has no newline. Raises DataError
        for the first mistake.
        """
        blank: list[int] = []
        fits = self._fits
        careful = _SURROGATE.search(text) is not None
        lines = text.split("\n")
        for place, line in enumerate(lines):
            # Fast path for lines without surrounding spaces and surrogates; other lines are parsed again below.
            try:
                entry, end = _decode(line)
                if end == len(line) and not careful and fits(entry):
                    continue
            except (ValueError, RecursionError):
                pass
            if not line.strip():
                blank.append(place)
            else:
                self.parse(line, self.where(first + place), cut_off=cut_off and place == len(lines) - 1)
        return blank

    def parse(self, line: str, where: str, *, cut_off: bool = False) -> dict[str, Any]:
        """Parse and check the entry on a line. `where`: names the line in errors. `cut_off`: whether it has no newline.

        Raises DataError.
        """
        try:
            entry = self._decoded(line)
        except (ValueError, RecursionError) as error:
            if cut_off:
                raise DataError(
                    "the last line is cut off: it has no newline and is not valid JSON",
                    where=where,
                    fix="Copy or write the file again; it is incomplete",
                ) from error
            problem = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"not valid JSON ({problem})",
                where=where,
                fix="Write one JSON object per line, without line breaks in it",
            ) from error
        if not isinstance(entry, dict):
            raise DataError(
                f"the line is {_kind(entry)}, not a JSON object",
                where=where,
                fix=f'Write {{"{self._prompt_field}": ...}}, one object per line',
            )
        if self._only:
            entry = {name: value for name, value in entry.items() if name in self._needed}
        self._check_prompt(entry, where)
        self._check_answers(entry, where)
        if self._images is not None and (wrong := images_problem(entry_value(entry, self._images))) is not None:
            raise DataError(
                f"field {self._images!r} is {wrong}",
                where=where,
                fix="Write the paths of the entry's pictures as a list of texts, or one path as a text",
            )
        if _SURROGATE.search(line):
            entry = {name: value for name, value in entry.items() if name in self._needed or _is_text(value)}
            self._check_text(entry, where)
        return entry

    def _decoded(self, line: str) -> Any:
        """Return the JSON value on a line, without fields that are not needed and contain NaN or Infinity.

        Raises ValueError, RecursionError.
        """
        try:
            return json.loads(line, parse_constant=refuse_constant)
        except json.JSONDecodeError:
            raise
        except ValueError:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise
            for name in [name for name in entry if name not in self._needed and not _is_finite(entry[name])]:
                del entry[name]
            if not _is_finite(entry):
                raise
            return entry

    def _fits(self, entry: Any) -> bool:
        if type(entry) is not dict:
            return False
        prompt = entry.get(self._prompt_field)
        if not prompt or (type(prompt) is not str and self._message_problem(prompt) is not None):
            return False
        if self._images is not None and images_problem(entry_value(entry, self._images)) is not None:
            return False
        return all(entry_value(entry, field) is not None for field in self._answer_fields)

    def _check_prompt(self, entry: dict[str, Any], where: str) -> None:
        field = self._prompt_field
        if field not in entry:
            raise DataError(
                f"the entry has no field {field!r}, only {_names(entry)}",
                where=where,
                fix="Name the field with the prompt in data.prompt, or in the source's `prompt`",
            )
        prompt = entry[field]
        if prompt == "":
            raise DataError(f"field {field!r} is empty", where=where, fix="Remove the entry, or write a prompt")
        problem = None if isinstance(prompt, str) else self._message_problem(prompt)
        if problem is not None:
            raise DataError(
                f"field {field!r} is {problem}",
                where=where,
                fix='A prompt is a string, or a list of {"role": ..., "content": ...}',
            )

    def _message_problem(self, prompt: Any) -> str | None:
        return _message_problem(prompt, pictures=self._images is not None)

    def _check_answers(self, entry: dict[str, Any], where: str) -> None:
        for field in self._answer_fields:
            if entry_value(entry, field) is None:
                missing = f"the entry has no field {field!r}, only {_names(entry)}"
                raise DataError(
                    f"field {field!r} is null" if field in entry else missing,
                    where=where,
                    fix="Name the field with the expected answer in reward.answer or in the source's reward, or name a reward that needs none",
                )

    def _check_text(self, entry: dict[str, Any], where: str) -> None:
        try:
            json.dumps(entry, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                "the entry contains a lone surrogate (\\ud800 to \\udfff), which is not a character",
                where=where,
                fix="Remove it, or write the character itself",
            ) from error


def _is_finite(value: Any) -> bool:
    """Return whether a value contains neither NaN nor Infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _is_text(value: Any) -> bool:
    """Return whether a value contains no lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def images_problem(value: Any) -> str | None:
    """Return what is wrong with the field of an entry's pictures; None if it is a path, a list of paths, or missing."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list):
        return _kind(value)
    for number, path in enumerate(value, 1):
        if not isinstance(path, str):
            return f"a list whose item {number} is {_kind(path)}, not a path"
    return None


def _message_problem(prompt: Any, *, pictures: bool) -> str | None:
    """Return what is wrong with a prompt that should be a list of chat messages; None if it is valid. `pictures`: whether
    messages may have parts of type image."""
    if not isinstance(prompt, list):
        return _kind(prompt)
    if not prompt:
        return "an empty list"
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict):
            return f"a list whose item {number} is {_kind(message)}, not a chat message"
        if not isinstance(message.get("role"), str):
            return f"a list whose message {number} has no text in 'role'"
        content = message.get("content")
        if content is None and not _calls_tools(message):
            return f"a list whose message {number} has no text in 'content'"
        if content is None or isinstance(content, str):
            continue
        if (problem := parts_problem(content, pictures=pictures)) is not None:
            return f"a list whose message {number} has no text in 'content': it {problem}"
    return None


def _calls_tools(message: dict[str, Any]) -> bool:
    """Return whether a message without content is valid because it calls tools."""
    calls = message.get("tool_calls")
    return message.get("content") is None and isinstance(calls, list) and bool(calls)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _names(entry: dict[str, Any]) -> str:
    names = [repr(name) for name in list(entry)[:SHOWN_FIELDS]]
    more = len(entry) - len(names)
    return (", ".join(names) + (f" and {more} more" if more > 0 else "")) if names else "an empty object"


Progress = Callable[[int, int], None]
"""Function that is called with the amount done and the total: bytes for an index, rows for a copy."""

FORMAT = 1
BLOCK_BYTES = 1 << 20
MAX_ENTRY_BYTES = 64 << 20
_MAGIC = b"gcoreidx"
_HEADER = struct.Struct("<8sIIQQQQ16s8x")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
"""Names of compression formats by the first bytes of their files. No JSON object begins with these bytes."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Identifies a file's content without reading it: size in bytes, modification time, inode."""

    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, eq=False)
class EntryIndex:
    """Index of a JSONL file. `offsets` [entries + 1] uint64, memory-mapped: where entries begin, in bytes.

    `digest`: 16 bytes of BLAKE2b over the file's content, equal on every node.
    """

    identity: FileIdentity
    offsets: npt.NDArray[np.uint64]
    digest: bytes


def identify_file(path: Path) -> FileIdentity:
    """Return the identity of the file at `path`. Raises DataError if it is missing or not a regular file."""
    try:
        found = path.stat()
    except OSError as error:
        raise unreadable_file(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise DataError(f"the dataset is {kind}", where=str(path), fix="Name a JSONL file with one prompt per line")
    return FileIdentity(found.st_size, found.st_mtime_ns, found.st_ino)


def unreadable_file(path: Path, error: OSError) -> DataError:
    """Return the DataError for a file that the system could not read because of `error`."""
    reason = (error.strerror or type(error).__name__).lower()
    return DataError(f"cannot read the file ({reason})", where=str(path), fix="Name an existing, readable file")


def load_index(index_path: Path, identity: FileIdentity) -> EntryIndex | None:
    """Load the index at `index_path`; None if it is missing, incomplete, or of a file with another identity."""
    try:
        with index_path.open("rb") as file:
            header = file.read(_HEADER.size)
            length = os.fstat(file.fileno()).st_size
        if len(header) != _HEADER.size:
            return None
        magic, version, _, size, mtime_ns, inode, entries, digest = _HEADER.unpack(header)
        if magic != _MAGIC or version != FORMAT or FileIdentity(size, mtime_ns, inode) != identity:
            return None
        if entries < 1 or length != _HEADER.size + 8 * (entries + 1):
            return None
        offsets = np.memmap(index_path, dtype="<u8", mode="r", offset=_HEADER.size, shape=(entries + 1,))
    except OSError:
        return None
    return EntryIndex(identity, offsets, digest)


def build_index(path: Path, index_path: Path, reader: EntryReader, progress: Progress | None) -> EntryIndex:
    """Read and check the complete file at `path`, and write its index. Raises DataError for the first mistake."""
    identity = identify_file(path)
    with (
        explain_os_errors(
            f"cannot write the index of {path.name} there",
            DataError,
            where=index_path.parent,
            fix="Free space and make the folder writable, or name another cache folder",
        ),
        replace_shared_file(index_path) as out,
    ):
        _write_index(path, identity, out, reader, progress)
    index = load_index(index_path, identity)
    if index is None:
        raise DataError("cannot read the index that was just written", where=str(index_path), fix="Check the disk")
    return index


def _write_index(
    path: Path, identity: FileIdentity, out: BinaryIO, reader: EntryReader, progress: Progress | None
) -> None:
    try:
        data = path.open("rb")
    except OSError as error:
        raise unreadable_file(path, error) from error
    scan = _Scan(path, reader, out, progress, identity.size)
    out.write(bytes(_HEADER.size))  # filled in at the end
    with data:
        scan.run(data)
    if identify_file(path) != identity:
        raise DataError(
            "the file changed while gcore read it", where=str(path), fix="Wait until it is written completely"
        )
    if not scan.entries:
        raise DataError("the file contains no prompts", where=str(path), fix="Write one JSON object per line")
    out.write(struct.pack("<Q", identity.size))
    out.seek(0)
    known = (identity.size, identity.mtime_ns, identity.inode)
    out.write(_HEADER.pack(_MAGIC, FORMAT, 0, *known, scan.entries, scan.digest))
    out.flush()
    os.fsync(out.fileno())


class _Scan:
    """One pass over a file in blocks: checks every line, and writes the offsets of the entries to `out`."""

    def __init__(self, path: Path, reader: EntryReader, out: BinaryIO, progress: Progress | None, size: int) -> None:
        self._path = path
        self._reader = reader
        self._out = out
        self._progress = progress
        self._size = size
        self._hash = blake2b(digest_size=16)
        self._line = 1
        self._offset = 0
        self.entries = 0

    @property
    def digest(self) -> bytes:
        """BLAKE2b digest of everything that was read so far."""
        return self._hash.digest()

    def run(self, data: BinaryIO) -> None:
        """Scan to the end of the file."""
        rest = b""
        while block := data.read(BLOCK_BYTES):
            self._hash.update(block)
            if not self._offset and not rest:
                self._refuse_compressed(block)
                if block.startswith(_BYTE_ORDER_MARK):
                    self._offset, block = len(_BYTE_ORDER_MARK), block[len(_BYTE_ORDER_MARK) :]
            cut = block.rfind(b"\n")
            if cut < 0:
                rest += block
                self._check_length(rest)
                continue
            self._take(rest + block[:cut], cut_off=False)
            rest = block[cut + 1 :]
            if self._progress is not None and self._offset < self._size:
                self._progress(self._offset, self._size)
        if rest:
            self._take(rest, cut_off=True)
        if self._progress is not None:
            self._progress(self._size, self._size)

    def _take(self, lines: bytes, *, cut_off: bool) -> None:
        """Check complete lines (without the last newline), and write the offsets of their entries."""
        try:
            text = lines.decode("utf-8")
        except UnicodeDecodeError as error:
            self._reader.blank_lines(
                lines[: lines.rfind(b"\n", 0, error.start) + 1].decode(), self._line
            )  # earlier mistakes
            line = self._line + lines.count(b"\n", 0, error.start)
            raise DataError(
                f"the line is not UTF-8 text (byte 0x{lines[error.start]:02x})",
                where=self._reader.where(line),
                fix="Convert the file to UTF-8",
            ) from error
        blank = self._reader.blank_lines(text, self._line, cut_off=cut_off)
        newlines = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n"))
        starts = np.concatenate(([0], newlines + 1)).astype("<u8") + np.uint64(self._offset)
        kept = np.delete(starts, blank) if blank else starts
        self._out.write(kept.tobytes())
        self.entries += len(kept)
        self._line += len(starts)
        self._offset += len(lines) + 1

    def _refuse_compressed(self, beginning: bytes) -> None:
        for magic, name in _COMPRESSED.items():
            if beginning.startswith(magic):
                raise DataError(
                    f"the file is compressed ({name})",
                    where=str(self._path),
                    fix="Decompress it; entries are read at random positions, so the file must be plain JSON lines",
                )

    def _check_length(self, rest: bytes) -> None:
        if len(rest) > MAX_ENTRY_BYTES:
            raise DataError(
                f"the line is longer than {MAX_ENTRY_BYTES >> 20} MiB",
                where=self._reader.where(self._line),
                fix="Write one JSON object per line, and check that this is a JSONL file",
            )
