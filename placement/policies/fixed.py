"""Policies that never move anything of themselves: `static`, one split for ever, and `colocated`, all slots in turn. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from placement.policies.base import Decision, Situation
from placement.split import Bounds, Split, distance, feasible


@dataclass(frozen=True)
class Static:
    """One split; while slots are away, the nearest that there is."""

    split: Split

    def plan(self, situation: Situation) -> Decision:
        """The same."""
        return Decision(self.nearest(situation.bounds), "the split is fixed")

    def nearest(self, bounds: Bounds) -> Split:
        """The feasible split that is most like it, of the same mode if there is one."""
        return nearest(bounds, self.split)


@dataclass(frozen=True)
class Colocated:
    """All slots in turn; where they cannot be, the nearest to a split of its own."""

    otherwise: Split

    def plan(self, situation: Situation) -> Decision:
        """All of them."""
        together = situation.bounds.all_together()
        if together is None:
            return Decision(nearest(situation.bounds, self.otherwise), "a slot cannot hold all models")
        return Decision(together, "all slots in turn")


@lru_cache(maxsize=64)
def possible(bounds: Bounds) -> tuple[Split, ...]:
    """Every feasible split, in order."""
    return tuple(feasible(bounds))


@lru_cache(maxsize=4096)
def nearest(bounds: Bounds, split: Split) -> Split:
    """The feasible split that is most like `split`, of the same mode if there is one."""
    every = possible(bounds)
    found = [one for one in every if one.mode == split.mode] or every
    return min(found, key=lambda one: (distance(one, split), one))


def even(bounds: Bounds) -> Split:
    """What a person would write without having measured anything: half for rollout, and the other half shared out."""
    quarter = bounds.slots // 4
    reward = quarter if bounds.judged else 0
    return nearest(bounds, Split("coexisting", bounds.slots - 2 * quarter, reward, quarter))
