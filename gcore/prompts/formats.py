"""What lies at a source's path: a JSONL file, Parquet files, or a dataset saved by the `datasets` library.

Looks at names and the first bytes only; that the content is what it should be is found by who reads it. A folder of Parquet
files is read in the order of their names, files of its subfolders left out; where names say of several splits (as on the
Hugging Face hub: `train-00000-of-00002.parquet`), `split` names one. A saved dataset of several splits needs it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gcore.config.sources import DataFormat
from gcore.errors import DataError
from gcore.prompts.index import unreadable

Kind = Literal["jsonl", "parquet", "hf"]
PARQUET_MAGIC = b"PAR1"
_NUMBERED = re.compile(r"(?P<split>.+?)-\d+-of-\d+")
_DICT, _STATE = "dataset_dict.json", "state.json"


@dataclass(frozen=True, slots=True)
class DataFiles:
    """`path`: how messages name the data. `files`: what is to be read, in order; of a JSONL file, itself."""

    kind: Kind
    path: Path
    files: tuple[Path, ...]


def find_files(path: Path, declared: DataFormat, split: str | None) -> DataFiles:
    """The files of a source. Raises DataError if there is nothing of the declared format, or more than one split."""
    try:
        return _found(path, declared, split)
    except OSError as error:  # a folder above that may not be looked into, a name that is too long
        raise unreadable(path, error) from error


def _found(path: Path, declared: DataFormat, split: str | None) -> DataFiles:
    kind = _kind(path) if declared == "auto" else declared
    if kind == "jsonl":
        if split is not None:
            raise DataError(
                f"a JSONL file has no split {split!r}", where=str(path), fix="Remove `split`, or name another `format`"
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
            "the folder holds no Parquet files and no dataset saved by `datasets` (save_to_disk)",
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
                f"a single Parquet file has no split {split!r}", where=str(path), fix="Remove `split`, or name a folder"
            )
        return (path,)
    # A link to nothing is a file that is missing: to pass over it would train on less than was asked for.
    files = sorted(entry for entry in path.iterdir() if entry.suffix == ".parquet" and not entry.is_dir())
    if not files:
        raise DataError(
            "the folder holds no Parquet files", where=str(path), fix="Name the folder in which *.parquet files lie"
        )
    splits = {file: _split_of(file) for file in files}
    several = set(splits.values())
    if split is None:
        # Files that are no shards of anything may be called as they like; shards of two splits are two datasets.
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
            raise DataError("the file names no splits", where=str(path / _DICT), fix="Save the dataset again")
        if split is None and len(splits) != 1:
            raise _which_split(path, splits)
        chosen = splits[0] if split is None else split
        if chosen not in splits:
            raise _no_split(path, chosen, splits)
        folder = path / chosen
    elif not (path / _STATE).is_file():
        raise DataError(
            f"the folder is no dataset saved by `datasets`: it has no {_STATE}",
            where=str(path),
            fix="Save it with save_to_disk, or name another `format`",
        )
    state = _read_object(folder / _STATE)
    if folder == path and split is not None and state.get("_split") != split:
        raise _no_split(path, split, [str(state["_split"])] if state.get("_split") else [])
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            "the dataset was saved by an old `datasets`, with the order of its rows in a file of its own",
            where=str(folder),
            fix="Load it with that version, call flatten_indices(), and save it again",
        )
    listed = state.get("_data_files")
    items = listed if isinstance(listed, list) else []
    names = [item.get("filename") if isinstance(item, dict) else None for item in items]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError("the file names no data files", where=str(folder / _STATE), fix="Save the dataset again")
    return tuple(folder / str(name) for name in names)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read the file ({error})", where=str(path), fix="Save the dataset again") from error
    if not isinstance(value, dict):
        raise DataError("the file holds no JSON object", where=str(path), fix="Save the dataset again")
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
