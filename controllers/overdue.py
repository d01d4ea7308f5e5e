"""Which waits are told in an event, because nothing of what they wait for has moved for too long. Pure.

Each standstill is told once, by one peer: a node's own by that node, the others by whoever is first in their order of turns, so
that an event comes once and comes also when that peer is the one that hangs (its membership ends, and the next is first).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from controllers.turns import Waits, turn
from controllers.view import JobView
from controllers.waiting import LOCAL, PATIENCE_S, Wait


def overdue(view: JobView, waiting: Iterable[Wait], waits: Waits, now: float) -> Iterator[Wait]:
    """The waits that this peer is to tell, or has told, as of `now`; `waits` says since when each stands still."""
    for wait in waiting:
        patience = PATIENCE_S.get(wait.cause)
        mine = wait.cause in LOCAL or _first(view, f"tell {wait.cause}")
        if wait.cause == "engine":
            yield wait  # it is one only after a time of its own
        elif patience is not None and mine and now - waits.since.get(wait.stall, now) >= patience:
            yield wait


def _first(view: JobView, topic: str) -> bool:
    """Whether this peer tells for all. Before anybody is a member (none is until the job runs here with its model and its
    data) that goes by the nodes that are there."""
    members = view.mirror.members
    return (turn(members, view.me, topic) if members else turn(view.nodes, view.node, topic)) == 0


WHOLE = ("engine", "node")
"""Causes whose waits say all that there is to say, for others go on without what is waited for."""


def sentence(wait: Wait) -> str:
    """What the event says."""
    if wait.cause in WHOLE:
        return wait.what
    return f"nothing has moved for {PATIENCE_S[wait.cause]:g} s: {wait.what}"
