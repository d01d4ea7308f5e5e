"""What a controller decides about what outlives a step, where some staleness is allowed: naming it, and giving it up.

Others count what is in flight here, and wait for what would become too old, as far as the offer names it. So it does, with
whatever else is written, or a little after it was begun: before the step for which it was begun can have been committed.
Nothing is waited for without end: what a seal waits for because of its age is given up after a while, and issued again;
after so many times it has failed. Pure, and nothing at staleness 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from controllers.actions import GiveUp, Intent
from controllers.view import JobView
from gcore.ledger.ancestry import is_ancestor
from gcore.ledger.carried import steps_left
from gcore.ledger.records import Head, InFlightRef, Offer

EVALUATION_PATIENCE_S = 900.0
"""A batch of what was carried waits so long for the evaluation of the weights before it, or for another part of it. A flow
may never ask for it."""


def named_in_flight(view: JobView) -> tuple[InFlightRef, ...]:
    """What this peer's offer says of what is in flight."""
    if not view.rules.staleness:
        return ()
    return tuple(InFlightRef(ref=ref, version=version) for ref, version in sorted(view.in_flight.items()))


def is_misnamed(view: JobView, head: Head, stored: Offer | None) -> bool:
    """Whether the stored offer lacks what is in flight, or has what no longer is.

    What is not named when head moves could be passed over by a seal that it should have been waited for.
    """
    if not view.rules.staleness:
        return False
    named = {one.ref: one.version for one in stored.in_flight} if stored else {}
    if any(named.get(ref) != version for ref, version in view.in_flight.items()):
        return True
    ended = named.keys() - view.in_flight.keys() - view.holdings.keys() - view.outcomes.keys()
    return any(not head.cursors.is_terminal(view.rules.shape, ref) for ref in ended)


def expiring(view: JobView) -> Iterator[Intent]:
    """What has been waited for too long, and what can no longer be trained, is given up."""
    assert view.mirror.head is not None
    if not view.rules.staleness:
        return
    head = view.mirror.head.record
    awaited = frozenset(view.awaited)
    for ref, version in view.in_flight.items():
        topic = f"late {ref} {version}"
        if head.cursors.is_terminal(view.rules.shape, ref) or not is_ancestor(head, version):
            yield Intent(GiveUp(ref, "its prompt has ended, or its lineage", stale=False), topic)
        elif steps_left(view.rules, head, version) < 0:
            yield Intent(GiveUp(ref, f"its first tokens are of {version}, too old by now", stale=True), topic)
        elif ref in awaited:
            why = f"it was waited for {view.spec.rollout.timeout_s:g} s"
            yield Intent(GiveUp(ref, why, stale=True), f"{topic} awaited", after=view.spec.rollout.timeout_s)


def owes_evaluation(view: JobView) -> bool:
    """Whether head's weights are still to be evaluated. What is carried could close the next batch before they are."""
    assert view.mirror.head is not None
    head = view.mirror.head.record
    if not view.rules.staleness or not view.is_evaluated_after(head.step, last=False):
        return False
    return str(head.version) not in view.mirror.evaluations
