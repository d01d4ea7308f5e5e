"""The first placement policies. `colocated`: every slot runs rollout, judges and train in turn. `static`: each pool has slots of
its own, for as long as the job runs.

Pure: a snapshot of the slots in, a plan out. Slots are taken round robin, one of each node before the second of any. With
`colocated` there is one rollout engine on every slot, the train ranks are on the first slots of the nodes, one a node by default,
and each judge has an engine on every slot, or on as many as the spec says. At staleness 0 they take turns by the step's own order:
ranks compute only between READY and commit, when no group is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gcore.config import JobSpec
from gcore.errors import SpecError
from gcore.ledger.facts import NodeFacts
from gcore.ledger.job import EnginePlace, Plan, RankPlace


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
    """What a job wants placed. `ranks` None: one a node. `apart` None: all pools share all slots."""

    ranks: int | None = None
    judges: tuple[JudgeWanted, ...] = ()
    apart: Apart | None = None

    @classmethod
    def by(cls, spec: JobSpec) -> Wanted:
        """What `spec` says."""
        judges = tuple(JudgeWanted(one.name, one.serving.replicas) for one in spec.judges if one.model is not None)
        if spec.placement.policy != "static":  # of a policy that moves slots `placement.live` knows more
            return cls(spec.train.ranks, judges)
        apart = Apart(spec.placement.train or 0, spec.placement.reward or 0)
        return cls(apart.train, judges, apart)


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
    if wanted.apart is None:
        rollout, reward = places, places
        how = f"colocated: {len(places)} slots on {len(nodes)} nodes take rollout and train in turn, {ranks} ranks"
    else:
        reward = places[wanted.apart.train : wanted.apart.train + wanted.apart.reward]
        rollout = places[wanted.apart.train + wanted.apart.reward :]
        how = f"static: of {len(places)} slots {ranks} train, {len(reward)} judge, {len(rollout)} roll out"
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
        have = {(place.node, place.slot) for place in there if place.judge == judge.name}
        wanted = len(slots) + len(have) if judge.replicas is None else judge.replicas
        turned = [*slots[number % len(slots) :], *slots[: number % len(slots)]] if slots else []
        free = [place for place in turned if (place.node, place.slot) not in have]
        more += [place.model_copy(update={"judge": judge.name}) for place in free[: max(wanted - len(have), 0)]]
    return more


def _round_robin(nodes: Sequence[NodeSlots]) -> list[EnginePlace]:
    """The slots, one of each node before the second of any."""
    deepest = max((len(n.slots) for n in nodes), default=0)
    return [EnginePlace(node=n.node, slot=n.slots[i]) for i in range(deepest) for n in nodes if i < len(n.slots)]


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
    taken = {(place.node, place.slot) for place in plan.engines}
    together = bool(taken & {(place.node, place.slot) for place in plan.ranks})
    if wanted.apart is not None or moves:
        taken |= {(place.node, place.slot) for place in plan.ranks}
    places = _round_robin(sorted(snapshot.nodes, key=lambda n: n.node))
    fresh = [place for place in places if (place.node, place.slot) not in taken]
    if not fresh:
        return None
    judging = _judge_places(wanted.judges, fresh, plan.engines) if wanted.apart is None else []
    if moves and not together:
        judging = [place.model_copy(update={"asleep": True}) for place in judging]
    names = ", ".join(sorted({place.node for place in fresh}))
    return plan.model_copy(
        update={
            "generation": plan.generation + 1,
            "engines": (*plan.engines, *fresh, *judging),
            "lent_from": None,
            "reason": f"{plan.reason}; then engines on {len(fresh)} slots of {names}",
        }
    )


def moved(plan: Plan, snapshot: Snapshot, wanted: Wanted) -> Plan | None:
    """The plan with judges moved off nodes that are away for good; world, ranks and rollout's places as they are. None: no judge
    lacks an engine that it can have.

    Where pools have slots of their own, a judge with no engine left shares the slots of others, or else gets one of rollout's, which
    keeps one.
    """
    here = {(node.node, slot) for node in snapshot.nodes for slot in node.slots}
    there = [place for place in plan.engines if (place.node, place.slot) in here]
    rollout = [place for place in there if not place.judge]
    taken: EnginePlace | None = None
    if wanted.apart is None:
        slots, judges = _round_robin(sorted(snapshot.nodes, key=lambda n: n.node)), wanted.judges
    else:
        served = {place.judge for place in there}
        judges = tuple(judge for judge in wanted.judges if judge.name not in served)
        slots = [EnginePlace(node=n, slot=s) for n, s in sorted({(p.node, p.slot) for p in there if p.judge})]
        if not slots and len(rollout) > 1:
            taken = rollout[-1]
            slots = [taken]
    more = _judge_places(judges, slots, there)
    names = {place.judge for place in more}
    left = [place for place in plan.engines if place.judge in names and (place.node, place.slot) not in here]
    if not left:
        return None
    engines = tuple(place for place in plan.engines if place not in left and place != taken)
    away = ", ".join(sorted({place.node for place in left}))
    return plan.model_copy(
        update={
            "generation": plan.generation + 1,
            "engines": (*engines, *more),
            "lent_from": None,
            "reason": f"{plan.reason}; then {', '.join(sorted(names))} moved, for {away} stays away",
        }
    )


def ranks_wanted(snapshot: Snapshot, wanted: Wanted) -> int:
    """How many ranks a world formed now has."""
    return wanted.ranks if wanted.ranks is not None else sum(1 for node in snapshot.nodes if node.slots)


def slots_lacking(snapshot: Snapshot, wanted: Wanted) -> int:
    """How many slots more it takes before the job can be placed; 0: it fits."""
    need = ranks_wanted(snapshot, wanted) or 1
    if wanted.apart is not None:
        need += wanted.apart.reward + 1
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
