"""Whether head's train world can go on, from one look at it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from controllers.spreading import start_is_gone
from controllers.view import JobView


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a world cannot go on. `by_the_slots`: the open steps tell it, so that who has not heard of one yet may be mistaken. `instance`:
    the worker by which it is lost, if it is one's doing."""

    why: str
    by_the_slots: bool = False
    instance: str = ""


def lost_world(view: JobView) -> Lost | None:
    """Whether and why head's world cannot go on."""
    return view.remembered.get("lost", (view,), lambda: _lost_world(view))  # several rules ask


def _lost_world(view: JobView) -> Lost | None:
    head = view.head
    assert view.mirror.plan is not None
    for place in view.mirror.plan.record.ranks:
        claim = view.mirror.claim(head.world, place.rank)
        if claim is None:
            if place.node not in view.nodes:
                return Lost(f"{place.node}, which was to run rank {place.rank}, is gone")
            if view.has_lost(place.node, (place.slot,)):
                return Lost(f"{place.node} has no slot {place.slot} any more, which was to run rank {place.rank}")
            continue
        worker = view.workers.get(claim.instance)
        if worker is None:
            return Lost(f"rank {place.rank} on {place.node} is gone", instance=claim.instance)
        if worker.state in ("failed", "stopping"):
            why = f"rank {place.rank} on {place.node} failed: {worker.reason or worker.state}"
            return Lost(why, instance=claim.instance)
    if why := _ahead(view):
        return Lost(why, by_the_slots=True)
    why = start_is_gone(view)
    return Lost(why) if why else None


def _ahead(view: JobView) -> str:
    """Whether a rank stands where no record of the store could have brought it: the store was put back to an older state, from
    a backup. It would drop all that it is told from now on as long past.

    A rank that is a step ahead has trained what is not committed yet, if its seal is there. If it is only head, or the seal, that
    this controller has not heard of, the rollback's compares fail.
    """
    head, seal = view.head, view.seal
    back = f"the store was put back to step {head.step}"
    for rank in view.ranks.values():
        applied = rank.applied
        if view.begun(rank) and view.contradicts(rank):
            return f"rank {rank.rank} has begun other parts of step {head.step + 1} than its seal names: {back}"
        if applied is None or applied.lineage != head.lineage or applied.step <= head.step:
            continue
        if view.contradicts(rank):
            return f"rank {rank.rank} has trained another batch as step {applied.step} than its seal names: {back}"
        if applied.step > head.step + 1 or seal is None or seal.collects:
            return f"rank {rank.rank} has trained step {applied.step}, of which the store knows nothing: {back}"
    return ""
