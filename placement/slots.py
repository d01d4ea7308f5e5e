"""Slots of a job: nodes with their slots, replicas, splits (how many slots each pool gets) and their bounds.

A split has one of two modes. *Co-existing*: each pool has slots of its own. *Co-located*: the pools share all slots
over time; every slot goes through the phases of a step: rollout, judges, train. Co-location costs a wake and a sleep at
each phase change, and needs the memory of all pools.

A replica is the set of slots that together run one engine (tensor parallel): adjacent slots of one node, beginning at a
multiple of its size. So if one of two sizes divides the other, each larger replica consists of whole smaller ones, and
a sleeping engine of another pool can stay on its slots. Slots that remain at the end of a node belong to no replica. A
train rank has one slot. A replica of the train pool is a sequence group: ranks that compute each sample together, or one
rank. Unlike an engine it may have slots of several nodes, if no node has enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar

from gcore.config.spec import JobSpec
from gcore.ledger.records.cluster import NodeFacts, Slot
from gcore.ledger.records.job import Plan
from gcore.types import Pool

Mode = Literal["coexisting", "colocated"]


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """How many slots each pool has. In a co-located split each pool has all of them."""

    mode: Mode
    rollout: int
    reward: int
    train: int

    def __str__(self) -> str:
        if self.mode == "colocated":
            return f"all {self.rollout} slots in turn"
        return f"{self.rollout} rollout, {self.reward} reward, {self.train} train"


def count_turns(*, judged: bool) -> int:
    """Return the number of phase changes per step in a co-located split: to rollout, to the judges if there are any, to
    training."""
    return 3 if judged else 2


def split_distance(one: Split, other: Split) -> int:
    """Return the sum over the pools of the number of slots by which two splits differ."""
    return abs(one.rollout - other.rollout) + abs(one.reward - other.reward) + abs(one.train - other.train)


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """Defines which splits are feasible, and what forecasts need to know about the nodes.

    `slots`: number of present slots. `rollout_size`, `reward_size`: slots per replica. `train_sizes`: allowed train
    world sizes in slots. `judged`: whether the reward pool has work. `colocated`: whether a slot can hold all models.
    `nodes`: number of nodes that share the prompts equally; each node's engines answer its prompts, so a step waits for
    the node with the fewest engines. `group`: responses per prompt; one engine generates all of them.
    """

    slots: int
    rollout_size: int = 1
    reward_size: int = 1
    train_sizes: tuple[int, ...] = ()
    judged: bool = True
    colocated: bool = True
    nodes: int = 1
    group: int = 1

    def sizes(self) -> tuple[int, ...]:
        """Return the allowed train world sizes that leave room for one replica of each other pool."""
        least = self.rollout_size + (self.reward_size if self.judged else 0)
        return tuple(size for size in self.train_sizes if size <= self.slots - least)

    def all_together(self) -> Split | None:
        """Return the co-located split: the largest allowed train world, and engines on all slots that whole replicas
        fill. None if it is not feasible."""
        fitting = [size for size in self.train_sizes if size <= self.slots]
        if not self.colocated or not fitting or self.slots < max(self.rollout_size, self.reward_size):
            return None
        rollout = self.slots // self.rollout_size * self.rollout_size
        reward = self.slots // self.reward_size * self.reward_size if self.judged else 0
        return Split("colocated", rollout, reward, max(fitting))

    def allows(self, split: Split) -> bool:
        """Whether the split is feasible, without enumerating all feasible splits."""
        if split.mode == "colocated":
            return split == self.all_together()
        if split.train not in self.sizes():
            return False
        left = self.slots - split.train - split.reward
        if split.rollout != left // self.rollout_size * self.rollout_size or split.rollout < self.rollout_size:
            return False
        if not self.judged:
            return split.reward == 0
        is_whole = split.reward >= self.reward_size and split.reward % self.reward_size == 0
        return is_whole and left - split.rollout < self.reward_size


def feasible(bounds: SplitBounds) -> Iterator[Split]:
    """Enumerate the feasible splits: the co-located one, and every co-existing one that uses all slots.

    Slots that are too few for a replica of either pool stay unused.
    """
    together = bounds.all_together()
    if together is not None:
        yield together
    for train in bounds.sizes():
        left = bounds.slots - train
        if not bounds.judged:
            yield Split("coexisting", left // bounds.rollout_size * bounds.rollout_size, 0, train)
            continue
        for reward in range(bounds.reward_size, left - bounds.rollout_size + 1, bounds.reward_size):
            rollout = (left - reward) // bounds.rollout_size * bounds.rollout_size
            if left - reward - rollout < bounds.reward_size:  # else one more judge would not reduce rollout
                yield Split("coexisting", rollout, reward, train)


T = TypeVar("T")


@lru_cache(maxsize=64)
def feasible_splits(bounds: SplitBounds) -> tuple[Split, ...]:
    """List every feasible split, in order."""
    return tuple(feasible(bounds))


@lru_cache(maxsize=4096)
def nearest_split(bounds: SplitBounds, split: Split) -> Split:
    """Return the feasible split most similar to `split`, preferably of the same mode."""
    every = feasible_splits(bounds)
    found = [one for one in every if one.mode == split.mode] or every
    return min(found, key=lambda one: (split_distance(one, split), one))


def even_split(bounds: SplitBounds) -> Split:
    """Return a split without regard to measurements, as a user might choose it: half of the slots for rollout, a
    quarter each for reward and train."""
    quarter = bounds.slots // 4
    reward = quarter if bounds.judged else 0
    return nearest_split(bounds, Split("coexisting", bounds.slots - 2 * quarter, reward, quarter))


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """Slots per replica of each pool."""

    rollout: int = 1
    reward: int = 1
    train: int = 1

    def of(self, pool: Pool) -> int:
        """Return the size of a pool's replicas."""
        return self.train if pool == "train" else self.rollout if pool == "rollout" else self.reward

    @property
    def widest(self) -> int:
        """The larger of the two sizes of engines."""
        return max(self.rollout, self.reward)


