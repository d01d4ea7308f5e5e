"""What a job requests from placement, and how many slots are missing.

One request serves both kinds of placement: pools that stay on their slots, and pools between which a policy moves
slots. `placement.placer` makes plans from it, and `placement.shares` a claim.
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

    `ranks` of a train world. None: one per node, or, if a policy `moves` slots, any size up to `most_ranks`, the
    samples of an update. `judges` served by the cluster: number of engines by name; None: one on each slot of the pool.
    `train`, `reward`: slots of these pools, or their first slots if a policy moves slots; `train` None: all pools share
    all slots. `group`: responses per prompt. `work` of a step, for a policy, or why it is not known.
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
        """Make the request of a spec, without `work`."""
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
        """Whether each pool has its own slots for the whole job."""
        return self.train is not None and not self.moves


def count_ranks(snapshot: Snapshot, wanted: PlacementRequest) -> int:
    """Return the number of ranks of a world formed now."""
    return wanted.ranks if wanted.ranks is not None else sum(1 for node in snapshot.nodes if node.slots)


def count_lacking_slots(snapshot: Snapshot, wanted: PlacementRequest, *, first: bool = False) -> int:
    """Return the number of slots missing before the job can be placed; 0 if it fits. `first`: the job has no plan
    yet."""
    if wanted.train is not None and (first or not wanted.moves):
        need = (wanted.train or 1) + wanted.reward + wanted.sizes.rollout
    else:
        need = count_ranks(snapshot, wanted) or 1
    return max(need - snapshot.slots, 0)
