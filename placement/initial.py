"""What a job begins with on the nodes that are there. Pure.

Where a policy moves slots and neither the spec nor a person says how, it is the way that is predicted to take least of those that fit
into memory (`placement.mapping`), as far as nodes and models are known; else all slots in turn, or the first split there is. The reason
says which it was. If nothing fits by what is estimated, the job begins all the same: estimates have errors, nodes may still come, and a
process that does run out of memory says so itself. It is told who exceeds what.

What comes later is the policy's (`placement.live`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.config.spec import JobSpec
from gcore.errors import SpecError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import Pin, Plan
from placement.assign import assigned
from placement.mapping.search import First, Misfits, seen
from placement.mapping.search import first_split as best_that_fits
from placement.placer import NOTHING_FIXED, Moving, bounds_of, first_plan, first_split, placed, too_few
from placement.slots import Snapshot, Split, Wanted, counted, divided, sizes_of

WORLD = "w"


@dataclass(frozen=True, slots=True)
class Beginning:
    """The split to begin with, and why. `split` None: whatever can be placed. `expected_s`: what a step is predicted to take.
    `warning`: what people should know of it before."""

    split: Split | None
    reason: str
    expected_s: float | None = None
    warning: str = ""


def beginning(snapshot: Snapshot, job: Moving, pin: Pin | None = None) -> Beginning:
    """What a job whose policy moves slots begins with."""
    limits, fixed = bounds_of(snapshot, job, pin), pin or NOTHING_FIXED
    fallback = first_split(limits, job, fixed)
    if fixed.sizes:
        is_had = fallback is not None and not fixed.off(fallback)
        return Beginning(fallback, f"{fixed}, {'as was asked' if is_had else 'and that cannot be had'}")
    if job.train is not None:
        return Beginning(fallback, "that is what the spec says to begin with")
    if isinstance(job.work, str):
        return Beginning(fallback, f"nothing is measured yet, and nothing can be predicted: {job.work}")
    there = seen(snapshot.nodes)
    if isinstance(there, str):
        return Beginning(fallback, f"nothing is measured yet, and nothing can be predicted: {there}")
    match best_that_fits(job.work, there.cluster, limits, there.untimed):
        case First() as first:
            return Beginning(first.split, first.reason, first.expected_s, first.cut)
        case Misfits() as misfits:
            what = f"by what is estimated, no placement fits; the nearest to it: {misfits.way}; {misfits.excess}"
            hint = "gcore plan tells what of the spec would change that"
            return Beginning(fallback, f"nothing is measured yet, and {what}", None, f"{what}; {hint}")
        case None:
            return Beginning(fallback, "nothing is measured yet")


@dataclass(frozen=True, slots=True)
class Begun:
    """The plan of a beginning."""

    plan: Plan
    beginning: Beginning


def begun(
    snapshot: Snapshot, spec: JobSpec, models: ModelConfigs | None, *, world: str = WORLD, pin: Pin | None = None
) -> Begun:
    """What a job begins with, whatever its policy. Raises SpecError if there are too few slots."""
    sizes = sizes_of(spec)
    if snapshot.slots and not divided(snapshot, sizes).slots:
        raise SpecError(
            f"an engine of {sizes.widest} slots lies on one node, and no node has so many",
            where="slots_per_engine",
            fix="Lower it, or start controllers with more slots each",
        )
    snapshot = divided(snapshot, sizes)
    if not spec.placement.is_live:
        plan = first_plan(snapshot, Wanted.by(spec), world=world, generation=1)
        return Begun(plan, Beginning(None, plan.reason))
    job = Moving.by(spec, models)
    found = beginning(snapshot, job, pin)
    if found.split is None:
        placed_so = placed(snapshot, job, world=world, generation=1, pin=pin)
    else:
        where = f"{counted(snapshot.slots, 'slot')} on {counted(len(snapshot.nodes), 'node')}"
        why = f"{found.split} of {where}; {found.reason}"
        placed_so = assigned(
            found.split, None, snapshot, job.judges, world=world, generation=1, reason=why, sizes=job.sizes
        )
    if placed_so is None:
        raise too_few(snapshot)
    return Begun(placed_so, found)