SINGLE = ReplicaSizes()
"""One slot per replica in every pool."""


def sizes_of(spec: JobSpec) -> ReplicaSizes:
    """Return the slots per replica that a spec sets. All judges that the cluster serves have the same size."""
    served = (judge.serving.slots_per_engine for judge in spec.served_judges)
    return ReplicaSizes(spec.rollout.slots_per_engine, max(served, default=1), spec.train.sequence_parallel)


def plan_sizes(plan: Plan) -> ReplicaSizes:
    """Return the slots per engine in a plan. All engines of a pool have the same size."""
    found = {place.pool: len(place.slots) for place in plan.engines}
    return ReplicaSizes(found.get("rollout", 1), found.get("reward", 1))


def replica_groups(slots: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Divide a node's slots into replicas of `size` adjacent slots; slots that remain belong to none."""
    for begin in range(0, len(slots) - size + 1, size):
        yield tuple(slots[begin : begin + size])


def round_robin(of_nodes: Sequence[Sequence[T]]) -> list[T]:
    """List the items of all nodes, one of each node before the second of any."""
    deepest = max(map(len, of_nodes), default=0)
    return [of_node[number] for number in range(deepest) for of_node in of_nodes if number < len(of_node)]


def rank_slots(nodes: Sequence[NodeSlots], together: int) -> list[Slot]:
    """List the slots of all nodes in the order in which train ranks use them.

    First whole sequence groups of `together` adjacent slots, one of each node before the second of any; then the slots
    that remain on each node, in the same way.
    """
    groups = [
        [tuple(Slot(one.node, name) for name in group) for group in replica_groups(one.slots, together)]
        for one in nodes
    ]
    left = [[Slot(one.node, name) for name in one.slots[len(one.slots) // together * together :]] for one in nodes]
    return [*(slot for group in round_robin(groups) for slot in group), *round_robin(left)]


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A present node and its slots. `facts`: devices and memory as the node reports them; None: not reported."""

    node: str
    slots: tuple[str, ...]
    facts: NodeFacts | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The present nodes with the slots that a job may use."""

    nodes: tuple[NodeSlots, ...]

    @property
    def slots(self) -> int:
        """Total number of slots."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def places(self) -> frozenset[Slot]:
        """All slots, each with its node."""
        return frozenset(Slot(node.node, slot) for node in self.nodes for slot in node.slots)


def trim_to_replicas(snapshot: Snapshot, sizes: ReplicaSizes) -> Snapshot:
    """Remove the slots of each node that are left over when it is divided into replicas of the widest size."""
    if sizes.widest == 1:
        return snapshot
    return Snapshot(
        tuple(
            replace(node, slots=node.slots[: len(node.slots) // sizes.widest * sizes.widest]) for node in snapshot.nodes
        )
    )


def count_noun(count: int, what: str) -> str:
    """Format a count, for example `1 slot`, `2 slots`."""
    return f"{count} {what}{'s' * (count != 1)}"
