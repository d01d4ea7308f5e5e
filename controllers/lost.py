"""Whether head's train world can go on, from one look at it. Pure."""

from __future__ import annotations

from controllers.view import JobView


def lost_world(view: JobView) -> str:
    """Why head's world cannot go on, or nothing."""
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
    return ""
