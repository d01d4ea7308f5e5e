"""Replicas: the slots that together run one engine (tensor parallel). Pure.

A replica lies on one node, on slots that follow one another there, and begins at a multiple of its size. So where one of two sizes divides
the other, the smaller replicas lie within the larger ones, and either fills a node whose slots can be divided: whichever pool has a
replica's slots, engines of the other can be resident on them, asleep. Slots that are left over on a node belong to no replica. A train rank
has one slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from gcore.config import JobSpec
    from gcore.ledger.job import Plan

Pool = Literal["train", "reward", "rollout"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Slots of one replica of each pool."""

    rollout: int = 1
    reward: int = 1

    def of(self, pool: Pool) -> int:
        """Of a pool."""
        return 1 if pool == "train" else self.rollout if pool == "rollout" else self.reward

    @property
    def widest(self) -> int:
        """Of the larger ones."""
        return max(self.rollout, self.reward)


SINGLE = Sizes()
"""A slot for each."""


def sizes_of(spec: JobSpec) -> Sizes:
    """What `spec` says: all judges that the cluster serves are alike in this (`gcore.config.spanning`)."""
    served = (judge.serving.slots_per_engine for judge in spec.served_judges)
    return Sizes(spec.rollout.slots_per_engine, max(served, default=1))


def spanned(plan: Plan) -> Sizes:
    """The sizes that a plan has. All engines of a pool have one size."""
    found = {place.pool: len(place.slots) for place in plan.engines}
    return Sizes(found.get("rollout", 1), found.get("reward", 1))


def groups(slots: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    """A node's slots as replicas of so many."""
    for begin in range(0, len(slots) - size + 1, size):
        yield tuple(slots[begin : begin + size])


def round_robin(of_nodes: Sequence[Sequence[T]]) -> list[T]:
    """What each node has, one of each node before the second of any."""
    deepest = max(map(len, of_nodes), default=0)
    return [of_node[number] for number in range(deepest) for of_node in of_nodes if number < len(of_node)]
