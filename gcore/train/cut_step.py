"""A sealed step as one rank's tensors: micro-batches by mini-batch, and what is known of them before the updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gcore.config.spec import TrainSpec
from gcore.errors import DataError
from gcore.ledger.balance import SampleSlot
from gcore.train.batch import Feeding, MicroBatch, make_batch
from gcore.train.feed_state import Work
from gcore.train.packing import Cutting, MiniBatchPlan, plan_step


class Place(NamedTuple):
    """A micro-batch of the step."""

    mini_batch: int
    micro_batch: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step cut into tensors. `batches[m][k]`: micro-batch k of mini-batch m."""

    work: Work
    plans: tuple[MiniBatchPlan, ...]
    batches: tuple[tuple[MicroBatch, ...], ...]

    def places(self) -> Iterator[Place]:
        """All micro-batches, in order."""
        for number, batches in enumerate(self.batches):
            for k in range(len(batches)):
                yield Place(number, k)

    def at(self, place: Place) -> MicroBatch:
        """The micro-batch there."""
        return self.batches[place.mini_batch][place.micro_batch]

    def reward(self, slot: SampleSlot) -> float:
        """Of a sample that this rank holds."""
        return self.work.groups[self.work.seal.groups[slot.group].digest].samples[slot.sample].reward

    def baseline(self, slot: SampleSlot) -> float:
        """Of the group of a sample that this rank holds. Raises DataError if its flow found none."""
        group = self.work.groups[self.work.seal.groups[slot.group].digest]
        if group.baseline is None:
            raise DataError(
                "a group without a baseline cannot be trained with train.advantage: remax",
                where=f"prompt {group.ref}",
                fix="Use a flow that finds one, such as remax, or another estimator",
            )
        return group.baseline


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is known before the updates. `old` may lack the first mini-batch; it is filled in on the way."""

    advantages: dict[Place, Tensor]
    old: dict[Place, Tensor]
    reference: dict[Place, Tensor]


def cut_step(work: Work, train: TrainSpec, feeding: Feeding) -> Step:
    """Raises DataError for tokens that the model does not know."""
    # The rewards of masked samples need their KL.
    cutting = Cutting(train.micro_batch_tokens, feeding.packing, masked=train.rewards_kl)
    plans = plan_step(work.seal, work.layout, work.rank, cutting)
    batches = tuple(tuple(make_batch(work, one, feeding) for one in plan.micro_batches) for plan in plans)
    return Step(work, plans, batches)
