"""How an incarnation is named (the node's name and a number that no other life has), and what one knows of itself."""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """Who this controller is, for one life."""

    node: str
    incarnation: str
    address: str
    lease: int
    peer_address: str = ""
    """Where other nodes reach it, if that is elsewhere."""


def new_incarnation(node: str) -> str:
    """A name for one life of the controller of `node`."""
    return f"{node}.{uuid.uuid4().hex[:8]}"


def node_of(incarnation: str) -> str:
    """The node of an incarnation, living or not."""
    return incarnation.rpartition(".")[0] or incarnation
