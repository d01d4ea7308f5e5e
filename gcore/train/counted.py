"""Which tokens each update of a step trains, and how many they are over all ranks.

They are those of the responses that are not masked, which every rank knows from the seal; less those that the correction
leaves out, which is known once old log-probabilities are, and adds up over ranks. Advantages and their whitening are of the
responses as they are: what is left out is not trained, but it was answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gcore.train.cut_step import Place, Step
from gcore.train.loss import Losses


class Summing(Protocol):
    """Of each number over the ranks; a collective."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Their sum."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """Of an update, over all ranks: trained tokens, and sequences with at least one."""

    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """`masks` [b, w] bool by micro-batch of this rank, `counts` by mini-batch."""

    masks: Mapping[Place, Tensor]
    counts: tuple[Count, ...]


def trained(step: Step, losses: Losses, old: Mapping[Place, Tensor], over_ranks: Summing) -> Trained:
    """What is trained. `old` [b, w] by micro-batch; looked at only if the correction drops tokens, and then a collective."""
    counts = [Count(plan.tokens, plan.sequences) for plan in step.plans]
    if not losses.drops:
        return Trained({place: step.at(place).mask for place in step.places()}, tuple(counts))
    masks = {place: losses.kept(step.at(place), old[place]) for place in step.places()}
    lost = [[0.0, 0.0] for _ in counts]
    for place, mask in masks.items():
        before = step.at(place).mask
        lost[place.mini_batch][0] += int(before.sum() - mask.sum())
        lost[place.mini_batch][1] += int((before.any(dim=1) & ~mask.any(dim=1)).sum())
    everywhere = iter(over_ranks.sum([number for pair in lost for number in pair]))
    left = [Count(c.tokens - int(next(everywhere)), c.sequences - int(next(everywhere))) for c in counts]
    return Trained(masks, tuple(left))
