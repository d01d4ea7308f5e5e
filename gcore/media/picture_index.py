"""The pictures of a data source: their SHA-256 and sizes, found once and kept in a cache file.

Opening the index reads and checks every picture that the data name, in threads, before anything starts. Later openings
read only files whose size, modification time or inode changed, and the names of pictures again only if the data did.
The cache file is written to a temporary name and renamed, so that several processes may write it at once. It has a JSON
object on the first line, and then one JSON list for each picture.

A name in the data is a path relative to the data file. It must stay in the data's folder, also after symbolic links are
followed: a data file from elsewhere must not be able to show other files of the machine to a model. Names that begin
with `sha256/` in a converted copy of the data (`gcore.data.tables`) belong to the folder of the copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from gcore.errors import DataError, explain_os_errors
from gcore.media.pictures import MAX_DECODE_PIXELS, PictureError, inspect_picture, open_picture
from gcore.system.files import replace_shared_file

FORMAT = 1

BATCH = 64
"""Number of pictures that a thread checks between two progress reports."""

SHOWN_PROBLEMS = 8
THREADS_PER_CORE, MOST_THREADS = 4, 16
"""Threads that check pictures. More than one a core, because network file systems answer late."""

WRITTEN = "sha256/"
"""Prefix of the names of pictures that a conversion wrote out of a table."""

MOST_PATH = 4096
"""Longest path of a picture in an entry, in characters. Longer ones are pictures as text, which no message shows whole."""

_INLINE = "Write the picture to a file, and the file's path relative to the data file into the entry"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")

Progress = Callable[[int, int], None]
"""Function that is called with the number of checked pictures and their total number."""


class PictureChanged(PictureError):
    """A picture changed after it was checked."""


def read_verified(path: Path | str, sha256: str) -> bytes:
    """Return the bytes of a picture file. Raises PictureChanged if their SHA-256 is not `sha256`, and PictureError."""
    with open_picture(path) as (file, where):
        data = _read(file, where)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise PictureChanged(
            "the picture changed after it was checked",
            where=str(path),
            fix="Restore the file, or submit the job again",
        )
    return data


class PictureIdentity(NamedTuple):
    """Identifies a file's content without reading it: size in bytes, modification time, inode."""

    size: int
    mtime_ns: int
    inode: int


class IndexedPicture(NamedTuple):
    """A checked picture. `width`, `height`: in pixels, after the EXIF rotation. `entry`: number of the first entry that
    names it."""

    sha256: str
    width: int
    height: int
    identity: PictureIdentity
    entry: int


@dataclass(frozen=True, slots=True)
class PictureRoots:
    """The folders in which a source's pictures may be. `data`: the folder of the data file. `written`: where a conversion
    of the data wrote pictures; None: it wrote none."""

    data: Path
    written: Path | None = None

    def key(self, name: str) -> str:
        """Return the relative path of a picture by which the index knows it, from its name in the data.

        Reads no file. Raises PictureError for a URL, and for a path that leaves the data's folder.
        """
        if _URL.match(name):
            data = name.startswith("data:")
            fix = _INLINE if data else "Download it, and write a path relative to the data file"
            raise PictureError(f"the picture is a URL ({name[:60]!r})", fix=fix)
        if len(name) > MOST_PATH:
            raise PictureError(
                f"the path of the picture has {len(name):,} characters ({name[:60]!r}...); the maximum is {MOST_PATH:,}",
                fix=_INLINE,
            )
        path = name
        if posixpath.isabs(name):
            inside = f"{self.data}/"
            if not name.startswith(inside):
                raise self._outside(name)
            path = name.removeprefix(inside)
        if ".." in path.split("/") or "\0" in path:
            raise self._outside(name)
        return posixpath.normpath(path)

    def file(self, key: str) -> Path:
        """Return the file of a picture."""
        if self.written is not None and key.startswith(WRITTEN):
            return self.written / key
        return self.data / key

    def check(self, key: str) -> Path:
        """Return the file of a picture. Raises PictureError if a symbolic link leads out of the folder."""
        file = self.file(key)
        root = self.written if self.written is not None and key.startswith(WRITTEN) else self.data
        real, top = os.path.realpath(file), os.path.realpath(root)
        if not real.startswith(top.rstrip("/") + "/"):
            raise self._outside(key)
        return file

    def _outside(self, name: str) -> PictureError:
        return PictureError(
            f"the picture {name[:200]!r} is outside the data's folder",
            where=str(self.data),
            fix="Put the pictures into the folder of the data file, or below it",
        )


