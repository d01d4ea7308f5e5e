"""How an incarnation is named: the node's name and a number that no other life has."""

from __future__ import annotations

import uuid


def new_incarnation(node: str) -> str:
    """A name for one life of the controller of `node`."""
    return f"{node}.{uuid.uuid4().hex[:8]}"


def node_of(incarnation: str) -> str:
    """The node of an incarnation, living or not."""
    return incarnation.rpartition(".")[0] or incarnation
