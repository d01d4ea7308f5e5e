"""Which cluster a command talks to: the one whose address it was given, the one whose context was named, the local cluster of its home, or
the one of the current context; and what it shows of whoever called it (`gcore.contexts`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gcore.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from gcore.contexts import Reached


def find_cluster(address: str | None, home: Path) -> Reached:
    """Where a cluster answers, and how to talk to it. Raises UsageError, and Unreachable if none is up in `home` and no other is known."""
    from gcore.contexts import reach

    if address is not None:
        return reach(os.environ, addresses_in(address))
    from gcore.config.cluster import LocalCluster

    local = LocalCluster.load(home)
    found = reach(os.environ, local=local is not None)
    return found if found.addresses else reach(os.environ, find_addresses(None, home), local=True)


def find_addresses(address: str | None, home: Path) -> tuple[str, ...]:
    """host:port of every controller that may be asked. `address`: one or several, separated by commas.

    Raises UsageError for an address that is none, Unreachable if no cluster is up in `home`.
    """
    if address is not None:
        return addresses_in(address)
    from gcore.config.cluster import FILE_NAME, LocalCluster  # not for --help

    cluster = LocalCluster.load(home)
    if cluster is None:
        kept = " (what `gcore run` started ended with it; its jobs are kept)" if (home / "runs").is_dir() else ""
        raise Unreachable(
            "no cluster is up here",
            where=str((home / FILE_NAME).absolute()),
            fix=f"Start one with `gcore up`{kept}, or name a controller with --address host:port",
        )
    return cluster.addresses


def addresses_in(text: str) -> tuple[str, ...]:
    """`host:port`, or several with commas. Raises UsageError."""
    return tuple(_checked(part.strip()) for part in text.split(","))


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is no address", where="--address", fix="For example --address 10.0.0.7:7700")
    return address
