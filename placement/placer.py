"""Make plans of a job: the first plan of fixed pools, new plans when nodes come or go, and train worlds.

There are two fixed placements. `colocated`: one rollout engine on every slot, train ranks on the first slots of the
nodes (one per node by default), and an engine of each judge on every slot, or on as many as the spec sets. `static`:
each pool has slots of its own for the whole job. Slots are assigned round robin, one of each node before the second of
any. If engines span several slots, read "replica" for "slot". Co-located ranks and engines do not compute at the same
time at staleness 0: ranks compute only between READY (they hold the batch) and commit, when no group is in flight.

In a movable placement (`spec.placement.is_live`) a policy chooses splits within `SplitBounds`, and `placement.assign`
finds the slots. A pin (a placement that a person fixed) overrides the policy, unless the job could not continue with
it.
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
    rank_slots,
    replica_groups,
    round_robin,
)


def first_plan(snapshot: Snapshot, wanted: PlacementRequest, *, world: str, generation: int) -> Plan:
    """Place a job with a fixed placement (`colocated` or `static`). `world`: name of its train world. `generation`:
    number of the plan. Raises SpecError if there are too few slots."""
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    places, ranks = rank_slots(nodes, wanted.sizes.train), count_ranks(snapshot, wanted)
    if count_lacking_slots(snapshot, wanted):
        raise SpecError(
            f"{_in_words(wanted, ranks or 1)} do not fit on {count_noun(len(places), 'slot')}",
            where="placement" if wanted.has_own_slots else _to_lower(wanted),
            fix=f"Lower {_to_lower(wanted)}, or start controllers with more slots",
        )
    sizes = wanted.sizes
    rollout, reward = (_round_robin(nodes, size) for size in (sizes.rollout, sizes.reward))
    if not wanted.has_own_slots:
        how = f"colocated: {len(places)} slots on {len(nodes)} nodes take rollout and train in turn, {ranks} ranks"
    else:
        if sizes.widest > 1:
            # Node by node, so that ranks and smaller engines break the fewest slots of larger ones.
            places = [place for node in nodes for place in rank_slots([node], wanted.sizes.train)]
            if sizes.reward <= sizes.rollout:
                reward = [one for node in nodes for one in _round_robin([node], sizes.reward)]
        training = [EnginePlace(node=place.node, slot=place.slot) for place in places[: wanted.train]]
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
    """Describe the minimum that a job needs, for an error message."""
    if not wanted.has_own_slots:
        return count_noun(ranks, "train rank")
    reward = f", {count_noun(wanted.reward, 'slot')} for judges" if wanted.reward else ""
    return f"{count_noun(ranks, 'train rank')}{reward} and 1 rollout engine, each on slots of its own,"


def _to_lower(wanted: PlacementRequest) -> str:
    """Name the fields of the spec that request so many slots, for an error message."""
    if not wanted.has_own_slots:
        return "train.sequence_parallel" if wanted.ranks is None and wanted.sizes.train > 1 else "train.ranks"
    return "placement.train or placement.reward" if wanted.reward else "placement.train"


def _judge_places(
    judges: Mapping[str, int | None], slots: Sequence[EnginePlace], there: Sequence[EnginePlace]
) -> list[EnginePlace]:
    """Return engines of judges on `slots`, in addition to the engines `there`, so that each judge has as many as
    requested. `judges`: number of engines by name; None: one on every slot. Each judge begins at another slot, so that
    few engines spread over all slots."""
    more = []
    for number, (judge, replicas) in enumerate(judges.items()):
        have = [place for place in there if place.judge == judge]
        wanted = len(slots) + len(have) if replicas is None else replicas
        turned = [*slots[number % len(slots) :], *slots[: number % len(slots)]] if slots else []
        free = _free(turned, have)
        more += [place.model_copy(update={"judge": judge}) for place in free[: max(wanted - len(have), 0)]]
    return more


def _round_robin(nodes: Sequence[NodeSlots], size: int = 1) -> list[EnginePlace]:
    """List all places for an engine of `size` slots, one of each node before the second of any."""
    found = round_robin([[(one.node, group) for group in replica_groups(one.slots, size)] for one in nodes])
    return [EnginePlace(node=node, slot=first, further=tuple(more)) for node, (first, *more) in found]


def _free(places: Sequence[EnginePlace], taken: Iterable[EnginePlace]) -> list[EnginePlace]:
    """List the places that share no slot with `taken`."""
    slots = {slot for place in taken for slot in place.on}
    return [place for place in places if slots.isdisjoint(place.on)]


MARGIN = 2.0
"""A larger train world is formed if it saves at least this many times the seconds that it takes to start."""

UNKNOWN_STEPS_LEFT = 100
"""Assumed remaining steps of a job limited by epochs; its number of steps is not known before its end."""


def fill_plan(plan: Plan, snapshot: Snapshot, wanted: PlacementRequest) -> Plan | None:
    """Add engines on present slots without any, for example those of a new node. The train world stays. Return None if
    there is no such slot.

    In a co-located split a new slot gets an engine of each model. In a static placement it gets a rollout engine. In a
    movable placement it belongs to rollout, beside sleeping judge engines, until the policy is called. Engines of
    absent nodes stay in the plan and start again when the node returns.
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
    """Move judge engines from lost nodes to present ones. The train world and rollout engines stay. Return None if no
    judge engine has to or can move.

    In a static placement, a judge moves only if it has no engine left. Its engines then share the slots of other
    judges. If there are none, it gets the slots of a rollout engine, unless that is the last one.
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
    """Choose rollout engines that give their slots to a judge engine; at least one rollout engine remains. Those at the
    end of the plan are chosen first. Return them and the place of the judge engine; both empty if there are none."""
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
    """Input of the decision to form a larger train world.

    `now`, `wanted`: present and possible number of ranks. `train_s`: seconds of training in the newest step, from READY
    to commit. `start_s`: seconds of the newest start of a rank, until it serves requests. `steps_left`: steps until the
    end of the job. None: not known.
    """

    now: int
    wanted: int
    train_s: float | None
    start_s: float | None
    steps_left: int | None


def worth_forming(growth: GrowthMeasurements) -> str:
    """Decide whether a larger train world saves more time than its start takes. Return the reason, or an empty string
    if it does not or nothing is measured.

    The saving is computed as if all training time were divided between the ranks. Some is not, so `MARGIN` requires a
    multiple.
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
"""Up to this many ranks or sequence groups every size of the train world is allowed; with more, only 2**n and 3 * 2**n."""


