"""Which schema version the controllers of a cluster write: the newest that every one of them reads.

While nodes are replaced one by one by such of the next version, both work: the newer ones write as the older ones do until
the last of these has gone. From then on an older one could not read what is written; it leaves such jobs to the others.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from gcore.schema import READABLE

N = TypeVar("N")

BEFORE_IT_WAS_TOLD = 1
"""Daemons of this version do not say what they read."""


def version_for(nodes: Collection[str], reads: Mapping[str, int]) -> int:
    """What to write in a cluster of `nodes`, of which each `reads` that version at most.

    A node that reads nothing that this process can write, or so old that it cannot be spoken to, is not waited for.
    """
    newest = min((reads.get(node, BEFORE_IT_WAS_TOLD) for node in nodes), default=max(READABLE))
    return max(min(READABLE), min(max(READABLE), newest))


def able(nodes: Mapping[str, N], reads: Mapping[str, int], version: int) -> Mapping[str, N]:
    """The nodes that read what is written in `version`; nothing of a job may be placed on the others, who could not work on it.

    The very same mapping if that is all of them.
    """
    found = {name: node for name, node in nodes.items() if reads.get(name, BEFORE_IT_WAS_TOLD) >= version}
    return nodes if len(found) == len(nodes) else found


def unable(nodes: Mapping[str, N], reads: Mapping[str, int], version: int) -> Mapping[str, int]:
    """The other nodes: what they read at most."""
    found = {name: reads.get(name, BEFORE_IT_WAS_TOLD) for name in nodes}
    return {name: newest for name, newest in sorted(found.items()) if newest < version}
