"""Which addresses a command talks to: the ones it was given, or those of the local cluster of its home."""

from __future__ import annotations

from pathlib import Path

from gcore.errors import Unreachable, UsageError


def find_addresses(address: str | None, home: Path) -> tuple[str, ...]:
    """host:port of every controller that may be asked. `address`: one or several, separated by commas.

    Raises UsageError for an address that is none, Unreachable if no cluster is up in `home`.
    """
    if address is not None:
        return tuple(_checked(part.strip()) for part in address.split(","))
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


def _checked(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is no address", where="--address", fix="For example --address 10.0.0.7:7700")
    return address
