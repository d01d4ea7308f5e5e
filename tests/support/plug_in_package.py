"""A package with entry points on the path, as after an installation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[[str, str, str], None]
"""(package, its entry points as lines `name = target`, its code)"""


def installer(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> Install:
    """Installs packages whose entry points are of `group`; gone again when the test ends."""

    def put(package: str, points: str, code: str) -> None:
        info = folder / package / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        (folder / package / f"{package}.py").write_text(code)
        monkeypatch.syspath_prepend(folder / package)

    return put
