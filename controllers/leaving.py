"""A controller that was asked to end: what it hands over, and when that is done.

It says in its membership that it leaves (`controllers.decide.departing`); its shards are the others' at once. It begins
nothing more and gives up what it has in flight, for the others begin that anew now. What it has finished stays in its offer
and goes to the ranks when it is sealed; it waits for that, but only so long (`LEAVE_WITHIN_S`), and for nobody if it is the
last: what is lost then is issued again. Its engines and ranks go on without it.

Pure.
"""

from __future__ import annotations

from controllers.view import JobView
from gcore.ledger.records import SealState
from gcore.types import PromptRef

LEAVE_WITHIN_S = 8.0
"""Whoever asks a daemon to end kills it after ten seconds, often enough."""


def has_handed_over(view: JobView) -> bool:
    """Whether nothing is left that it is worth staying for."""
    members = view.mirror.members
    mine = members.get(view.me)
    others = [name for name, member in members.items() if name != view.me and not member.record.leaving]
    if mine is None or not others:
        return True
    if not mine.record.leaving:
        return False
    if view.mirror.assign is None or view.me in view.mirror.assign.record.members:
        return False
    return not undelivered(view)


def undelivered(view: JobView) -> frozenset[PromptRef]:
    """The refs of what this controller has finished and nobody else has: what would be lost with it."""
    if view.mirror.head is None:
        return frozenset()
    head = view.mirror.head.record
    safe: set[PromptRef] = set()
    for stored in view.mirror.seals.values():
        seal = stored.record
        safe |= {outcome.ref for outcome in seal.outcomes}
        safe |= {group.ref for group in (seal.groups if seal.state is SealState.READY else seal.kept)}
    held = {*view.holdings, *view.outcomes}
    return frozenset(ref for ref in held - safe if not head.cursors.is_terminal(view.rules.shape, ref))
