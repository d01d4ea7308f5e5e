"""The arithmetic example: sums to learn from, sums held out, and a model that is right less than half of the time.

`prepare` makes one folder:

    train.jsonl, eval.jsonl    prompts and answers (`gcore.prepare.sums`); no pair of operands is in both
    model/                     a qwen3 of 1.0M parameters with a tokenizer of its own (`gcore.prepare.warmstart`)
    manifest.json              the recipe it was made by, and size and hash of every other file

The folder appears under its name all at once, by a rename, so a half-made one is never taken for done; whatever an
interrupted preparation left beside it is removed by the next. A folder that the same recipe made, and whose files are as
they were, is used again. One that gcore made by another recipe, or that was damaged, is made anew; a folder that gcore did
not make is left alone, with an error. Two that prepare the same folder at once wait for each other.

The same recipe, seed and number of updates give the same bytes on the same machine and torch; across machines the data is
the same, and the model differs by rounding. It knows nothing of jobs: the spec that uses the folder is
examples/arithmetic/grpo.yaml.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gcore.errors import DataError
from gcore.prepare.lesson import to_jsonl
from gcore.prepare.progress import Reporter
from gcore.prepare.sums import split_sums

RECIPE = 1
"""Raised with every change of what a preparation makes, so that folders of the old recipe are made anew."""

WARM_UPDATES = 500
"""Updates of the warm start."""

MANIFEST = "manifest.json"


class FileEntry(BaseModel):
    """A file as it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    sha256: str


class Manifest(BaseModel):
    """What `manifest.json` holds. `greedy_accuracy`: share of held-out sums right, greedily, before any RL."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    example: Literal["arithmetic"] = "arithmetic"
    recipe: int
    seed: int
    warm_updates: int
    threads: int
    torch: str
    greedy_accuracy: float
    pass_at_8: float
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """A prepared folder. `cached`: it was there already."""

    folder: Path
    model: Path
    train: Path
    eval: Path
    greedy_accuracy: float
    pass_at_8: float
    cached: bool


def prepare(
    to: Path, *, seed: int = 0, progress: bool = True, warm_updates: int = WARM_UPDATES, must_fit: bool = True
) -> PreparedExample:
    """Make the example in the folder `to`, or find it there.

    `warm_updates` is how long the warm start trains; `must_fit` asks that the model then is right on 38 % to 48 % of the
    held-out sums. Raises DataError if it is not, if `to` is something else than a prepared example, or cannot be written.
    """
    to = Path(os.path.abspath(to))
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(to):
            found = _usable(to, seed, warm_updates)
            if found is not None:
                return _prepared(to, found, cached=True)
            _refuse_foreign(to)
            made = _make(to, seed, warm_updates, Reporter.for_terminal(progress), must_fit=must_fit)
            return _prepared(to, made, cached=False)
    except OSError as error:
        raise DataError(
            f"the example cannot be prepared here ({error.strerror or error})",
            where=str(to),
            fix="Name a folder that can be written, with 20 MB free",
        ) from error


def _make(to: Path, seed: int, warm_updates: int, reporter: Reporter, *, must_fit: bool) -> Manifest:
    from gcore.prepare.warmstart import THREADS, save_model, torch_version, warm_start  # imports torch

    for remnant in to.parent.glob(f".{to.name}.making-*"):  # of a preparation that was killed: we hold the lock
        shutil.rmtree(remnant)
    draft = Path(tempfile.mkdtemp(prefix=f".{to.name}.making-", dir=to.parent))
    try:
        split = split_sums(seed)
        (draft / "train.jsonl").write_text(to_jsonl(split.train), encoding="utf-8")
        (draft / "eval.jsonl").write_text(to_jsonl(split.held_out), encoding="utf-8")
        with reporter:
            started = warm_start(
                split.lesson, seed=seed, updates=warm_updates, report=reporter.report, must_fit=must_fit
            )
        save_model(started, draft / "model")
        manifest = Manifest(
            recipe=RECIPE,
            seed=seed,
            warm_updates=warm_updates,
            threads=THREADS,
            torch=torch_version(),
            greedy_accuracy=started.greedy_accuracy,
            pass_at_8=started.pass_at_8,
            files=_entries(draft),
        )
        (draft / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        _open_to_readers(draft)
        _sync(draft)
        _replace(draft, to)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def _usable(to: Path, seed: int, warm_updates: int) -> Manifest | None:
    """The manifest, if `to` is what would be made now, file by file."""
    manifest = _read_manifest(to)
    if manifest is None or (manifest.recipe, manifest.seed, manifest.warm_updates) != (RECIPE, seed, warm_updates):
        return None
    for name, entry in manifest.files.items():
        file = to / name
        if not file.is_file() or file.stat().st_size != entry.size or _sha256(file) != entry.sha256:
            return None
    return manifest


def _read_manifest(to: Path) -> Manifest | None:
    try:
        return Manifest.model_validate_json((to / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _refuse_foreign(to: Path) -> None:
    """Only a folder that says it is this example, or an empty one, may be replaced."""
    if not to.exists() and not to.is_symlink():
        return
    if to.is_symlink() or not to.is_dir():
        raise DataError("this is no folder", where=str(to), fix="Name a folder that does not exist yet")
    if any(to.iterdir()) and not _claims_to_be_ours(to):
        raise DataError(
            "the folder holds something else than a prepared example",
            where=str(to),
            fix="Name a folder that does not exist yet, or empty this one",
        )


def _claims_to_be_ours(to: Path) -> bool:
    """Looser than `_read_manifest`: a manifest of another version of gcore will do."""
    try:
        found = json.loads((to / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(found, dict) and found.get("example") == "arithmetic"


def _replace(draft: Path, to: Path) -> None:
    """Put `draft` in the place of `to`. Whoever looks sees the old folder, none, or the whole new one."""
    if to.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{to.name}.making-", dir=to.parent))
        to.rename(old / "old")
        draft.rename(to)
        shutil.rmtree(old)
    else:
        draft.rename(to)
    _sync_folder(to.parent)


@contextmanager
def _one_at_a_time(to: Path) -> Iterator[None]:
    """Hold the lock beside the folder. The system lets go of it when the process ends, however that happens."""
    with (to.parent / f".{to.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _entries(folder: Path) -> dict[str, FileEntry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileEntry(size=path.stat().st_size, sha256=_sha256(path)) for path in files
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _open_to_readers(folder: Path) -> None:
    """mkdtemp's folders and safetensors' files are for their owner alone; other users run jobs from here too."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _sync(folder: Path) -> None:
    """Everything in `folder` is on the disk before the rename is."""
    for path in [folder, *folder.rglob("*")]:
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prepared(to: Path, manifest: Manifest, *, cached: bool) -> PreparedExample:
    return PreparedExample(
        folder=to,
        model=to / "model",
        train=to / "train.jsonl",
        eval=to / "eval.jsonl",
        greedy_accuracy=manifest.greedy_accuracy,
        pass_at_8=manifest.pass_at_8,
        cached=cached,
    )
