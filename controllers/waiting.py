"""What a job waits for, in words: nothing waits in silence. Pure; since when is `controllers.turns`' business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from controllers.view import JobView
from gcore.ledger.balance import balance
from gcore.ledger.job import JobPhase
from gcore.ledger.records import SealState
from gcore.ledger.stream import NotYet


@dataclass(frozen=True, slots=True)
class Wait:
    """`cause` is one of few words, for a metric; `what` is for people; `key` stays the same while the wait lasts."""

    cause: str
    what: str
    key: str


def waiting_for(view: JobView) -> Iterator[Wait]:
    """Everything the job waits for now, as this controller sees it."""
    mirror = view.mirror
    if mirror.status is None or mirror.status.record.phase.ended:
        return
    for stored in mirror.fetches.values():
        if stored.record.done < stored.record.total:
            fetch = stored.record
            yield Wait("model", f"{fetch.node} is {fetch.sentence}", f"wait model {fetch.node}")
    if mirror.status.record.phase is JobPhase.PENDING or mirror.head is None or mirror.plan is None:
        yield Wait("start", "the job waits to be started", "wait start")
        return
    head = mirror.head.record
    for place in mirror.plan.record.ranks:
        claim = mirror.claim(head.world, place.rank)
        worker = view.workers.get(claim.instance) if claim else None
        if worker is None or worker.state != "serving":
            state = worker.state if worker else "not there"
            yield Wait(
                "train_world",
                f"rank {place.rank} on {place.node} is {state}",
                f"wait rank {head.world} {place.rank}",
            )
    if not any(e.version == head.version for e in view.engines.values()):
        served = ", ".join(sorted(str(e.version) for e in view.engines.values())) or "none"
        yield Wait("engines", f"no engine of {view.node} serves {head.version} (they serve: {served})", "wait engines")
    seal = view.seal
    if head.step >= view.spec.flow.steps:
        yield Wait("finish", "the last checkpoint or evaluation", "wait finish")
    elif seal is None or seal.state is SealState.OPEN:
        chosen = view.chosen
        if isinstance(chosen, NotYet):
            what = f"step {head.step + 1} waits for {chosen.missing} groups, the oldest of prompt {chosen.oldest}"
            yield Wait("groups", what, f"wait groups {head.seq}")
        if view.arranging:
            yield Wait("order", f"{view.node} works out the order of the curriculum", "wait order")
    elif seal.state is SealState.SEALED:
        layout = balance(seal)
        late = [rank for rank in range(seal.world_size) if view.missing(seal, layout, rank)]
        yield Wait("exchange", f"step {seal.step} is on its way to ranks {late}", f"wait exchange {seal.token}")
    else:
        behind = [r for r in range(seal.world_size) if r not in view.ranks or view.ranks[r].applied != seal.token]
        phases = ", ".join(f"{r}: {view.ranks[r].phase if r in view.ranks else 'not connected'}" for r in behind)
        yield Wait("train", f"step {seal.step} is trained by ranks {behind} ({phases})", f"wait train {seal.token}")
