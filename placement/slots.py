"""Slots of a job: nodes and their slots, replicas, splits among the pools and their bounds.

Two modes of a split. *Co-existing*: each pool has slots of its own, all at the same time. *Co-located*: every slot goes through the phases
of a step, rollout, then judges, then train; that costs waking and sleeping at each turn, and needs the memory of all pools.

A replica is the slots that together run one engine (tensor parallel). It lies on adjacent slots of one node, and begins at a multiple of
its size. So where one of two sizes divides the other, the smaller replicas lie within the larger ones, either fills a node whose slots can
be divided, and engines of another pool can be resident, asleep, on a replica's slots. Slots left over on a node belong to no replica. A
train rank has one slot.
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
    """Slots of each pool. Co-located: each pool has all of them."""

    mode: Mode
    rollout: int
    reward: int
    train: int

    def __str__(self) -> str:
        if self.mode == "colocated":
            return f"all {self.rollout} slots in turn"
        return f"{self.rollout} rollout, {self.reward} reward, {self.train} train"


def count_turns(*, judged: bool) -> int:
    """Changes of the turn in a step whose slots are had in turn: to rollout, to the judges if there are any, to training."""
    return 3 if judged else 2


def split_distance(one: Split, other: Split) -> int:
    """Slots by which they differ, all pools together."""
    return abs(one.rollout - other.rollout) + abs(one.reward - other.reward) + abs(one.train - other.train)


@dataclass(frozen=True, slots=True)
class SplitBounds:
    """What a split must keep to. `rollout_size`, `reward_size`: slots of one replica. `train_sizes`: what a train world may have, in
    slots. `judged`: whether there is anything for the reward pool to do. `nodes`: that prompts are shared out among alike, each answered
    by its node's engines: a step waits for the node that has the fewest. `group`: responses of a prompt, which are all made by one engine."""

    slots: int
    rollout_size: int = 1
    reward_size: int = 1
    train_sizes: tuple[int, ...] = ()
    judged: bool = True
    colocated: bool = True
    nodes: int = 1
    group: int = 1

    def sizes(self) -> tuple[int, ...]:
        """The train worlds that fit beside one replica of each other pool."""
        least = self.rollout_size + (self.reward_size if self.judged else 0)
        return tuple(size for size in self.train_sizes if size <= self.slots - least)

    def all_together(self) -> Split | None:
        """The co-located split, if there is one: the largest world that fits, engines on as many slots as replicas fill."""
        fitting = [size for size in self.train_sizes if size <= self.slots]
        if not self.colocated or not fitting or self.slots < max(self.rollout_size, self.reward_size):
            return None
        rollout = self.slots // self.rollout_size * self.rollout_size
        reward = self.slots // self.reward_size * self.reward_size if self.judged else 0
        return Split("colocated", rollout, reward, max(fitting))

    def allows(self, split: Split) -> bool:
        """Whether it is one of `feasible`, without enumerating them."""
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
    """Every split within the bounds that leaves no whole replica's slots unused, in an order of its own.

    Slots that are too few for a replica of either pool stay without one.
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
            if left - reward - rollout < bounds.reward_size:  # else one judge more would cost rollout nothing
                yield Split("coexisting", rollout, reward, train)


T = TypeVar("T")


@lru_cache(maxsize=64)
def feasible_splits(bounds: SplitBounds) -> tuple[Split, ...]:
    """Every feasible split, in order."""
    return tuple(feasible(bounds))


@lru_cache(maxsize=4096)
def nearest_split(bounds: SplitBounds, split: Split) -> Split:
    """The feasible split that is most like `split`, of the same mode if there is one."""
    every = feasible_splits(bounds)
    found = [one for one in every if one.mode == split.mode] or every
    return min(found, key=lambda one: (split_distance(one, split), one))


def even_split(bounds: SplitBounds) -> Split:
    """What a person would write without having measured anything: half for rollout, and the other half shared out."""
    quarter = bounds.slots // 4
    reward = quarter if bounds.judged else 0
    return nearest_split(bounds, Split("coexisting", bounds.slots - 2 * quarter, reward, quarter))


@dataclass(frozen=True, slots=True)
class ReplicaSizes:
    """Slots of one replica of each pool."""

    rollout: int = 1
    reward: int = 1

    def of(self, pool: Pool) -> int:
        """The size of a pool's replicas."""
        return 1 if pool == "train" else self.rollout if pool == "rollout" else self.reward

    @property
    def widest(self) -> int:
        """The larger size."""
        return max(self.rollout, self.reward)


SINGLE = ReplicaSizes()
"""A slot for each."""


def sizes_of(spec: JobSpec) -> ReplicaSizes:
    """The sizes of a spec. All judges that the cluster serves have the same."""
    served = (judge.serving.slots_per_engine for judge in spec.served_judges)
    return ReplicaSizes(spec.rollout.slots_per_engine, max(served, default=1))


def plan_sizes(plan: Plan) -> ReplicaSizes:
    """The sizes that a plan has. All engines of a pool have one size."""
    found = {place.pool: len(place.slots) for place in plan.engines}
    return ReplicaSizes(found.get("rollout", 1), found.get("reward", 1))


def replica_groups(slots: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """Divide a node's slots into replicas of `size`; slots left over belong to none."""
    for begin in range(0, len(slots) - size + 1, size):
        yield tuple(slots[begin : begin + size])


def round_robin(of_nodes: Sequence[Sequence[T]]) -> list[T]:
    """Items of all nodes, one of each node before the second of any."""
    deepest = max(map(len, of_nodes), default=0)
    return [of_node[number] for number in range(deepest) for of_node in of_nodes if number < len(of_node)]


@dataclass(frozen=True, slots=True)
class NodeSlots:
    """A node that is there, and its slots. `facts`: what it tells of them; None: nothing."""

    node: str
    slots: tuple[str, ...]
    facts: NodeFacts | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes and slots that may be placed on."""

    nodes: tuple[NodeSlots, ...]

    @property
    def slots(self) -> int:
        """Number of slots."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def places(self) -> frozenset[Slot]:
        """One by one."""
        return frozenset(Slot(node.node, slot) for node in self.nodes for slot in node.slots)


def trim_to_replicas(snapshot: Snapshot, sizes: ReplicaSizes) -> Snapshot:
    """Without those slots of a node that are left over when it is divided into replicas: a node that comes later may have more or fewer than the others."""
    if sizes.widest == 1:
        return snapshot
    return Snapshot(
        tuple(
            replace(node, slots=node.slots[: len(node.slots) // sizes.widest * sizes.widest]) for node in snapshot.nodes
        )
    )


def count_noun(count: int, what: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count} {what}{'s' * (count != 1)}"
