"""What a job asks of placement, and how many slots it lacks.

One request serves both kinds of placement: pools that stay on their slots, and pools between which a policy moves slots.
`placement.placer` makes plans of it, `placement.shares` a claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcore.config.spec import JobSpec
from placement.slots import SINGLE, ReplicaSizes, Snapshot, sizes_of

if TYPE_CHECKING:  # the search of placements is loaded with the first job
    from placement.mapping.workload import Workload


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a job asks of placement.

    `ranks` of a train world; None: one a node, or, where a policy `moves` slots, any size up to `most_ranks`, the samples of an update.
    `judges` that the cluster serves: by name, how many engines; None: one on each slot of the pool. `train`, `reward`: slots that these
    pools have for themselves, or begin with where a policy moves slots; `train` None: all pools share all slots. `group`: responses of a
    prompt. `work`: of a step, for a policy, or why it is not known.
    """

    ranks: int | None = None
    judges: Mapping[str, int | None] = field(default_factory=dict)
    train: int | None = None
    reward: int = 0
    sizes: ReplicaSizes = SINGLE
    moves: bool = False
    most_ranks: int = 1
    group: int = 1
    work: Workload | str = "what the job's models are was not kept"

    @classmethod
    def by(cls, spec: JobSpec) -> PlacementRequest:
        """The request of a spec, without `work`."""
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
            most_ranks=max(samples, 1),
            group=spec.flow.samples_per_prompt,
        )

    @property
    def has_own_slots(self) -> bool:
        """Whether each pool has slots of its own for as long as the job runs."""
        return self.train is not None and not self.moves


def count_ranks(snapshot: Snapshot, wanted: PlacementRequest) -> int:
    """How many ranks a world formed now has."""
    return wanted.ranks if wanted.ranks is not None else sum(1 for node in snapshot.nodes if node.slots)


def count_lacking_slots(snapshot: Snapshot, wanted: PlacementRequest, *, first: bool = False) -> int:
    """How many slots more it takes before the job can be placed; 0: it fits. `first`: it has no plan yet."""
    if wanted.train is not None and (first or not wanted.moves):
        need = (wanted.train or 1) + wanted.reward + wanted.sizes.rollout
    else:
        need = count_ranks(snapshot, wanted) or 1
    return max(need - snapshot.slots, 0)
