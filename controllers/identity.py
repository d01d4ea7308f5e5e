"""Names of incarnations: the node's name and a random suffix. An incarnation is one run of a controller under one lease."""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """The identity of one run of a controller. `address`: host:port of its API for users; `lease`: the id of its lease
    in the store."""

    node: str
    incarnation: str
    address: str
    lease: int
    peer_address: str = ""
    """host:port for other nodes; empty: the same as `address`."""


def new_incarnation(node: str) -> str:
    """Create the name of a new incarnation of the controller of `node`: `NODE.` and eight random hex digits."""
    return f"{node}.{uuid.uuid4().hex[:8]}"


def node_of(incarnation: str) -> str:
    """The name of the node in the name of an incarnation."""
    return incarnation.rpartition(".")[0] or incarnation