class PictureIndex:
    """The checked pictures of a data source. Thread-safe."""

    def __init__(self, roots: PictureRoots, pictures: Mapping[str, IndexedPicture]) -> None:
        """`pictures`: by their key (`PictureRoots.key`)."""
        self.roots = roots
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._pictures)

    def __iter__(self) -> Iterator[IndexedPicture]:
        return iter(self._pictures.values())

    def find(self, name: str) -> tuple[Path, IndexedPicture]:
        """Return the file of a picture and what is known about it. `name`: as in the data. Raises PictureError."""
        key = self.roots.key(name)
        found = self._pictures.get(key)
        if found is None:
            raise PictureError(
                f"the picture {name[:200]!r} is not in the index of the data",
                where=str(self.roots.data),
                fix="Submit the job again; the data changed after they were checked",
            )
        return self.roots.file(key), found

    def verify(self, name: str) -> None:
        """Check that a picture has not changed since it was indexed. `name`: as in the data.

        Reads the file only if its size, time or inode changed. Raises PictureChanged, PictureError.
        """
        path, known = self.find(name)
        with open_picture(path) as (file, _):
            same = _identity(file.fileno()) == known.identity
        if not same:
            read_verified(path, known.sha256)

    @cached_property
    def digest(self) -> str:
        """Digest of the pictures, 32 hex digits: BLAKE2b over path, SHA-256, width and height of each, sorted by path.
        Equal on every machine with the same pictures."""
        h = hashlib.blake2b(digest_size=16)
        for key in sorted(self._pictures):
            one = self._pictures[key]
            h.update(json.dumps([key, one.sha256, one.width, one.height]).encode() + b"\n")
        return h.hexdigest()


def open_picture_index(
    cache: Path,
    roots: PictureRoots,
    source: str,
    named: Callable[[], Iterable[tuple[str, int]]],
    name_of: Callable[[int], str],
    *,
    progress: Progress | None = None,
    max_decode_pixels: int = MAX_DECODE_PIXELS,
) -> PictureIndex:
    """Check the pictures of a data source, and return their index. Blocks.

    `cache`: file that keeps the index. `source`: identifies the data that name the pictures. `named`: returns each
    picture's name and the number of its entry; called only if the cache is of other data. `name_of`: returns how errors
    name an entry. `progress`: called while pictures are checked. Raises DataError that names the first pictures that
    cannot be used, with their entries.
    """
    known_source, known = _load(cache)
    problems: list[tuple[int, str]] = []
    if known_source == source:
        entries = {key: one.entry for key, one in known.items()}
    else:
        entries = _collect(roots, named(), problems)
    checked: dict[str, IndexedPicture] = {}
    checker = _Checker(roots, known, max_decode_pixels)
    threads = min(MOST_THREADS, THREADS_PER_CORE * (os.cpu_count() or 1))
    with ThreadPoolExecutor(threads, thread_name_prefix="pictures") as pool:
        for batch in pool.map(checker.check_batch, _batches(entries.items())):
            for key, entry, found in batch:
                if isinstance(found, IndexedPicture):
                    checked[key] = found
                else:
                    problems.append((entry, str(found)))
            if progress is not None:
                progress(len(checked) + len(problems), len(entries))
    if problems:
        raise _unusable(problems, name_of)
    if known_source != source or checked != known:
        _store(cache, source, checked)
    return PictureIndex(roots, checked)


def _collect(roots: PictureRoots, named: Iterable[tuple[str, int]], problems: list[tuple[int, str]]) -> dict[str, int]:
    """Return the first entry of each picture by the picture's key. Adds names that are not allowed to `problems`."""
    entries: dict[str, int] = {}
    for name, entry in named:
        try:
            entries.setdefault(roots.key(name), entry)
        except PictureError as error:
            problems.append((entry, str(error)))
    return entries


