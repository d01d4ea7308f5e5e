"""Environments with gcore installed from a wheel, as on a node: built from this source tree, or from an earlier commit.

gcore's dependencies come from the environment that runs the tests; gcore itself does not.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGED = ("gcore", "placement", "controllers", "pyproject.toml")
"""The files that a wheel is built from."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with one gcore."""

    folder: Path

    @property
    def controller(self) -> str:
        """`gcore-controller`."""
        return str(self.folder / "bin" / "gcore-controller")


def commit_before() -> str:
    """The newest commit of which the wheel is another than the newest one's."""
    newest = git("log", "-1", "--format=%H", "--", *PACKAGED).strip()
    return git("log", "-1", "--format=%H", f"{newest}~1", "--", *PACKAGED).strip()


def install(folder: Path, commit: str | None = None) -> Installed:
    """Build the wheel of a commit (None: of what stands here) and install it in an environment of its own at `folder`."""
    source = ROOT
    if commit is not None:
        source = folder.with_name(f"{folder.name}-source")
        source.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], input=archive, cwd=source, check=True)
    wheels = folder.with_name(f"{folder.name}-wheel")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    _run(sys.executable, "-m", "pip", "wheel", *options, "-w", str(wheels), str(source))
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    (wheel,) = wheels.glob("gcore-*.whl")
    _run(
        *(sys.executable, "-m", "pip", "--python", str(python), "install"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", "-q", str(wheel)),
    )
    theirs = next((folder / "lib").glob("python*/site-packages"))
    # A mere path: what .pth files of ours would add is this source code.
    (theirs / "zz_what_gcore_stands_on.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = _run(str(python), "-P", "-c", "import controllers, gcore; print(gcore.__file__, controllers.__file__)")
    assert all(Path(one).is_relative_to(folder) for one in where.split()), where
    return Installed(folder)


def git(*words: str) -> str:
    """What git says of the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _run(*command: str) -> str:
    # Not from the repository's root: nothing of it is to be imported by where somebody stands.
    done = subprocess.run(command, cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
