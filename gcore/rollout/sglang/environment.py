"""Which Python has SGLang. Looks at files and environment variables; starts nothing, imports nothing of SGLang's.

In this order: what the caller names; GCORE_SGLANG_PYTHON; `.venv-sglang/bin/python` beside gcore's checkout or in the
current folder. A folder may be named instead of a Python: then its bin/python is meant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gcore.errors import UsageError

VARIABLE = "GCORE_SGLANG_PYTHON"
FOLDER = ".venv-sglang"
HOW = "Run 'make sglang-setup' for a CPU environment, or name the Python of one that has SGLang in GCORE_SGLANG_PYTHON"


def find_python(named: Path | str | None = None, *, environ: Mapping[str, str] | None = None) -> Path | None:
    """The Python that has SGLang; None where there is none. Raises UsageError if the one that was named has none."""
    environ = os.environ if environ is None else environ
    told = environ.get(VARIABLE)
    for given, where in ((named, f"--sglang-python or {VARIABLE}"), (told, VARIABLE)):
        if given:
            return _checked(Path(given), where)
    checkout = Path(__file__).parents[3]
    for folder in (checkout / FOLDER, Path(FOLDER)):
        if has_sglang(folder / "bin" / "python"):
            return folder.absolute() / "bin" / "python"  # only now: the folder that we are in may have been removed
    return None


def require_python(named: Path | str | None = None) -> Path:
    """Like `find_python`, but none is an error. Raises UsageError."""
    python = find_python(named)
    if python is None:
        raise UsageError("no environment with SGLang was found here", fix=HOW)
    return python


def has_sglang(python: Path) -> bool:
    """Whether `python` is there and SGLang is installed beside it; without starting it, which would take a second."""
    if not (python.is_file() and os.access(python, os.X_OK)):
        return False
    return any(python.parent.parent.glob("lib*/python3*/*-packages/sglang/launch_server.py"))


def _checked(given: Path, where: str) -> Path:
    # Not resolved: a virtual environment's Python is a link, and what it links to knows nothing of the environment.
    python = Path(os.path.abspath(given / "bin" / "python" if given.is_dir() else given))
    if not has_sglang(python):
        what = "SGLang is not installed beside this Python" if python.is_file() else "there is no such Python"
        raise UsageError(f"{what}: {python}", where=where, fix=HOW)
    return python
