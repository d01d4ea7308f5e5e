"""Views of a running job whose engines are on slots, some asleep by plan. An engine is named after its judge and its slot."""

from __future__ import annotations

from dataclasses import replace

from builders import running_job

from controllers.rules.view import EngineView, JobView
from gcore.ledger.records.job import EnginePlace
from gcore.ledger.transactions import Versioned
from gcore.types import Version
from gcore.worker.records import WorkerRecord

SERVED = Version(0, 0)


def engine(name: str, slot: str = "cpu:1", node: str = "node-0", judge: str = "") -> WorkerRecord:
    fields = {"slot": slot, "pid": 1, "pid_started": 1, "state": "serving", "address": "h:1", "job_uid": "u"}
    role = "reward" if judge else "rollout"
    return WorkerRecord.model_validate({"instance": name, "role": role, "node": node, "judge": judge} | fields)


def placed(*places: EnginePlace, slot_kind: str = "cpu", **views: EngineView) -> JobView:
    """A running job whose engines all serve on this node, and are called as their slots and judges."""
    view = running_job()
    assert view.mirror.plan is not None
    plan = view.mirror.plan.record.model_copy(update={"engines": places})
    workers = {name_of(place): engine(name_of(place), place.slot, place.node, place.judge) for place in places}
    known = {name_of(place): EngineView(name_of(place), "h:1", None) for place in places} | views
    return replace(
        view,
        mirror=replace(view.mirror, plan=Versioned(plan, 7)),
        workers=dict(view.workers) | workers,
        engines={name: known[name] for name, worker in workers.items() if worker.role == "rollout"},
        judges={name: known[name] for name, worker in workers.items() if worker.role == "reward"},
        staged=frozenset({SERVED}),
    )


def name_of(place: EnginePlace) -> str:
    return f"{place.judge or 'policy'}_{place.slot.replace(':', '')}"


def place(slot: str, judge: str = "", *, asleep: bool = False, node: str = "node-0") -> EnginePlace:
    return EnginePlace(node=node, slot=slot, judge=judge, asleep=asleep)
