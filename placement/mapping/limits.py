"""What memory leaves of the splits that a policy may choose from. Pure.

Left out is what cannot fit whatever else is chosen: a train world of which one rank does not fit on a slot of its own or its host, and
all slots in turn where ranks and engines do not fit together. How many engines a pool has hardly changes what one of them takes, so
nothing is left out for that. Where nothing would be left, nothing is left out: estimates are estimates, and a job that is there goes on.
"""

from __future__ import annotations

from dataclasses import replace

from placement.mapping.cluster import Cluster
from placement.mapping.fitting import Memory, Room, room, world_excess
from placement.mapping.ways import Way
from placement.mapping.workload import Workload
from placement.split import Bounds, Split, feasible


def within_memory(bounds: Bounds, workload: Workload, cluster: Cluster, now: int | None = None) -> Bounds:
    """`bounds` without what does not fit. `now`: ranks of the world that is there, which fits whatever is estimated."""
    memory = Memory.of(cluster)
    together = bounds.all_together()
    colocated = False
    if together is not None:
        way = Way(together, bounds.rollout_size, bounds.reward_size, workload.turns[-1 if memory.gpu else 0])
        colocated = isinstance(room(way, workload, cluster, memory), Room)

    def fits(size: int) -> bool:
        split = Split("coexisting", bounds.slots - size, 0, size)
        return (
            world_excess(Way(split, bounds.rollout_size, bounds.reward_size, False), workload, cluster, memory) is None
        )

    keeps = {now, together.train if together is not None and colocated else None}
    sizes = tuple(size for size in bounds.train_sizes if size in keeps or fits(size))
    left = replace(bounds, train_sizes=sizes, colocated=colocated)
    return left if next(feasible(left), None) is not None else bounds
