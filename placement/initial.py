"""The first plan of a job on the nodes that are there.

Where a policy moves slots and neither the spec nor a pin says how to begin, it is the layout of least predicted step time among those
that fit into memory (`placement.mapping`), as far as nodes and models are known; else all slots in turn, or the first feasible split. The
reason says which it was. If by the estimates nothing fits, the job begins all the same, with a warning: estimates have errors, nodes may
still come, and a process that does run out of memory reports it itself.
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
    """The split to begin with, and why. `split` None: whatever can be placed. `expected_s`: what a step is predicted to take.
    `warning`: what people should know of it before."""

    split: Split | None
    reason: str
    expected_s: float | None = None
    warning: str = ""


def choose_initial_split(snapshot: Snapshot, job: PlacementRequest, pin: Pin | None = None) -> InitialSplit:
    """What a job whose policy moves slots begins with."""
    limits, fixed = find_bounds(snapshot, job, pin), pin or NOTHING_FIXED
    fallback = first_split(limits, job, fixed)
    if fixed.sizes:
        is_had = fallback is not None and not fixed.off(fallback)
        return InitialSplit(fallback, f"{fixed}, {'as was asked' if is_had else 'and that cannot be had'}")
    if job.train is not None:
        return InitialSplit(fallback, "that is what the spec says to begin with")
    if isinstance(job.work, str):
        return InitialSplit(fallback, f"nothing is measured yet, and nothing can be predicted: {job.work}")
    there = describe_nodes(snapshot.nodes)
    if isinstance(there, str):
        return InitialSplit(fallback, f"nothing is measured yet, and nothing can be predicted: {there}")
    match choose_first_layout(job.work, there.cluster, limits, there.untimed):
        case FirstLayout() as first:
            return InitialSplit(first.split, first.reason, first.expected_s, first.cut)
        case RejectedLayouts() as misfits:
            what = f"by what is estimated, no placement fits; the nearest to it: {misfits.way}; {misfits.excess}"
            hint = "gcore plan tells what of the spec would change that"
            return InitialSplit(fallback, f"nothing is measured yet, and {what}", None, f"{what}; {hint}")
        case None:
            return InitialSplit(fallback, "nothing is measured yet")


@dataclass(frozen=True, slots=True)
class InitialPlan:
    """The plan of a beginning."""

    plan: Plan
    beginning: InitialSplit


def make_initial_plan(
    snapshot: Snapshot, spec: JobSpec, models: ModelConfigs | None, *, world: str = WORLD, pin: Pin | None = None
) -> InitialPlan:
    """What a job begins with, whatever its policy. Raises SpecError if there are too few slots."""
    sizes = sizes_of(spec)
    if snapshot.slots and not trim_to_replicas(snapshot, sizes).slots:
        raise SpecError(
            f"an engine of {sizes.widest} slots lies on one node, and no node has so many",
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
