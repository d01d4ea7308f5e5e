"""Engines that the plan puts to sleep, and wakes: rules of `controllers.decide`. Pure, like all rules.

What sleeps is resident on its slot and has given its memory back, so that another engine there has it. In this order: nothing new
goes to it (every controller sees to that as soon as it hears of the plan), what it has under way is given back with the tokens it
has, its memory is freed. Waking: the memory, then the current weights, as a publication like any other, then requests. Of
several on a slot none wakes before those that are to sleep do.

One controller sees to an engine: its node's, or while that is away the one that a hash names (`controllers.owning`). Doing it twice
does no harm. Which engines are to sleep is the plan's to say, and the ranks' whose memory they share (`controllers.taking_turns`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from controllers.actions import Intent, Sleep, Wake
from controllers.owning import responsible_for
from controllers.taking_turns import asleep_for_ranks
from controllers.view import EngineView, JobView
from gcore.ledger.job import EnginePlace, Plan
from gcore.worker.records import WorkerRecord

AGAIN_S = 0.5
"""An engine that could not be put to sleep, or woken, is tried again after so long."""


def places_of(plan: Plan | None, workers: Mapping[str, WorkerRecord], job_uid: str) -> dict[str, EnginePlace]:
    """The place that the plan has for each engine of the job, by instance."""
    places = {(place.node, place.slots, place.judge): place for place in plan.engines} if plan is not None else {}
    engines = {i: w for i, w in workers.items() if w.job_uid == job_uid and w.role != "train"}
    found = {instance: places.get((w.node, w.slots, w.judge)) for instance, w in engines.items()}
    return {instance: place for instance, place in found.items() if place is not None}


def sleepers(plan: Plan | None, workers: Mapping[str, WorkerRecord], job_uid: str) -> frozenset[str]:
    """The engines of the job that the plan puts to sleep."""
    if plan is None or not any(place.asleep for place in plan.engines):
        return frozenset()
    return frozenset(name for name, place in places_of(plan, workers, job_uid).items() if place.asleep)


def put_to_sleep(view: JobView) -> frozenset[str]:
    """The same, of a view, with those whose slot is a train rank's now."""
    plan, uid = view.mirror.plan, view.mirror.keys.uid
    planned = view.remembered.get(
        "sleepers", (plan, view.workers), lambda: sleepers(plan.record if plan is not None else None, view.workers, uid)
    )
    return planned | asleep_for_ranks(view)


def resting(view: JobView) -> Iterator[Intent]:
    """Engines sleep and wake as the plan says."""
    asleep = put_to_sleep(view)
    engines = mine(view)
    if not asleep and not any(engine.asleep for engine in engines.values()):
        return
    moving = {name.split()[1] for name in view.under_way if name.startswith(("publish ", "sleep ", "wake "))}
    still_awake = {slot for name in asleep & engines.keys() if not engines[name].asleep for slot in _slots(view, name)}
    for name, engine in sorted(engines.items()):
        if name in moving or engine.silent:
            continue
        judge = view.workers[name].judge
        if name in asleep and not engine.asleep:
            yield Intent(Sleep(name, judge), f"sleep {name}", after=AGAIN_S if engine.trouble else 0.0)
        elif name not in asleep and engine.asleep and still_awake.isdisjoint(_slots(view, name)):
            yield Intent(Wake(name, judge), f"wake {name}", after=AGAIN_S if engine.trouble else 0.0)


def mine(view: JobView) -> dict[str, EngineView]:
    """The engines that this controller puts to sleep and wakes."""
    members = {name: stored.record for name, stored in view.mirror.members.items() if not stored.record.leaving}
    own = dict(view.engines)
    if view.judges:
        uid, sources = view.mirror.keys.uid, (view.workers, view.mirror.members)
        judges = view.remembered.get(
            "my judges", sources, lambda: responsible_for(uid, view.workers, members, view.me, role="reward")
        )
        own |= {name: engine for name, engine in view.judges.items() if name in judges}
    return {name: engine for name, engine in own.items() if name in view.workers}


def _slots(view: JobView, instance: str) -> set[tuple[str, str]]:
    worker = view.workers[instance]
    return {(worker.node, slot) for slot in worker.slots}
