"""A copy of the repository with faults planted in its files, for tests of checkers."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tools.problem import ROOT

Fault = tuple[str, str, str, str]
"""(file, a text in it, what the text is replaced by, a part of the line that the checker must print)."""


def repository(folder: Path, *copied: str) -> Path:
    """The repository in `folder`: the entries `copied` are copies that may be changed, all others are links."""
    for entry in ROOT.iterdir():
        if entry.name in copied and entry.is_dir():
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name in copied:
            shutil.copy(entry, folder / entry.name)
        elif not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    return folder


def plant(root: Path, faults: Iterable[Fault]) -> None:
    for path, old, new, _ in faults:
        file = root / path
        text = file.read_text(encoding="utf-8")
        assert old in text, f"{path} has no {old!r}"
        file.write_text(text.replace(old, new, 1), encoding="utf-8")


def not_found(problems: Iterable[object], faults: Iterable[Fault]) -> list[str]:
    """The expected messages about the faults that the checker did not print."""
    lines = [str(problem) for problem in problems]
    return [f"{path}: {part}" for path, _, _, part in faults if not any(part in line for line in lines)]