def find_bounds(
    snapshot: Snapshot, job: PlacementRequest, pin: Pin | None = None, now: int | None = None
) -> SplitBounds:
    """Return the bounds of the splits that a policy may choose on the present nodes. Splits that do not fit into memory
    are excluded if the models and nodes are known. `now`: number of ranks of the present world; this size stays
    allowed."""
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
    """Return the bounds of the splits that a policy may choose, without regard to memory. `now`: as in
    `find_bounds`."""
    slots = snapshot.slots
    if job.ranks is not None:
        sizes: tuple[int, ...] = (job.ranks,)
    else:
        together = job.sizes.train
        most = min(slots, job.most_ranks) // together
        found = {size * together for size in range(1, most + 1) if most <= ALL_SIZES or _is_round(size)}
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
    """Return the first split of a job: that of the spec if it sets one, else the co-located one, else the first
    feasible one; in each case as close to the pin as possible. None if no split is feasible."""
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
    """Return the split within `bounds` that is closest to the pin, and among equally close ones the most similar to
    `split`. None if no split is feasible."""
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
    """Make a plan with a new train world. Its split is close to `wanted` if given, else to that of the `current` plan,
    and satisfies the pin if the job can continue with it. Return None if there are too few slots."""
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
    """Return the error to raise when the job's pools do not fit on the present slots."""
    return SpecError(
        f"the pools do not fit on {count_noun(snapshot.slots, 'slot')}",
        where="placement",
        fix="Lower placement.train, placement.reward or train.ranks, or start controllers with more slots",
    )


def _spread(split: Split, snapshot: Snapshot) -> Split:
    """Scale a split to the number of present slots; pools keep their proportions."""
    slots = snapshot.slots
    if split.mode == "colocated":
        return Split("colocated", slots, slots if split.reward else 0, min(split.train, slots))
    share = slots / max(split.rollout + split.reward + split.train, 1)
    reward, train = max(round(split.reward * share), min(split.reward, 1)), max(round(split.train * share), 1)
    return Split("coexisting", max(slots - reward - train, 1), reward, train)


def mend_plan(plan: Plan, snapshot: Snapshot, job: PlacementRequest) -> Plan | None:
    """Make a plan in which each pool has an engine again, after all engines of a pool were lost with their nodes. The
    train world stays. Return None if every pool has an engine, or no such plan exists."""
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
    """Return the policy's decision if it satisfies the pin; else a decision for the closest split that does, without an
    expected time. Return None if no split within `limits` satisfies the pin."""
    if not pin.off(decision.split):
        return decision
    found = nearest_to_pin(decision.split, limits, pin)
    if found is None or pin.off(found):
        return None
    return Decision(found, f"{pin}, as requested; without that: {decision.reason}", idle=decision.idle)


@dataclass(frozen=True, slots=True)
class Placer(ABC):
    """Makes new plans for a running job, when nodes come or go or a train world has to be formed."""

    request: PlacementRequest

    def with_new_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        """Return a plan with engines on present slots that have none; None if there are no such slots."""
        return fill_plan(plan, snapshot, self.request)

    @abstractmethod
    def without_nodes(self, plan: Plan, snapshot: Snapshot) -> Plan | None:
        """Return a plan in which engines of lost nodes run elsewhere, with the same train world; None if no engine has
        to move."""

    @abstractmethod
    def for_new_world(
        self, snapshot: Snapshot, current: Plan | None, wanted: Split | None, pin: Pin, *, world: str, generation: int
    ) -> Plan:
        """Make a plan with a new train world, named `world`. `wanted`: the split that the policy chose, if any. Raises
        SpecError if there are too few slots."""

    @abstractmethod
    def fits(self, snapshot: Snapshot) -> bool:
        """Whether the job can be placed on the present nodes."""


class FixedPlacer(Placer):
    """Placer of jobs whose pools keep their slots (placements `colocated` and `static`)."""

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
    """Placer of jobs whose slots a policy moves between pools."""

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
    """Return the placement request of a spec, including the work of a step. `models`: configurations of its models."""
    from placement.mapping.search import describe_workload  # not loaded in a daemon without a job

    return replace(PlacementRequest.by(spec), work=describe_workload(spec, models))


def new_placer(spec: JobSpec, models: ModelConfigs | None = None) -> Placer:
    """Return the placer of a job. `models`: configurations of its models, for memory and time estimates."""
    return (
        MovablePlacer(movable_request(spec, models))
        if spec.placement.is_live
        else FixedPlacer(PlacementRequest.by(spec))
    )
