"""The first placement policy: every slot runs rollout and train in turn (`colocated`).

Pure: a snapshot of the slots in, a plan out. One engine on every slot; the train ranks on the first slots of the nodes,
one a node by default. At staleness 0 the two take turns by the step's own order: ranks compute only between READY and
commit, when no group is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gcore.errors import SpecError
from gcore.ledger.job import EnginePlace, Plan, RankPlace


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node that is there, and its slots."""

    node: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What may be placed on."""

    nodes: tuple[NodeSlots, ...]


def colocated(snapshot: Snapshot, *, world: str, generation: int, ranks: int | None) -> Plan:
    """Place a job. `ranks` None: one rank a node. Raises SpecError if there are fewer slots than ranks, or none."""
    nodes = sorted(snapshot.nodes, key=lambda n: n.node)
    places = _round_robin(nodes)
    wanted = ranks_wanted(snapshot, ranks)
    if slots_lacking(snapshot, ranks):
        raise SpecError(
            f"{wanted or 1} train ranks do not fit on {len(places)} slots",
            where="train.ranks",
            fix="Lower train.ranks, or start controllers with more slots",
        )
    return Plan(
        generation=generation,
        world=world,
        ranks=tuple(RankPlace(rank=i, node=p.node, slot=p.slot) for i, p in enumerate(places[:wanted])),
        engines=tuple(places),
        reason=f"colocated: {len(places)} slots on {len(nodes)} nodes take rollout and train in turn, {wanted} ranks",
    )


def _round_robin(nodes: Sequence[NodeSlots]) -> list[EnginePlace]:
    """The slots, one of each node before the second of any."""
    deepest = max((len(n.slots) for n in nodes), default=0)
    return [EnginePlace(node=n.node, slot=n.slots[i]) for i in range(deepest) for n in nodes if i < len(n.slots)]


MARGIN = 2.0
"""A larger world must save so many times the seconds that its start takes."""
UNKNOWN_STEPS_LEFT = 100
"""What a job that goes by epochs is taken to have before it: its number of steps is not known before its end."""


def joined(plan: Plan, snapshot: Snapshot) -> Plan | None:
    """The plan with an engine on each slot that is there and has none; world and ranks as they are. None: there is no such slot.

    Engines of nodes that are away keep their places: they are started again when the node is back.
    """
    have = {(place.node, place.slot) for place in plan.engines}
    more = [p for p in _round_robin(sorted(snapshot.nodes, key=lambda n: n.node)) if (p.node, p.slot) not in have]
    if not more:
        return None
    names = ", ".join(sorted({place.node for place in more}))
    return plan.model_copy(
        update={
            "generation": plan.generation + 1,
            "engines": (*plan.engines, *more),
            "reason": f"{plan.reason}; then engines on {len(more)} slots of {names}",
        }
    )


def ranks_wanted(snapshot: Snapshot, ranks: int | None) -> int:
    """How many ranks a world formed now has. `ranks` None: one a node."""
    return ranks if ranks is not None else sum(1 for node in snapshot.nodes if node.slots)


def slots_lacking(snapshot: Snapshot, ranks: int | None) -> int:
    """How many slots more it takes before a world can be placed; 0: it fits."""
    return max((ranks_wanted(snapshot, ranks) or 1) - sum(len(node.slots) for node in snapshot.nodes), 0)


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
