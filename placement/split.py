"""How a job's slots are shared out among its pools, and which ways there are. Pure.

Two modes. *Co-existing*: each pool has slots of its own, all at the same time. *Co-located*: every slot goes through the phases of a
step together, rollout, then judges, then train; it costs the waking and sleeping of what takes its turn, and needs the memory of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


def turns(*, judged: bool) -> int:
    """Changes of the turn in a step whose slots are had in turn: to rollout, to the judges if there are any, to training."""
    return 3 if judged else 2


def distance(one: Split, other: Split) -> int:
    """Slots by which they differ, all pools together."""
    return abs(one.rollout - other.rollout) + abs(one.reward - other.reward) + abs(one.train - other.train)


@dataclass(frozen=True, slots=True)
class Bounds:
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
        """Whether it is one of `feasible`, without looking through them."""
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


def feasible(bounds: Bounds) -> Iterator[Split]:
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