def _batches(pairs: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    left = iter(pairs)
    while batch := list(islice(left, BATCH)):
        yield batch


@dataclass(frozen=True, slots=True)
class _Checker:
    """Checks pictures, for several threads. `known`: pictures of the cache."""

    roots: PictureRoots
    known: Mapping[str, IndexedPicture]
    max_decode_pixels: int

    def check_batch(self, batch: list[tuple[str, int]]) -> list[tuple[str, int, IndexedPicture | PictureError]]:
        """Check pictures, given by key and entry. Returns the error of those that cannot be used."""
        results: list[tuple[str, int, IndexedPicture | PictureError]] = []
        for key, entry in batch:
            try:
                results.append((key, entry, self._check(key, entry)))
            except PictureError as error:
                results.append((key, entry, error))
        return results

    def _check(self, key: str, entry: int) -> IndexedPicture:
        with open_picture(self.roots.check(key)) as (file, where):
            identity = _identity(file.fileno())
            known = self.known.get(key)
            if known is not None and known.identity == identity:
                return known._replace(entry=entry)
            data = _read(file, where)
            if _identity(file.fileno()) != identity or len(data) != identity.size:
                raise PictureError(
                    "the picture changed while gcore read it", where=where, fix="Wait until it is written completely"
                )
        try:
            facts = inspect_picture(data, max_decode_pixels=self.max_decode_pixels)
        except PictureError as error:
            raise PictureError(error.what, where=error.where or where, fix=error.fix) from error
        return IndexedPicture(hashlib.sha256(data).hexdigest(), facts.width, facts.height, identity, entry)


def _identity(handle: int) -> PictureIdentity:
    found = os.fstat(handle)
    return PictureIdentity(found.st_size, found.st_mtime_ns, found.st_ino)


def _read(file: Any, where: str | None) -> bytes:
    try:
        data: bytes = file.read()
    except OSError as error:
        raise PictureError(
            f"cannot read the picture ({error.strerror or error})", where=where, fix="Check the disk"
        ) from error
    return data


def _unusable(problems: list[tuple[int, str]], name_of: Callable[[int], str]) -> DataError:
    """Return the error about pictures that cannot be used, given by entry and reason."""
    problems.sort()
    shown = [f"{name_of(entry)}: {problem}" for entry, problem in problems[:SHOWN_PROBLEMS]]
    more = len(problems) - len(shown)
    if not more and len(shown) == 1:
        return DataError(f"a picture cannot be used. {shown[0]}")
    head = f"{len(problems)} pictures cannot be used"
    return DataError("\n  ".join([head, *shown, *([f"and {more} more"] if more else [])]))


def _load(cache: Path) -> tuple[str, dict[str, IndexedPicture]]:
    """Return the source and the pictures of a cache file; none if it is missing, damaged or of another format."""
    try:
        with cache.open(encoding="utf-8") as lines:
            header = json.loads(next(lines, ""))
            if header["format"] != FORMAT:
                return "", {}
            pictures = {}
            for line in lines:
                key, sha256, width, height, size, mtime_ns, inode, entry = json.loads(line)
                pictures[key] = IndexedPicture(sha256, width, height, PictureIdentity(size, mtime_ns, inode), entry)
    except (OSError, ValueError, TypeError, LookupError):
        return "", {}
    return (header["source"], pictures) if header["pictures"] == len(pictures) else ("", {})


def _store(cache: Path, source: str, pictures: Mapping[str, IndexedPicture]) -> None:
    header: Any = {"format": FORMAT, "source": source, "pictures": len(pictures)}
    rows = ([key, one.sha256, one.width, one.height, *one.identity, one.entry] for key, one in pictures.items())
    with (
        explain_os_errors(
            "cannot write the index of the pictures there",
            DataError,
            where=cache.parent,
            fix="Free space and make the folder writable, or name another cache folder",
        ),
        replace_shared_file(cache) as out,
    ):
        out.writelines(json.dumps(line).encode() + b"\n" for line in chain([header], rows))
