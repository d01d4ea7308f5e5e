"""The first placement policies. `colocated`: every slot runs rollout, judges and train in turn. `static`: each pool has slots of
its own, for as long as the job runs.

Pure: a snapshot of the slots in, a plan out. Slots are taken round robin, one of each node before the second of any. With
`colocated` there is one rollout engine on every slot, the train ranks are on the first slots of the nodes, one a node by default,
and each judge has an engine on every slot, or on as many as the spec says. Where engines span several slots, read "replica" for "slot"
(`placement.replicas`). At staleness 0 they take turns by the step's own order: ranks compute only between READY and commit, when no group
is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gcore.config import JobSpec
from gcore.errors import SpecError
from gcore.ledger.facts import NodeFacts
from gcore.ledger.job import EnginePlace, Plan, RankPlace
from placement.replicas import SINGLE, Sizes, groups, round_robin, sizes_of


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node that is there, and its slots. `facts`: what it tells of them; None: nothing."""

    node: str
    slots: tuple[str, ...]
    facts: NodeFacts | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What may be placed on."""

    nodes: tuple[NodeSlots, ...]

    @property
    def slots(self) -> int:
        """How many there are."""
        return sum(len(node.slots) for node in self.nodes)


@dataclass(frozen=True, slots=True)
class JudgeWanted:
    """A judge that the cluster serves. `replicas` None: an engine on each slot of its pool."""

    name: str
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Apart:
    """Slots of their own for two of the pools; what remains is rollout's."""

    train: int
    reward: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job wants placed. `ranks` None: one a node. `apart` None: all pools share all slots. `sizes`: slots of an engine."""

    ranks: int | None = None
    judges: tuple[JudgeWanted, ...] = ()
    apart: Apart | None = None
    sizes: Sizes = SINGLE

    @classmethod
    def by(cls, spec: JobSpec) -> Wanted:
        """What `spec` says."""
        judges = tuple(JudgeWanted(one.name, one.serving.replicas) for one in spec.served_judges)
        if spec.placement.policy != "static":  # of a policy that moves slots `placement.live` knows more
            return cls(spec.train.ranks, judges, sizes=sizes_of(spec))
        apart = Apart(spec.placement.train or 0, spec.placement.reward or 0)
        return cls(apart.train, judges, apart, sizes_of(spec))


def divided(snapshot: Snapshot, sizes: Sizes) -> Snapshot:
    """Without those slots of a node that are left over when it is divided into replicas: a node that comes later may have more or fewer than the others."""
    if sizes.widest == 1:
        return snapshot
    return Snapshot(
        tuple(
            replace(node, slots=node.slots[: len(node.slots) // sizes.widest * sizes.widest]) for node in snapshot.nodes
        )
    )


def first_plan(snapshot: Snapshot, wanted: Wanted, *, world: str, generation: int) -> Plan:
    """Place a job. Raises SpecError if there are too few slots."""
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    places, ranks = _round_robin(nodes), ranks_wanted(snapshot, wanted)
    if slots_lacking(snapshot, wanted):
        raise SpecError(
            f"{_in_words(wanted, ranks or 1)} do not fit on {counted(len(places), 'slot')}",
            where="train.ranks" if wanted.apart is None else "placement",
            fix=f"Lower {_to_lower(wanted)}, or start controllers with more slots",
        )
    sizes = wanted.sizes
    rollout, reward = (_round_robin(nodes, size) for size in (sizes.rollout, sizes.reward))
    if wanted.apart is None:
        how = f"colocated: {len(places)} slots on {len(nodes)} nodes take rollout and train in turn, {ranks} ranks"
    else:
        if sizes.widest > 1:
            # Node by node, so that ranks and smaller engines break as few of the larger ones' slots as can be.
            places = [place for node in nodes for place in _round_robin([node])]
            if sizes.reward <= sizes.rollout:
                reward = [one for node in nodes for one in _round_robin([node], sizes.reward)]
        training = places[: wanted.apart.train]
        reward = _free(reward, training)[: wanted.apart.reward // sizes.reward]
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


def _in_words(wanted: Wanted, ranks: int) -> str:
    if wanted.apart is None:
        return counted(ranks, "train rank")
    reward = f", {counted(wanted.apart.reward, 'slot')} for judges" if wanted.apart.reward else ""
    return f"{counted(ranks, 'train rank')}{reward} and 1 rollout engine, each on slots of its own,"


def _to_lower(wanted: Wanted) -> str:
    if wanted.apart is None:
        return "train.ranks"
    return "placement.train or placement.reward" if wanted.apart.reward else "placement.train"


def counted(count: int, what: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count} {what}{'s' * (count != 1)}"


def _judge_places(
    judges: Sequence[JudgeWanted], slots: Sequence[EnginePlace], there: Sequence[EnginePlace]
) -> list[EnginePlace]:
    """Engines for judges on `slots`, beside those that are `there`; the judges begin on different slots."""
    more = []
    for number, judge in enumerate(judges):
        have = [place for place in there if place.judge == judge.name]
        wanted = len(slots) + len(have) if judge.replicas is None else judge.replicas
        turned = [*slots[number % len(slots) :], *slots[: number % len(slots)]] if slots else []
        free = _free(turned, have)
        more += [place.model_copy(update={"judge": judge.name}) for place in free[: max(wanted - len(have), 0)]]
    return more


def _round_robin(nodes: Sequence[NodeSlots], size: int = 1) -> list[EnginePlace]:
    """The slots, or replicas of so many, one of each node before the second of any."""
    found = round_robin([[(one.node, group) for group in groups(one.slots, size)] for one in nodes])
    return [EnginePlace(node=node, slot=first, further=tuple(more)) for node, (first, *more) in found]


def _free(places: Sequence[EnginePlace], taken: Iterable[EnginePlace]) -> list[EnginePlace]:
    """Those that have no slot in common with the others."""
    slots = {(place.node, slot) for place in taken for slot in place.slots}
    return [place for place in places if slots.isdisjoint((place.node, slot) for slot in place.slots)]


MARGIN = 2.0
"""A larger world must save so many times the seconds that its start takes."""
UNKNOWN_STEPS_LEFT = 100
"""What a job that goes by epochs is taken to have before it: its number of steps is not known before its end."""


def joined(plan: Plan, snapshot: Snapshot, wanted: Wanted, *, moves: bool = False) -> Plan | None:
    """The plan with engines on each slot that is there and serves nothing; world and ranks as they are. None: there is no such
    slot. `moves`: a policy moves slots; until it is asked, one that comes is rollout's, with judges that sleep, unless all slots go
    through the phases together.

    Engines of nodes that are away keep their places: they are started again when the node is back, unless they are judges and
    `moved` by then. Where pools have slots of their own, a slot that comes is rollout's; judges have as many engines as the first
    plan gave them.
    """
    ranks = [EnginePlace(node=place.node, slot=place.slot) for place in plan.ranks]
    on = {(place.node, slot) for place in plan.engines for slot in place.slots}
    together = any((rank.node, rank.slot) in on for rank in ranks)
    taken = [*plan.engines, *(ranks if wanted.apart is not None or moves else ())]
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    fresh = _free(_round_robin(nodes, wanted.sizes.rollout), taken)
    to_judge = _free(_round_robin(nodes, wanted.sizes.reward), taken)
    if not fresh:
        return None
    judging = _judge_places(wanted.judges, to_judge, plan.engines) if wanted.apart is None else []
    if moves and not together:
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


def moved(plan: Plan, snapshot: Snapshot, wanted: Wanted) -> Plan | None:
    """The plan with judges moved off nodes that are away for good; world, ranks and rollout's places as they are. None: no judge
    lacks an engine that it can have.

    Where pools have slots of their own, a judge with no engine left shares the slots of others, or else gets one of rollout's, which
    keeps one.
    """
    here = {(node.node, slot) for node in snapshot.nodes for slot in node.slots}
    there = [place for place in plan.engines if here.issuperset((place.node, slot) for slot in place.slots)]
    rollout = [place for place in there if not place.judge]
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    taken: list[EnginePlace] = []
    if wanted.apart is None:
        slots, judges = _round_robin(nodes, wanted.sizes.reward), wanted.judges
    else:
        served = {place.judge for place in there}
        judges = tuple(judge for judge in wanted.judges if judge.name not in served)
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
            "reason": f"{plan.reason}; then {', '.join(sorted(names))} moved, for {away} stays away",
        }
    )


def _given_up(
    rollout: Sequence[EnginePlace], nodes: Sequence[NodeSlots], sizes: Sizes
) -> tuple[list[EnginePlace], list[EnginePlace]]:
    """The last engines of the policy that a judge's engine may take the place of, if one is left then, and that place."""
    ranked = {place: number for number, place in enumerate(rollout)}
    found: list[tuple[int, list[EnginePlace], EnginePlace]] = []
    for wide in _round_robin(nodes, sizes.reward):
        over = [one for one in rollout if one.node == wide.node and not set(one.slots).isdisjoint(wide.slots)]
        if over and len(over) < len(rollout) and {slot for one in over for slot in one.slots} >= set(wide.slots):
            found.append((max(ranked[one] for one in over), over, wide))
    _, given, place = max(found, key=lambda one: one[0], default=(0, [], None))
    return given, [] if place is None else [place]


def ranks_wanted(snapshot: Snapshot, wanted: Wanted) -> int:
    """How many ranks a world formed now has."""
    return wanted.ranks if wanted.ranks is not None else sum(1 for node in snapshot.nodes if node.slots)


def slots_lacking(snapshot: Snapshot, wanted: Wanted) -> int:
    """How many slots more it takes before the job can be placed; 0: it fits."""
    need = ranks_wanted(snapshot, wanted) or 1
    if wanted.apart is not None:
        need += wanted.apart.reward + wanted.sizes.rollout
    return max(need - snapshot.slots, 0)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a larger world is weighed by. `train_s`: of the newest step, from READY to commit; `start_s`: of the newest start
    of a rank, until it serves; None where they were not measured. `steps_left` None: not known."""

    now: int
    wanted: int
    train_s: float | None
    start_s: float | None
    steps_left: int | None


def worth_forming(growth: Growth) -> str:
    """Why a larger world is worth its start, or nothing: for want of measurements it is not.

    What a step gains is an upper bound, for ranks do not share out all that a step costs; the margin stands for the rest.
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
