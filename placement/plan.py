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
    wanted = ranks if ranks is not None else sum(1 for n in nodes if n.slots)
    if not places or wanted > len(places):
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
