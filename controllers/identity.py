"""Names of incarnations: the node's name and a random suffix. An incarnation is one run of a controller under one lease."""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """The identity of one incarnation. `address`: host:port for users; `lease`: the id of its lease."""

    node: str
    incarnation: str
    address: str
    lease: int
    peer_address: str = ""
    """host:port for other nodes; empty: the same as `address`."""


def new_incarnation(node: str) -> str:
    """A new name for an incarnation of the controller of `node`."""
    return f"{node}.{uuid.uuid4().hex[:8]}"


def node_of(incarnation: str) -> str:
    """The name of the node of an incarnation."""
    return incarnation.rpartition(".")[0] or incarnation
