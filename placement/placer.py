"""Make plans of a job: the first plan of fixed pools, new plans when nodes come or go, and train worlds.

Fixed placements. `colocated`: one rollout engine on every slot, train ranks on the first slots of the nodes (one per
node by default), and an engine of each judge on every slot, or on as many as the spec sets. `static`: each pool has
slots of its own for the whole job. Slots are assigned round robin, one of each node before the second of any. If
engines span several slots, read "replica" for "slot". At staleness 0 the order of the step gives the turns: ranks
compute only between READY and commit, when no group is in flight.

Movable placements (`spec.placement.is_live`). A policy chooses splits within `SplitBounds`; `placement.assign` finds
the slots. A user's pin overrides the policy, unless the job could not continue with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gcore.config.spec import JobSpec
from gcore.errors import SpecError
from gcore.ledger.records.cluster import ModelConfigs
from gcore.ledger.records.job import EnginePlace, Pin, Plan, RankPlace
from placement.assign import assign_split, sort_by_unlikeness, split_of, unlikeness
from placement.policies.base import Decision
from placement.request import PlacementRequest, count_lacking_slots, count_ranks
from placement.slots import (
    NodeSlots,
    ReplicaSizes,
    Snapshot,
    Split,
    SplitBounds,
    count_noun,
    feasible,
    replica_groups,
    round_robin,
)


def first_plan(snapshot: Snapshot, wanted: PlacementRequest, *, world: str, generation: int) -> Plan:
    """Place a job. Raises SpecError if there are too few slots."""
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    places, ranks = _round_robin(nodes), count_ranks(snapshot, wanted)
    if count_lacking_slots(snapshot, wanted):
        raise SpecError(
            f"{_in_words(wanted, ranks or 1)} do not fit on {count_noun(len(places), 'slot')}",
            where="train.ranks" if not wanted.has_own_slots else "placement",
            fix=f"Lower {_to_lower(wanted)}, or start controllers with more slots",
        )
    sizes = wanted.sizes
    rollout, reward = (_round_robin(nodes, size) for size in (sizes.rollout, sizes.reward))
    if not wanted.has_own_slots:
        how = f"colocated: {len(places)} slots on {len(nodes)} nodes take rollout and train in turn, {ranks} ranks"
    else:
        if sizes.widest > 1:
            # Node by node, so that ranks and smaller engines break the fewest slots of larger ones.
            places = [place for node in nodes for place in _round_robin([node])]
            if sizes.reward <= sizes.rollout:
                reward = [one for node in nodes for one in _round_robin([node], sizes.reward)]
        training = places[: wanted.train]
        reward = _free(reward, training)[: wanted.reward // sizes.reward]
        rollout = _free(rollout, [*training, *reward])
        judge, roll = (sum(len(one.slots) for one in engines) for engines in (reward, rollout))
        how = f"static: of {len(places)} slots {ranks} train, {judge} judge, {roll} roll out"
    return Plan(
        generation=generation,
        world=world,
        ranks=tuple(RankPlace(rank=i, node=p.node, slot=p.slot) for i, p in enumerate(places[:ranks])),
        engines=(*rollout, *_judge_places(wanted.judges, reward, ())),
        reason=how,
    )


def _in_words(wanted: PlacementRequest, ranks: int) -> str:
    if not wanted.has_own_slots:
        return count_noun(ranks, "train rank")
    reward = f", {count_noun(wanted.reward, 'slot')} for judges" if wanted.reward else ""
    return f"{count_noun(ranks, 'train rank')}{reward} and 1 rollout engine, each on slots of its own,"


def _to_lower(wanted: PlacementRequest) -> str:
    if not wanted.has_own_slots:
        return "train.ranks"
    return "placement.train or placement.reward" if wanted.reward else "placement.train"


def _judge_places(
    judges: Mapping[str, int | None], slots: Sequence[EnginePlace], there: Sequence[EnginePlace]
) -> list[EnginePlace]:
    """Place judge engines on `slots`, in addition to those `there`. The judges start on different slots."""
    more = []
    for number, (judge, replicas) in enumerate(judges.items()):
        have = [place for place in there if place.judge == judge]
        wanted = len(slots) + len(have) if replicas is None else replicas
        turned = [*slots[number % len(slots) :], *slots[: number % len(slots)]] if slots else []
        free = _free(turned, have)
        more += [place.model_copy(update={"judge": judge}) for place in free[: max(wanted - len(have), 0)]]
    return more


def _round_robin(nodes: Sequence[NodeSlots], size: int = 1) -> list[EnginePlace]:
    """List the slots, or replicas of `size` slots, one of each node before the second of any."""
    found = round_robin([[(one.node, group) for group in replica_groups(one.slots, size)] for one in nodes])
    return [EnginePlace(node=node, slot=first, further=tuple(more)) for node, (first, *more) in found]


def _free(places: Sequence[EnginePlace], taken: Iterable[EnginePlace]) -> list[EnginePlace]:
    """List the places that share no slot with `taken`."""
    slots = {slot for place in taken for slot in place.on}
    return [place for place in places if slots.isdisjoint(place.on)]


MARGIN = 2.0
"""Minimum ratio of saved seconds to the start time of a larger world."""

UNKNOWN_STEPS_LEFT = 100
"""Assumed remaining steps of a job limited by epochs; its number of steps is not known before its end."""


def fill_plan(plan: Plan, snapshot: Snapshot, wanted: PlacementRequest) -> Plan | None:
    """Add engines to each present slot that serves nothing. The world and its ranks stay. Return None if there is no
    such slot. If a policy moves slots, a new slot belongs to rollout until the policy is called, with sleeping judges,
    unless the split is co-located.

    Engines of absent nodes keep their places and start again when the node returns, unless they are judges and were
    moved (`move_judges`) meanwhile. If pools have slots of their own, a new slot belongs to rollout, and judges keep
    the number of engines of the first plan.
    """
    ranks = [EnginePlace(node=place.node, slot=place.slot) for place in plan.ranks]
    on = {slot for place in plan.engines for slot in place.on}
    together = any(rank.on in on for rank in plan.ranks)
    taken = [*plan.engines, *(ranks if wanted.has_own_slots or wanted.moves else ())]
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    fresh = _free(_round_robin(nodes, wanted.sizes.rollout), taken)
    to_judge = _free(_round_robin(nodes, wanted.sizes.reward), taken)
    if not fresh:
        return None
    judging = _judge_places(wanted.judges, to_judge, plan.engines) if not wanted.has_own_slots else []
    if wanted.moves and not together:
        judging = [place.model_copy(update={"asleep": True}) for place in judging]
    names = ", ".join(sorted({place.node for place in fresh}))
    return plan.model_copy(
        update={
            "generation": plan.generation + 1,
            "engines": (*plan.engines, *fresh, *judging),
            "lent_from": None,
            "reason": f"{plan.reason}; then engines on {sum(len(place.slots) for place in fresh)} slots of {names}",
        }
    )


def move_judges(plan: Plan, snapshot: Snapshot, wanted: PlacementRequest) -> Plan | None:
    """Move judges off nodes that are lost. World, ranks and rollout places stay. Return None if no judge lacks an
    engine that it can have.

    If pools have slots of their own, a judge without an engine shares the slots of other judges, or else gets a rollout
    slot; rollout keeps at least one.
    """
    there = [place for place in plan.engines if snapshot.places.issuperset(place.on)]
    rollout = [place for place in there if not place.judge]
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    taken: list[EnginePlace] = []
    if not wanted.has_own_slots:
        slots, judges = _round_robin(nodes, wanted.sizes.reward), wanted.judges
    else:
        served = {place.judge for place in there}
        judges = {judge: replicas for judge, replicas in wanted.judges.items() if judge not in served}
        of_judges = {(p.node, p.slot): p.model_copy(update={"judge": ""}) for p in there if p.judge}
        slots = [of_judges[one] for one in sorted(of_judges)]
        if not slots:
            taken, slots = _given_up(rollout, nodes, wanted.sizes)
    more = _judge_places(judges, slots, there)
    names = {place.judge for place in more}
    left = [place for place in plan.engines if place.judge in names and place not in there]
    if not left:
        return None
    engines = tuple(place for place in plan.engines if place not in left and place not in taken)
    away = ", ".join(sorted({place.node for place in left}))
    return plan.model_copy(
        update={
            "generation": plan.generation + 1,
            "engines": (*engines, *more),
            "lent_from": None,
            "reason": f"{plan.reason}; then {', '.join(sorted(names))} moved, because {away} stays absent",
        }
    )


def _given_up(
    rollout: Sequence[EnginePlace], nodes: Sequence[NodeSlots], sizes: ReplicaSizes
) -> tuple[list[EnginePlace], list[EnginePlace]]:
    """Choose the last rollout engines whose slots a judge engine can take if one rollout engine remains. Return them
    and the new place."""
    ranked = {place: number for number, place in enumerate(rollout)}
    found: list[tuple[int, list[EnginePlace], EnginePlace]] = []
    for wide in _round_robin(nodes, sizes.reward):
        over = [one for one in rollout if one.node == wide.node and not set(one.slots).isdisjoint(wide.slots)]
        if over and len(over) < len(rollout) and {slot for one in over for slot in one.slots} >= set(wide.slots):
            found.append((max(ranked[one] for one in over), over, wide))
    _, given, place = max(found, key=lambda one: one[0], default=(0, [], None))
    return given, [] if place is None else [place]


@dataclass(frozen=True, slots=True)
class GrowthMeasurements:
    """Measurements to decide on a larger world. `train_s`: of the newest step, from READY to commit. `start_s`: of the
    newest start of a rank, until it serves. None if not measured. `steps_left` None: not known."""

    now: int
    wanted: int
    train_s: float | None
    start_s: float | None
    steps_left: int | None


def worth_forming(growth: GrowthMeasurements) -> str:
    """Return why a larger world is worth its start, or an empty string. Without measurements it is not.

    The saved time per step is an upper bound, because ranks do not divide all costs of a step; the margin covers the
    rest.
    """
    if growth.wanted <= growth.now or growth.train_s is None or growth.start_s is None:
        return ""
    left = UNKNOWN_STEPS_LEFT if growth.steps_left is None else growth.steps_left
    saved = left * growth.train_s * (1 - growth.now / growth.wanted)
    if saved < MARGIN * growth.start_s:
        return ""
    return (
        f"{growth.wanted} ranks instead of {growth.now} save about {saved:.0f} s in {left} steps, and start in "
        f"{growth.start_s:.0f} s"
    )


NOTHING_FIXED = Pin()

ALL_SIZES = 16
"""Up to this many slots every train world size is tried; above, powers of two and 1.5 times powers of two."""


def find_bounds(
    snapshot: Snapshot, job: PlacementRequest, pin: Pin | None = None, now: int | None = None
) -> SplitBounds:
    """Return the bounds of splits on the present nodes, restricted to what fits into memory as far as that is known.
    `now`: ranks of the present world; this size stays allowed."""
    from placement.mapping.memory import bound_by_memory
    from placement.mapping.search import describe_nodes

    limits = slot_bounds(snapshot, job, pin, now)
    there = "" if isinstance(job.work, str) else describe_nodes(snapshot.nodes)
    if isinstance(job.work, str) or isinstance(there, str):
        return limits
    return bound_by_memory(limits, job.work, there.cluster, now)


def slot_bounds(
    snapshot: Snapshot, job: PlacementRequest, pin: Pin | None = None, now: int | None = None
) -> SplitBounds:
    """Return the bounds of splits without regard to memory."""
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
    return SplitBounds(
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


def first_split(bounds: SplitBounds, job: PlacementRequest, pin: Pin = NOTHING_FIXED) -> Split | None:
    """Return the first split: the pinned sizes, else those of the spec, else co-located. None if it does not fit."""
    if job.train is not None:
        reward = job.reward
        wanted = Split("coexisting", bounds.slots - job.train - reward, reward, job.train)
        trains = (job.train,) if pin.train is None else bounds.train_sizes
        return nearest_to_pin(wanted, replace(bounds, train_sizes=trains, colocated=False), pin)
    together = bounds.all_together()
    if together is not None or not pin.sizes:
        return next(feasible(bounds), None)
    return min(feasible(bounds), key=pin.off, default=None)


def nearest_to_pin(split: Split, bounds: SplitBounds, pin: Pin) -> Split | None:
    """Return the split within `bounds` that is closest to the pin, and among those the most similar to `split`. None if
    `bounds` allows none."""
    return min(feasible(bounds), key=lambda one: (pin.off(one), unlikeness(one, split)), default=None)


def place_split(
    snapshot: Snapshot,
    job: PlacementRequest,
    *,
    world: str,
    generation: int,
    current: Plan | None = None,
    wanted: Split | None = None,
    pin: Pin | None = None,
) -> Plan | None:
    """Make a plan with a new train world, of the `wanted` split, else of the split closest to the present one that
    satisfies the pin. Return None if there are too few slots."""
    limits = find_bounds(snapshot, job, pin, None if current is None else len(current.ranks))
    if wanted is None and current is not None:
        wanted = _spread(split_of(current), snapshot)
    fixed = pin or NOTHING_FIXED
    split = nearest_to_pin(wanted, limits, fixed) if wanted is not None else None
    if split is None:
        split = first_split(limits, job, fixed)
    if split is None:
        # A pin is ignored if the job could not continue with it.
        return (
            None
            if pin is None
            else place_split(snapshot, job, world=world, generation=generation, current=current, wanted=wanted)
        )
    how = f"{split} of {snapshot.slots} slots on {len(snapshot.nodes)} nodes"
    return assign_split(
        split, current, snapshot, tuple(job.judges), world=world, generation=generation, reason=how, sizes=job.sizes
    )


def too_few_slots(snapshot: Snapshot) -> SpecError:
    """Return the error that explains why nothing can be placed."""
    return SpecError(
        f"the pools do not fit on {count_noun(snapshot.slots, 'slot')}",
        where="placement",
        fix="Lower placement.train, placement.reward or train.ranks, or start controllers with more slots",
    )


def _spread(split: Split, snapshot: Snapshot) -> Split:
    """Scale the shares of a split to the present slots."""
    slots = snapshot.slots
    if split.mode == "colocated":
        return Split("colocated", slots, slots if split.reward else 0, min(split.train, slots))
    share = slots / max(split.rollout + split.reward + split.train, 1)
    reward, train = max(round(split.reward * share), min(split.reward, 1)), max(round(split.train * share), 1)
    return Split("coexisting", max(slots - reward - train, 1), reward, train)


def mend_plan(plan: Plan, snapshot: Snapshot, job: PlacementRequest) -> Plan | None:
    """Add an engine for each pool whose engines are all on absent nodes. The world stays. Return None if no pool lacks
    an engine."""
    here = snapshot.places
    awake = {place.judge for place in plan.engines if not place.asleep and here.issuperset(place.on)}
    if not here or not {"", *job.judges} - awake:
        return None  # no node has enough slots for an engine
    away = sum(place.on not in here for place in plan.ranks)
    whole = slot_bounds(snapshot, job)
    # Absent ranks still own their slots, because the world stays.
    limits = replace(whole, slots=whole.slots + away, train_sizes=(len(plan.ranks),))
    # If engines span several slots, the positions of ranks may make the closest split impossible.
    tried = (
        assign_split(
            split,
            plan,
            snapshot,
            tuple(job.judges),
            world=plan.world,
            generation=plan.generation + 1,
            reason=f"{split}, because a pool had no engine left",
            sizes=job.sizes,
        )
        for split in sort_by_unlikeness(replace(split_of(plan, snapshot), train=len(plan.ranks)), limits)
    )
    return next((found for found in tried if found is not None), None)


def apply_pin(decision: Decision, limits: SplitBounds, pin: Pin) -> Decision | None:
    """Return the policy's decision, or the closest split that satisfies the pin, without an expected time. Return None
    if the pin cannot be satisfied."""
    if not pin.off(decision.split):
        return decision
    found = nearest_to_pin(decision.split, limits, pin)
    if found is None or pin.off(found):
        return None
    return Decision(found, f"{pin}, as requested; without that: {decision.reason}", idle=decision.idle)


@dataclass(frozen=True, slots=True)
class Placer(ABC):
    """Makes new plans of a running job from its request."""

    request: PlacementRequest

    def with_new_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        """Add engines on new slots. Return None if there are none."""
        return fill_plan(plan, snapshot, self.request)

    @abstractmethod
    def without_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        """Move engines off lost nodes; the world stays. Return None if nothing has to move."""

    @abstractmethod
    def for_new_world(
        self, snapshot: Snapshot, current: Plan | None, wanted: Split | None, pin: Pin, *, world: str, generation: int
    ) -> Plan:
        """Make a plan with a new train world. `wanted`: the policy's split. Raises SpecError if there are too few
        slots."""

    @abstractmethod
    def fits(self, snapshot: Snapshot) -> bool:
        """Whether a train world can be placed."""


class FixedPlacer(Placer):
    """Pools keep their slots (`colocated`, `static`)."""

    __slots__ = ()

    def without_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        return move_judges(plan, snapshot, self.request)

    def for_new_world(
        self, snapshot: Snapshot, current: Plan | None, wanted: Split | None, pin: Pin, *, world: str, generation: int
    ) -> Plan:
        return first_plan(snapshot, self.request, world=world, generation=generation)

    def fits(self, snapshot: Snapshot) -> bool:
        return snapshot.slots > 0 and not count_lacking_slots(snapshot, self.request)


class MovablePlacer(Placer):
    """A policy moves slots between pools."""

    __slots__ = ()

    def without_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        return mend_plan(plan, snapshot, self.request)

    def for_new_world(
        self, snapshot: Snapshot, current: Plan | None, wanted: Split | None, pin: Pin, *, world: str, generation: int
    ) -> Plan:
        plan = place_split(
            snapshot, self.request, world=world, generation=generation, current=current, wanted=wanted, pin=pin
        )
        if plan is None:
            raise too_few_slots(snapshot)
        return plan

    def fits(self, snapshot: Snapshot) -> bool:
        return place_split(snapshot, self.request, world="any", generation=0) is not None


def movable_request(spec: JobSpec, models: ModelConfigs | None = None) -> PlacementRequest:
    """Return the request of a spec, with the work of a step with these models."""
    from placement.mapping.search import describe_workload  # not loaded in a daemon without a job

    return replace(PlacementRequest.by(spec), work=describe_workload(spec, models))


def new_placer(spec: JobSpec, models: ModelConfigs | None = None) -> Placer:
    """Return the placer of a job with these models."""
    return (
        MovablePlacer(movable_request(spec, models))
        if spec.placement.is_live
        else FixedPlacer(PlacementRequest.by(spec))
    )
