"""Has Python find the entry points of this source tree, whichever tree the environment was installed from."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def put_on_path() -> Path:
    """Write the package's metadata from the project file, and look there first. Returns the folder, for `PYTHONPATH` of other processes.

    Each user has a folder: importlib.metadata takes files of another user that it cannot read for a package without entry points.
    """
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"gcore-entry-points-{os.getuid()}-{digest}"
    info = folder / "gcore-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{n} = {t}" for n, t in points.items()))
    ]
    head = ["Metadata-Version: 2.1", "Name: gcore", "Version: 0"]
    needs = sorted(f"Requires-Dist: {canonical(one)}" for one in project["dependencies"])
    for extra, packages in sorted(project["optional-dependencies"].items()):
        named = sorted(f"Requires-Dist: {canonical(one)}; extra == '{extra}'" for one in packages)
        needs += [f"Provides-Extra: {extra}", *named]
    _write(info / "METADATA", "\n".join([*head, *needs]) + "\n")
    _write(info / "entry_points.txt", "\n".join(lines) + "\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def canonical(requirement: str) -> str:
    """As a build writes it: the name in lower case with hyphens."""
    read = Requirement(requirement)
    return f"{canonicalize_name(read.name)}{read.specifier}"


def _write(file: Path, text: str) -> None:
    """Several processes may write the same at once."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
        part.write(text)
    Path(part.name).replace(file)
