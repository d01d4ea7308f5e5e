"""What a job requests from placement (ranks, judges, slots per pool and engine), and how many slots it lacks.

The request covers fixed placements, in which pools keep their slots, and movable ones, in which a policy moves slots
between pools. `placement.placer` makes plans from it; `placement.shares` makes the job's claim on slots of the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcore.config.spec import JobSpec
from placement.slots import SINGLE, ReplicaSizes, Snapshot, sizes_of

if TYPE_CHECKING:  # loaded with the first job only
    from placement.mapping.workload import Workload


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a job requests from placement.

    `moves`: a policy moves slots between pools. `ranks`: size of the train world; None: one per node, or, with `moves`,
    any number up to `most_ranks` (one rank or sequence group per sample of an optimizer update). `judges`: number of engines of each judge that
    the cluster serves, by name; None: one on each slot of the pool. `train`, `reward`: slots of these pools, at the
    start only with `moves`; `train` None: the pools share all slots. `sizes`: slots per engine and sequence group. `group`: responses per
    prompt. `work`: the work of a step, for predictions, or a sentence that says why it is not known.
    """

    ranks: int | None = None
    judges: Mapping[str, int | None] = field(default_factory=dict)
    train: int | None = None
    reward: int = 0
    sizes: ReplicaSizes = SINGLE
    moves: bool = False
    most_ranks: int = 1
    group: int = 1
    work: Workload | str = "the configurations of the job's models were not recorded"

    @classmethod
    def by(cls, spec: JobSpec) -> PlacementRequest:
        """Make the request of a job from its spec, without `work`."""
        placement, sizes = spec.placement, sizes_of(spec)
        judges = {judge.name: judge.serving.replicas for judge in spec.served_judges}
        if placement.policy == "static":
            train = placement.train or 0
            return cls(train, judges, train, placement.reward or 0, sizes)
        if not placement.is_live:
            return cls(spec.train.ranks, judges, sizes=sizes)
        samples = spec.flow.groups_per_step * spec.flow.samples_per_prompt // spec.train.mini_batches
        return cls(
            spec.train.ranks,
            judges,
            placement.train,
            placement.reward or 0,
            sizes,
            moves=True,
            most_ranks=max(samples, 1) * sizes.train,
            group=spec.flow.samples_per_prompt,
        )

    @property
    def has_own_slots(self) -> bool:
        """Whether each pool has slots of its own for the whole job (placement `static`)."""
        return self.train is not None and not self.moves


def count_ranks(snapshot: Snapshot, wanted: PlacementRequest) -> int:
    """Return the number of ranks of a train world formed on these nodes: that of the request, else one per node in whole
    sequence groups, at least one group.
    """
    if wanted.ranks is not None:
        return wanted.ranks
    together = wanted.sizes.train
    nodes = sum(1 for node in snapshot.nodes if node.slots)
    return nodes if together == 1 else max(nodes // together, 1) * together


def count_lacking_slots(snapshot: Snapshot, wanted: PlacementRequest, *, first: bool = False) -> int:
    """Return how many slots must be added before the job can be placed; 0 if it fits. `first`: the job has no plan yet,
    so the spec's initial split must fit."""
    if wanted.train is not None and (first or not wanted.moves):
        need = (wanted.train or wanted.sizes.train) + wanted.reward + wanted.sizes.rollout
    else:
        need = count_ranks(snapshot, wanted) or 1
    return max(need - snapshot.slots, 0)
