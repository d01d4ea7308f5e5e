"""Whether head's train world can go on, from one look at it. Pure."""

from __future__ import annotations

from controllers.spreading import start_is_gone
from controllers.view import JobView


def lost_world(view: JobView) -> str:
    """Why head's world cannot go on, or nothing."""
    return view.remembered.get("lost", (view,), lambda: _lost_world(view))  # several rules ask


def _lost_world(view: JobView) -> str:
    head = view.head
    assert view.mirror.plan is not None
    for place in view.mirror.plan.record.ranks:
        claim = view.mirror.claim(head.world, place.rank)
        if claim is None:
            if place.node not in view.nodes:
                return f"{place.node}, which was to run rank {place.rank}, is gone"
            continue
        worker = view.workers.get(claim.instance)
        if worker is None:
            return f"rank {place.rank} on {place.node} is gone"
        if worker.state in ("failed", "stopping"):
            return f"rank {place.rank} on {place.node} failed: {worker.reason or worker.state}"
    return _ahead(view) or start_is_gone(view)


def _ahead(view: JobView) -> str:
    """Whether a rank stands where no record of the store could have brought it: the store was put back to an older state, from
    a backup. It would drop all that it is told from now on as long past.

    A rank that is a step ahead has trained what is not committed yet; and if it is only head that this controller has not heard
    of, the rollback's compare fails.
    """
    head = view.head
    for rank in view.ranks.values():
        applied = rank.applied
        if view.contradicts(rank):
            return f"rank {rank.rank} has trained another batch as step {head.step + 1} than the store names: it was put back to step {head.step}"
        if applied is not None and applied.lineage == head.lineage and applied.step > head.step + 1:
            return f"rank {rank.rank} has trained up to step {applied.step}, which the store does not know: it was put back to step {head.step}"
    return ""
