"""The entries on disk: JSON lines, any of which is read when it is asked for.

They are the user's own file, or a copy of Parquet files or of a saved dataset (`gcore.prompts.copies`).

The whole file is checked once, when its index is built (`gcore.prompts.index`), so that a mistake in line nine million is
told before anything starts. After that only the index is mapped, eight bytes an entry; entries are read by position and
not kept. The file must not change while it is used: an entry that no longer reads is an error that says so.

It knows no shards and no order (`gcore.prompts.shards`), and does not tokenize (`gcore.prompts.render`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

from gcore.config.sources import DataFormat
from gcore.errors import DataError
from gcore.prompts.copies import RowCopy, copy_of, touch
from gcore.prompts.entries import EntryReader
from gcore.prompts.formats import find_files
from gcore.prompts.index import EntryIndex, Progress, build_index, identify, load_index, unreadable


class DataChanged(DataError):
    """What the index names is no longer there: the whole file is in doubt, not one entry."""


class Dataset:
    """Entries by number. Safe to use from several threads; close it, or use it as a context manager."""

    def __init__(
        self, path: Path, prompt_field: str, reader: EntryReader, index: EntryIndex, copy: RowCopy | None = None
    ) -> None:
        self.path = path
        """Where the user's data lie."""
        self.prompt_field = prompt_field
        self._reader = reader
        self._index = index
        self._copy = copy
        lines = path if copy is None else copy.path
        try:
            self._file = lines.open("rb")
        except OSError as error:
            raise unreadable(lines, error) from error

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        prompt_field: str,
        answer_fields: tuple[str, ...] = (),
        format: DataFormat = "auto",
        split: str | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
    ) -> Dataset:
        """Open what lies at `path`; the first time, and when it has changed, check all of it and build its index.

        `answer_fields` must be there in every entry. The index, and the copy of what is no JSONL file, lie in
        `cache_dir`, or beside the data. `progress` is called with how much is done and how much there is in all, only
        when a copy or an index is made: rows of the first, bytes of the second. Raises DataError.
        """
        path = Path(path).absolute()
        data = find_files(path, format, split)
        cache_dir = cache_dir or path.parent
        if data.kind == "jsonl":
            copy, lines, name_line = None, path, None
        else:
            copy = copy_of(data, split, cache_dir, progress)
            lines, name_line = copy.path, lambda line: copy.name_of(line - 1)
        reader = EntryReader(path, prompt_field, answer_fields, name_line)
        identity = identify(lines)
        # What was checked is part of the name, so that a spec with another field does not trust this check.
        checked = blake2b(repr((str(lines), prompt_field, sorted(set(answer_fields)))).encode(), digest_size=8)
        index_path = cache_dir / f".{path.name[:40]}.{checked.hexdigest()}.index"
        index = load_index(index_path, identity) or build_index(lines, index_path, reader, progress)
        touch(index_path)
        return cls(path, prompt_field, reader, index, copy)

    def __len__(self) -> int:
        return len(self._index.offsets) - 1

    @property
    def digest(self) -> str:
        """Names the entries' content, 32 hex digits: the same wherever the same bytes lie."""
        return self._index.digest.hex()

    def entry(self, i: int) -> dict[str, Any]:
        """Entry `i` (from 0, blank lines not counted) as its JSON object.

        Raises IndexError outside range(len), DataChanged if the file has changed since it was indexed.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"entry {i} of {len(self)}")
        start, end = int(self._index.offsets[i]), int(self._index.offsets[i + 1])
        try:
            line = os.pread(self._file.fileno(), end - start, start).decode("utf-8").strip()
            return self._reader.parse(line, self.name_of(i))
        except (OSError, UnicodeDecodeError, DataError) as error:
            raise DataChanged(
                f"the entry cannot be read ({error.what if isinstance(error, DataError) else error}); "
                "the file was changed or damaged since it was checked",
                where=self.name_of(i),
                fix="Put the file back as it was, or submit the job again"
                if self._copy is None
                else f"Remove the copy of the data, {self._copy.path}",
            ) from error

    def name_of(self, i: int) -> str:
        """How messages name entry `i`."""
        return f"{self.path}, entry {i}" if self._copy is None else self._copy.name_of(i)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.entry(i) for i in range(len(self)))

    def close(self) -> None:
        """Close the file. Closing twice is no error."""
        self._file.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
