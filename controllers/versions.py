"""Which schema version the controllers of a cluster write: the newest that every one of them reads.

While nodes are replaced one by one by such of the next version, both work: the newer ones write as the older ones do until
the last of these has gone. From then on an older one could not read what is written; it leaves such jobs to the others.

It is never an older version than was written before, by whomever: a step that came in parts, say, has no words in it. So the
store says which that is (`gcore.store.keys.WRITTEN`), before anything is written in it.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from gcore.schema import READABLE

N = TypeVar("N")

MOST_DIGITS = 9
BEFORE_IT_WAS_TOLD = 1
"""Daemons of this version do not say what they read."""


def version_for(nodes: Collection[str], reads: Mapping[str, int], written: int = BEFORE_IT_WAS_TOLD) -> int:
    """What to write in a cluster of `nodes`, of which each `reads` that version at most, and where `written` was the newest so far.

    A node that reads nothing that this process can write, or so old that it cannot be spoken to, is not waited for.
    """
    newest = min((reads.get(node, BEFORE_IT_WAS_TOLD) for node in nodes), default=max(READABLE))
    return max(min(READABLE), min(max(READABLE), max(newest, written)))


def version_told(said: bytes) -> int | None:
    """The version that stands in a value of the store; None if none does."""
    return int(said) if said.isdigit() and len(said) <= MOST_DIGITS else None


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
