"""Make the first plan of a job on the present nodes.

If a policy moves slots, and neither the spec nor a pin (a placement that a person fixed) sets the first split, the job
starts with the layout that fits into memory and has the lowest predicted step time (`placement.mapping`). This needs
the facts of nodes and models; without them the job starts with the co-located split, or else the first feasible split.
The plan's `reason` says which of these cases applied. If by the estimates no layout fits, the job starts nevertheless,
with a warning: estimates may be wrong, nodes may still arrive, and a process that runs out of memory reports it itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.config.spec import JobSpec
from gcore.errors import SpecError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import Pin, Plan
from placement.assign import assign_split
from placement.mapping.search import FirstLayout, RejectedLayouts, choose_first_layout, describe_nodes
from placement.placer import (
    NOTHING_FIXED,
    find_bounds,
    first_plan,
    first_split,
    movable_request,
    place_split,
    too_few_slots,
)
from placement.request import PlacementRequest
from placement.slots import Snapshot, Split, count_noun, sizes_of, trim_to_replicas

WORLD = "w"


@dataclass(frozen=True, slots=True)
class InitialSplit:
    """The first split of a job and its reason. `split` None: use any split that can be placed. `expected_s`: predicted
    seconds of a step; None: not predicted. `warning`: shown to the user before the job starts; empty: none."""

    split: Split | None
    reason: str
    expected_s: float | None = None
    warning: str = ""


def choose_initial_split(snapshot: Snapshot, job: PlacementRequest, pin: Pin | None = None) -> InitialSplit:
    """Choose the first split of a job whose policy moves slots."""
    limits, fixed = find_bounds(snapshot, job, pin), pin or NOTHING_FIXED
    fallback = first_split(limits, job, fixed)
    if fixed.sizes:
        is_had = fallback is not None and not fixed.off(fallback)
        return InitialSplit(fallback, f"{fixed}, {'as requested' if is_had else 'which is not possible now'}")
    if job.train is not None:
        return InitialSplit(fallback, "the spec sets it")
    if isinstance(job.work, str):
        return InitialSplit(fallback, f"nothing is measured yet, and nothing can be predicted: {job.work}")
    there = describe_nodes(snapshot.nodes)
    if isinstance(there, str):
        return InitialSplit(fallback, f"nothing is measured yet, and nothing can be predicted: {there}")
    match choose_first_layout(job.work, there.cluster, limits, there.untimed):
        case FirstLayout() as first:
            return InitialSplit(first.split, first.reason, first.expected_s, first.cut)
        case RejectedLayouts() as misfits:
            what = f"by estimate no placement fits; the closest is {misfits.way}; {misfits.excess}"
            hint = "run gcore plan to see which fields of the spec would change that"
            return InitialSplit(fallback, f"nothing is measured yet, and {what}", None, f"{what}; {hint}")
        case None:
            return InitialSplit(fallback, "nothing is measured yet")


@dataclass(frozen=True, slots=True)
class InitialPlan:
    """The first plan of a job, with its expected step time and warning."""

    plan: Plan
    beginning: InitialSplit


def make_initial_plan(
    snapshot: Snapshot, spec: JobSpec, models: ModelConfigs | None, *, world: str = WORLD, pin: Pin | None = None
) -> InitialPlan:
    """Make the first plan of a job under any policy. Raises SpecError if there are too few slots."""
    sizes = sizes_of(spec)
    if snapshot.slots and not trim_to_replicas(snapshot, sizes).slots:
        raise SpecError(
            f"an engine needs {sizes.widest} slots of one node, and no node has that many",
            where="slots_per_engine",
            fix="Lower it, or start controllers with more slots each",
        )
    snapshot = trim_to_replicas(snapshot, sizes)
    if not spec.placement.is_live:
        plan = first_plan(snapshot, PlacementRequest.by(spec), world=world, generation=1)
        return InitialPlan(plan, InitialSplit(None, plan.reason))
    job = movable_request(spec, models)
    found = choose_initial_split(snapshot, job, pin)
    if found.split is None:
        placed_so = place_split(snapshot, job, world=world, generation=1, pin=pin)
    else:
        where = f"{count_noun(snapshot.slots, 'slot')} on {count_noun(len(snapshot.nodes), 'node')}"
        why = f"{found.split} of {where}; {found.reason}"
        placed_so = assign_split(
            found.split, None, snapshot, tuple(job.judges), world=world, generation=1, reason=why, sizes=job.sizes
        )
    if placed_so is None:
        raise too_few_slots(snapshot)
    return InitialPlan(placed_so, found)
