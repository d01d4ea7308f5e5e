"""Which cluster a client talks to when it is told none: as the command line finds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gcore.config.cluster import LocalCluster
from gcore.contexts import Reached, reach
from gcore.errors import Unreachable


def find_cluster(address: str | Sequence[str] | None, home: Path, env: Mapping[str, str]) -> Reached:
    """Raises UsageError, and Unreachable if none is known."""
    if address is not None:
        given = address.split(",") if isinstance(address, str) else address
        return reach(env, tuple(one.strip() for one in given))
    local = LocalCluster.load(home)
    found = reach(env, local=local is not None)
    if found.addresses:
        return found
    if local is None:
        raise Unreachable(
            "no cluster is known here",
            where=str(home.absolute()),
            fix="Name a controller's host:port, set GCORE_ADDRESS, or start a cluster with `gcore up`",
        )
    return reach(env, local.addresses, local=True)
