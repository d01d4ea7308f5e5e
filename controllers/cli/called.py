"""How gcore was called, so that what a person is told to type works when typed: `gcore` may be in .venv/bin only."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from gcore.prepare import NAMES

_HINT = "`gcore "
PREPARED = ".cache/examples"
"""Where `gcore prepare` puts what it makes, unless it is told another folder."""


def program() -> str:
    """The first words of a command: `gcore` if a shell finds this one by that name, else as it was called."""
    called = Path(sys.argv[0])
    found = shutil.which("gcore")
    # Under another name it is a test, or a program that has its own ways.
    if called.name != "gcore" or (found is not None and _same(Path(found), called)):
        return "gcore"
    relative = os.path.relpath(called)
    return relative if not relative.startswith("..") else str(called)


def as_called(text: str) -> str:
    """Hints in backquotes, with the command as it was called."""
    return text.replace(_HINT, f"`{program()} ")


def prepared_by(text: str) -> str:
    """What makes a prepared example's file that an error names and that is not there, for behind the error; or nothing.

    The commands of the examples stand in their specs too, but who runs one has not always read it.
    """
    for path in re.findall(rf"(\S*{re.escape(PREPARED)}/[a-z-]+)/", text):
        name = Path(path).name
        if name in NAMES and not Path(path).exists():
            there = "" if Path(path).resolve() == Path(PREPARED, name).resolve() else f" --to {path}"
            return f". `gcore prepare {name}{there}` makes it"
    return ""


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
