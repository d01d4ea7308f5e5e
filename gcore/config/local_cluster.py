"""The record of `gcore up`: the processes of the local cluster and their addresses.

`gcore up` writes `HOME/cluster.json` when everything is ready, and `gcore down` removes it when everything has ended. So an
existing file lists a complete cluster. Whether its processes still run is checked by pid and start time, not from this file.
`controllers.cli.local` starts and stops them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gcore.errors import UsageError
from gcore.system.files import replace_file
from gcore.system.process import ProcessId

FILE_NAME = "cluster.json"

KEY_FILE = "owner.key"
"""File with the owner key, in the cluster's home folder with mode 0600. A client that sends this key to a daemon of the cluster may submit specs that
name plug-in files."""


def local_home(home: str | Path | None) -> Path:
    """Return the folder of the local cluster: `home`, else the environment variable GCORE_HOME, else `.gcore`."""
    return Path(home or os.environ.get("GCORE_HOME") or ".gcore")


class _Process(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    pid: int
    started: int
    """Start of the process, in clock ticks since boot."""

    @property
    def process(self) -> ProcessId:
        """The process's identity on this machine."""
        return ProcessId(self.pid, self.started)


class EtcdProcess(_Process):
    """The etcd process of the local cluster."""

    endpoint: str
    """host:port"""
    data_dir: str
    client_port: int
    peer_port: int
    binary: str


class ControllerProcess(_Process):
    """A daemon of the local cluster."""

    name: str
    address: str
    """host:port of the job API and the health service."""
    metrics_address: str
    slots: tuple[str, ...]
    config_file: str


class LocalClusterState(BaseModel):
    """The content of `cluster.json`: the etcd process and the daemons of a local cluster. `home`: folder of the cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    home: str
    etcd: EtcdProcess
    controllers: tuple[ControllerProcess, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Address (host:port) of the job API of each daemon."""
        return tuple(c.address for c in self.controllers)

    @property
    def page(self) -> str:
        """URL of the web page that the first daemon serves."""
        return f"http://{self.controllers[0].metrics_address}/"

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots of all daemons, such as cpu:0."""
        return tuple(slot for c in self.controllers for slot in c.slots)

    @classmethod
    def load(cls, home: Path) -> LocalClusterState | None:
        """Read `cluster.json` in the folder `home`; None if there is none. Raises UsageError if it cannot be read or is not valid."""
        path = home / FILE_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise UsageError(
                f"cannot read the record of the local cluster ({error.strerror or error})",
                where=str(path),
                fix="Check its permissions",
            ) from error
        except ValidationError as error:
            raise UsageError(
                "the record of the local cluster is damaged or from another version of gcore",
                where=str(path),
                fix=f"Run `gcore down --home {home}`; it stops the cluster and removes the file",
            ) from error


def write_owner_key(home: Path) -> None:
    """Create the owner key in the folder `home`, unless it has one that only its owner can read."""
    if not read_owner_key(home):
        replace_file(home / KEY_FILE, secrets.token_hex(32).encode(), mode=0o600)


def read_owner_key(home: Path) -> str:
    """Return the owner key in the folder `home`; empty if there is none, or if other users can read or replace it."""
    try:
        with (home / KEY_FILE).open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(256).decode("ascii", errors="replace").strip()
    except OSError:
        return ""
    return key if status.st_uid == os.geteuid() and not status.st_mode & 0o077 else ""
