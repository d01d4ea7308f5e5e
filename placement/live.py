"""What a placement that moves slots begins with and must keep to, and the policies that may be asked for it, by name. Pure.

A policy of a package of the user's is an entry point of the group `gcore.placement`: a function that takes a `Start` and gives a
`placement.policies.base.Policy`. It decides on splits only; which slots these are is `placement.assign`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gcore.config import JobSpec
from gcore.errors import SpecError
from gcore.ledger.facts import ModelConfigs
from gcore.ledger.job import Plan
from gcore.ledger.placing import Pin
from placement.assign import Slot, assigned, nearest_first, slots_of, split_of, unlike
from placement.plan import Snapshot, counted
from placement.policies.base import Decision, Policy
from placement.replicas import SINGLE, Sizes, sizes_of
from placement.split import Bounds, Split, feasible

if TYPE_CHECKING:
    from placement.mapping.workload import Workload

NOTHING_FIXED = Pin()
ALL_SIZES = 16
"""Train worlds of every size are looked at up to so many slots; above, powers of two and one and a half of them."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a policy is made with. `first`: the split that the spec says to begin with, else all slots in turn; `rollout_rows`,
    `reward_rows`: requests that an engine runs at once, at most; `sizes`: slots of an engine."""

    first: Split
    rollout_rows: int
    reward_rows: int
    sizes: Sizes = SINGLE


class NewPolicy(Protocol):
    """Makes a policy."""

    def __call__(self, start: Start) -> Policy:
        """For one job, on one controller."""
        ...


@dataclass(frozen=True, slots=True)
class Moving:
    """What a job says of a placement that moves slots. `ranks`: the only size of the train world, if one is set; `most_ranks`: samples
    that each update has, for a rank without any would only wait. `work`: what a step is, or why that is not known."""

    judges: tuple[str, ...]
    ranks: int | None
    most_ranks: int
    train: int | None
    reward: int | None
    group: int = 1
    work: Workload | str = "what the job's models are was not kept"
    sizes: Sizes = SINGLE

    @classmethod
    def by(cls, spec: JobSpec, models: ModelConfigs | None = None) -> Moving:
        """What `spec` says, of a job with these models."""
        from placement.mapping.told import work_of  # a daemon without a job needs none of it

        samples = spec.flow.groups_per_step * spec.flow.samples_per_prompt // spec.train.mini_batches
        return cls(
            tuple(judge.name for judge in spec.served_judges),
            spec.train.ranks,
            max(samples, 1),
            spec.placement.train,
            spec.placement.reward,
            spec.flow.samples_per_prompt,
            work_of(spec, models),
            sizes_of(spec),
        )


def bounds_of(snapshot: Snapshot, job: Moving, pin: Pin | None = None, now: int | None = None) -> Bounds:
    """What splits must keep to on the nodes there are, and what fits into their memory, as far as that is known. `now`: ranks of the
    world that is there, whose size stays possible."""
    from placement.mapping.limits import within_memory
    from placement.mapping.told import seen

    limits = slots_allow(snapshot, job, pin, now)
    there = "" if isinstance(job.work, str) else seen(snapshot.nodes)
    if isinstance(job.work, str) or isinstance(there, str):
        return limits
    return within_memory(limits, job.work, there.cluster, now)


def slots_allow(snapshot: Snapshot, job: Moving, pin: Pin | None = None, now: int | None = None) -> Bounds:
    """What splits must keep to, whatever fits into memory."""
    slots = snapshot.slots
    if job.ranks is not None:
        sizes: tuple[int, ...] = (job.ranks,)
    else:
        most = min(slots, job.most_ranks)
        found = {size for size in range(1, most + 1) if most <= ALL_SIZES or _is_round(size)}
        sizes = tuple(sorted(found | ({now} if now is not None and now <= slots else set())))
    if pin is not None and pin.train is not None:
        sizes = (pin.train,)
    apart = pin is not None and (pin.rollout is not None or pin.reward is not None)
    nodes = sum(1 for node in snapshot.nodes if node.slots)
    return Bounds(
        slots,
        job.sizes.rollout,
        job.sizes.reward,
        train_sizes=sizes,
        judged=bool(job.judges),
        colocated=not apart,
        nodes=max(nodes, 1),
        group=job.group,
    )


def _is_round(size: int) -> bool:
    while size % 2 == 0:
        size //= 2
    return size in (1, 3)


def first_split(bounds: Bounds, job: Moving, pin: Pin = NOTHING_FIXED) -> Split | None:
    """What a job begins with: what a person fixed, beside that what the spec says, or else all slots in turn. None: it does not fit."""
    if job.train is not None:
        reward = job.reward or 0
        wanted = Split("coexisting", bounds.slots - job.train - reward, reward, job.train)
        trains = (job.train,) if pin.train is None else bounds.train_sizes
        return nearest_fixed(wanted, replace(bounds, train_sizes=trains, colocated=False), pin)
    together = bounds.all_together()
    if together is not None or not pin.sizes:
        return next(feasible(bounds), None)
    return min(feasible(bounds), key=pin.off, default=None)


def nearest_fixed(split: Split, bounds: Bounds, pin: Pin) -> Split | None:
    """The split within `bounds` that is least far from what a person fixed, and of these the one that is least unlike `split`. None: there is
    none at all."""
    return min(feasible(bounds), key=lambda one: (pin.off(one), unlike(one, split)), default=None)


def placed(
    snapshot: Snapshot,
    job: Moving,
    *,
    world: str,
    generation: int,
    current: Plan | None = None,
    wanted: Split | None = None,
    pin: Pin | None = None,
) -> Plan | None:
    """A plan with a new train world: of the split that is `wanted`, else of that which is nearest to the one there is, as far as what a
    person fixed lets it be. None: there are too few slots."""
    limits = bounds_of(snapshot, job, pin, None if current is None else len(current.ranks))
    if wanted is None and current is not None:
        wanted = _spread(split_of(current), snapshot)
    fixed = pin or NOTHING_FIXED
    split = nearest_fixed(wanted, limits, fixed) if wanted is not None else None
    if split is None:
        split = first_split(limits, job, fixed)
    if split is None:
        # What a person fixed gives way to a job that could not go on.
        return (
            None
            if pin is None
            else placed(snapshot, job, world=world, generation=generation, current=current, wanted=wanted)
        )
    how = f"{split} of {snapshot.slots} slots on {len(snapshot.nodes)} nodes"
    return assigned(
        split, current, snapshot, job.judges, world=world, generation=generation, reason=how, sizes=job.sizes
    )


def too_few(snapshot: Snapshot) -> SpecError:
    """Why nothing can be placed."""
    return SpecError(
        f"the pools do not fit on {counted(snapshot.slots, 'slot')}",
        where="placement",
        fix="Lower placement.train, placement.reward or train.ranks, or start controllers with more slots",
    )


def _spread(split: Split, snapshot: Snapshot) -> Split:
    """The same shares of other slots."""
    slots = snapshot.slots
    if split.mode == "colocated":
        return Split("colocated", slots, slots if split.reward else 0, min(split.train, slots))
    share = slots / max(split.rollout + split.reward + split.train, 1)
    reward, train = max(round(split.reward * share), min(split.reward, 1)), max(round(split.train * share), 1)
    return Split("coexisting", max(slots - reward - train, 1), reward, train)


def mended(plan: Plan, snapshot: Snapshot, job: Moving) -> Plan | None:
    """The plan with an engine for each pool whose engines are all on nodes that are away; the world as it is. None: none lacks any."""
    here = {Slot(node.node, slot) for node in snapshot.nodes for slot in node.slots}
    awake = {place.judge for place in plan.engines if not place.asleep and here.issuperset(slots_of(place))}
    if not here or not {"", *job.judges} - awake:
        return None  # of nodes that have too few slots for an engine nothing can be made
    away = sum(Slot(place.node, place.slot) not in here for place in plan.ranks)
    whole = slots_allow(snapshot, job)
    # Ranks that are away have their slots still: the world is as it is.
    limits = replace(whole, slots=whole.slots + away, train_sizes=(len(plan.ranks),))
    # Where engines span several slots, ranks may lie so that the nearest cannot be had.
    tried = (
        assigned(
            split,
            plan,
            snapshot,
            job.judges,
            world=plan.world,
            generation=plan.generation + 1,
            reason=f"{split}, for a pool had no engine left",
            sizes=job.sizes,
        )
        for split in nearest_first(replace(split_of(plan, snapshot), train=len(plan.ranks)), limits)
    )
    return next((found for found in tried if found is not None), None)


def obeying(decision: Decision, limits: Bounds, pin: Pin) -> Decision | None:
    """What a policy decided, or the split nearest to it that is as a person fixed it, of which nobody has said what it would take. None:
    what is fixed cannot be had."""
    if not pin.off(decision.split):
        return decision
    found = nearest_fixed(decision.split, limits, pin)
    if found is None or pin.off(found):
        return None
    return Decision(found, f"{pin}, as was asked; without that: {decision.reason}", idle=decision.idle)


def static(start: Start) -> Policy:
    """One split for ever: for whoever wants to see what nothing would do."""
    from placement.policies.fixed import Static

    return Static(start.first)


def colocated(start: Start) -> Policy:
    """All slots in turn."""
    from placement.policies.fixed import Colocated

    return Colocated(start.first)


def hill_climb(start: Start) -> Policy:
    """One unit at a time, from the pool that is used least to the one that is used most."""
    from placement.policies.climbing import HillClimb

    return HillClimb(start.first)


def threshold(start: Start) -> Policy:
    """The same, only between pools that are used little and much."""
    from placement.policies import climbing

    return climbing.threshold(start.first)


def dynamic(start: Start) -> Policy:
    """By forecast."""
    from placement.forecast import Pools
    from placement.policies.dynamic import Dynamic

    sizes = start.sizes
    return Dynamic(Pools(sizes.rollout, sizes.reward, start.rollout_rows, start.reward_rows), start.first)
