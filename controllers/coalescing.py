"""How long an offer waits for more, so that a step takes few writes and its seal comes no later for it; and who need not look so
often, because what comes next is another's. Pure.

Every offer wakes every peer, so they are to be few: a dozen peers that each wrote their groups as they finish would keep one
another, and the store, busy for the whole step. But a seal can come only when the offers hold its quota. So each peer tells what
it has when that is its share of what the cluster still lacks, and all of it when its part is done. Then the quota cannot be
met by what nobody has told (of n parts that make up a whole one is at least an n-th), and what lacks shrinks with each
telling: about as many writes a peer as what lacks can be divided, not as many as there are groups.

What is less than a share waits a while, because the quota is not all that others look at: what ended without a group has
others issue more, and people see how far the step is.
"""

from __future__ import annotations

from controllers.view import JobView
from gcore.ledger.records import SealState
from gcore.ledger.stream import NotYet

COALESCE_S = 0.3
"""A share of what lacks waits so long for more."""
OUTCOME_S = 1.0
"""Less than a share waits so long if there are outcomes in it,"""
GROUPS_S = 3.0
"""and so long if there are none."""


def patience_s(view: JobView, groups: int, outcomes: int) -> float:
    """Seconds that an offer waits which would tell of so many groups and outcomes, while this peer has more to come."""
    chosen = view.chosen
    lacking = chosen.missing if isinstance(chosen, NotYet) else 0
    if view.rules.part is not None:  # as much as makes a part is worth a write
        lacking = min(lacking, view.rules.part)
    if groups + outcomes >= lacking / max(1, len(view.mirror.members)):
        return COALESCE_S
    return OUTCOME_S if outcomes else GROUPS_S


def stands_by(view: JobView) -> bool:
    """Whether a sealed batch is on its way, none of it from here any more, and others are the first to do what follows.

    Ranks tell every peer of each part that comes; with many peers, looking at each would keep all of them busy that feed.
    """
    seal = view.seal if view.mirror.head is not None else None
    if seal is None or seal.state is not SealState.SEALED:
        return False
    if any(condition.startswith("feed ") for condition in view.under_way):
        return False
    mine = view.held_for(seal)
    if any(mine & view.missing(seal, rank).keys() for rank in range(seal.world_size)):
        return False
    return view.turn(f"ready {seal.token}") > 0 and view.turn(f"exchange {seal.token}") > 0
