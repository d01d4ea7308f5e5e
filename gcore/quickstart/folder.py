"""Folders with an example's data and model: created atomically, and reused as long as they match the current recipe.

A folder is filled under a temporary name and renamed when it is complete; the next preparation removes the remains of
an interrupted one. `manifest.json` has the recipe, and size and hash of every other file. A folder with the same recipe
and unchanged files is reused. A folder with another recipe or damaged files is prepared again; a folder that gcore did
not make is an error. Concurrent preparations of one folder wait for each other.

`Reporter` shows progress on standard error: a bar on a terminal, otherwise occasional lines, or nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gcore.errors import DataError, explain_os_errors
from gcore.models.layout import FileEntry, file_entry
from gcore.system.files import replace_folder, sweep_drafts

MANIFEST = "manifest.json"


class PreparedManifest(BaseModel):
    """Fields that `manifest.json` of every prepared folder has. `files`: size and hash by path; filled in last.
    `threads`, `torch`: number of threads and version of torch that trained the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    example: str
    recipe: int
    seed: int
    threads: int
    torch: str
    files: dict[str, FileEntry] = {}


class JudgeManifest(PreparedManifest):
    """Fields that the manifest of every judge has. `updates`: optimizer updates of its training. `judge_accuracy`: share of
    right verdicts on held-out responses. `judge_false_yes`: share of the wrong ones among them that the judge calls right.
    """

    updates: int
    judge_accuracy: float
    judge_false_yes: float


M = TypeVar("M", bound=PreparedManifest)


@dataclass(frozen=True, slots=True)
class Recipe(Generic[M]):
    """How to prepare the folder of an example. `manifest`: class of its manifest. `fill`: writes the files into an
    empty folder and returns the manifest."""

    example: str
    """Name of the example in the manifest. The folder of another example is never replaced."""
    manifest: type[M]
    asked: Mapping[str, int]
    """Manifest fields with the values that they must have for an existing folder to be reused."""
    fill: Callable[[Path], M]


@dataclass(frozen=True, slots=True)
class PreparedFolder(Generic[M]):
    """A prepared folder. `cached`: whether it existed already and was reused."""

    folder: Path
    manifest: M
    cached: bool

    @property
    def model(self) -> Path:
        """The folder of the example's model."""
        return self.folder / "model"


def make_or_find(to: Path, recipe: Recipe[M]) -> PreparedFolder[M]:
    """Prepare the folder `to` by `recipe`, or reuse it if it is already prepared.

    Raises DataError if `to` is something other than a folder of this recipe's example, or cannot be written. Errors of `fill` pass through.
    """
    to = Path(os.path.abspath(to))
    with explain_os_errors(
        "cannot prepare the example here",
        DataError,
        where=to,
        fix="Name a writable folder with 20 MB free",
    ):
        to.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(to):
            found = _usable(to, recipe)
            if found is not None:
                return PreparedFolder(to, found, cached=True)
            _refuse_foreign(to, recipe.example)
            return PreparedFolder(to, _make(to, recipe), cached=False)


def _make(to: Path, recipe: Recipe[M]) -> M:
    """Prepare the folder under a temporary name, with its manifest, and rename it to `to`."""
    sweep_drafts(
        to.parent, spared=lambda target: target != to.name
    )  # remains of a killed preparation; this process holds the lock
    with replace_folder(to, owner="making", durable=True) as draft:
        manifest = recipe.fill(draft)
        manifest = manifest.model_copy(update={"files": _entries(draft)})
        (draft / MANIFEST).write_text(_text(manifest), encoding="utf-8")
        _open_to_readers(draft)
    return manifest


def _text(manifest: PreparedManifest) -> str:
    """Return the manifest as JSON, with the long list of files last."""
    facts = manifest.model_dump(mode="json")
    files = facts.pop("files")
    return json.dumps(facts | {"files": files}, indent=2) + "\n"


def _usable(to: Path, recipe: Recipe[M]) -> M | None:
    """Return the manifest if the folder can be reused: the values of the recipe, and unchanged files. Else None."""
    manifest = _read_manifest(to, recipe.manifest)
    if manifest is None or manifest.example != recipe.example:
        return None
    if any(getattr(manifest, name) != value for name, value in recipe.asked.items()):
        return None
    for name, entry in manifest.files.items():
        file = to / name
        if not file.is_file() or file.stat().st_size != entry.size or file_entry(file) != entry:
            return None
    return manifest


def _read_manifest(to: Path, kind: type[M]) -> M | None:
    try:
        return kind.model_validate_json((to / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def _refuse_foreign(to: Path, example: str) -> None:
    """Raise DataError unless the folder is empty or belongs to this example."""
    if not to.exists() and not to.is_symlink():
        return
    if to.is_symlink() or not to.is_dir():
        raise DataError("this is not a folder", where=str(to), fix="Name a folder that does not exist yet")
    if any(to.iterdir()) and not _claims_to_be(to, example):
        raise DataError(
            f"the folder contains something other than the prepared example {example}",
            where=str(to),
            fix="Name a folder that does not exist yet, or empty this one",
        )


def _claims_to_be(to: Path, example: str) -> bool:
    """Return whether the manifest names this example. Accepts manifests of other gcore versions."""
    try:
        found = json.loads((to / MANIFEST).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(found, dict) and found.get("example") == example


@contextmanager
def _one_at_a_time(to: Path) -> Iterator[None]:
    """Hold an exclusive lock for the folder `to` while the block runs; the operating system releases it if the process
    dies."""
    with (to.parent / f".{to.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _entries(folder: Path) -> dict[str, FileEntry]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_entry(path) for path in files}


def _open_to_readers(folder: Path) -> None:
    """Make the files readable for other users, who run jobs from here too; safetensors writes them for the owner only."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


PLAIN_LINES = 8
"""Approximate number of progress lines without a terminal."""


@dataclass(frozen=True, slots=True)
class TeachingProgress:
    """Progress of a training: optimizer update `update` of `updates` is done.

    `accuracy`: greedy accuracy on held-out prompts at the last measurement, 0 to 1; None before the first.
    """

    update: int
    updates: int
    accuracy: float | None


class Reporter:
    """Progress reporter that shows nothing; base class of the others. Use it as a context manager."""

    def report(self, at: TeachingProgress) -> None:
        """Show the progress of a training. Called after every optimizer update."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @classmethod
    def for_terminal(cls, progress: bool, what: str = "warm start") -> Reporter:
        """Return the reporter for standard error: a bar on a terminal, else lines; without `progress` one that shows
        nothing. `what`: label."""
        if not progress:
            return Reporter()
        console = Console(stderr=True)
        return BarReporter(console, what) if console.is_terminal else LineReporter(console, what)


class LineReporter(Reporter):
    """Prints about `PLAIN_LINES` lines in all, the last one at the end."""

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what

    def report(self, at: TeachingProgress) -> None:
        every = max(1, at.updates // PLAIN_LINES)
        if at.update % every == 0 or at.update == at.updates:
            self._console.print(f"{self._what} {at.update}/{at.updates} {_accuracy(at)}".rstrip(), highlight=False)


class BarReporter(Reporter):
    """Shows a bar with the remaining time."""

    def __init__(self, console: Console, what: str) -> None:
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(what, total=None, accuracy="")

    def report(self, at: TeachingProgress) -> None:
        self._bar.update(self._task, completed=at.update, total=at.updates, accuracy=_accuracy(at))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _accuracy(at: TeachingProgress) -> str:
    return "" if at.accuracy is None else f"{at.accuracy:.0%} of held-out prompts right"
