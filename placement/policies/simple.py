"""Policies that do not forecast: `static` and `colocated`, which never move, and two rules that `dynamic` is compared with.

`hill_climb`: after each step one unit goes from the least used pool to the most used one (the utilization rule of the paper on G-Core).
`threshold`: the same, but only where one pool is used less than `LOW` and another more than `HIGH` (the rule of RLinf). Neither weighs
what a change costs, or lends within a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.measurements import MeasuredStep
from placement.policies.base import Decision, Policy, PolicyStart, Situation
from placement.slots import Split, SplitBounds, feasible_splits, nearest_split, split_distance

LOW, HIGH = 0.4, 0.7
"""Shares of use between which `threshold` moves nothing."""


@dataclass(frozen=True)
class StaticPolicy:
    """One split; while slots are away, the nearest that there is."""

    split: Split

    def plan(self, situation: Situation) -> Decision:
        """The same."""
        return Decision(self.nearest(situation.bounds), "the split is fixed")

    def nearest(self, bounds: SplitBounds) -> Split:
        """The feasible split that is most like it, of the same mode if there is one."""
        return nearest_split(bounds, self.split)


@dataclass(frozen=True)
class ColocatedPolicy:
    """All slots in turn; where they cannot be, the nearest to a split of its own."""

    otherwise: Split

    def plan(self, situation: Situation) -> Decision:
        """All of them."""
        together = situation.bounds.all_together()
        if together is None:
            return Decision(nearest_split(situation.bounds, self.otherwise), "a slot cannot hold all models")
        return Decision(together, "all slots in turn")


@dataclass(frozen=True)
class HillClimbPolicy:
    """One unit at a time. `low`, `high`: only between pools that are used less, and more."""

    first: Split
    low: float = 1.0
    high: float = 0.0

    def plan(self, situation: Situation) -> Decision:
        """As the module says."""
        now = nearest_split(situation.bounds, situation.now or self.first)
        if not situation.history or situation.history[-1].seconds is None:
            return Decision(now, "nothing is measured of the newest step")
        used = utilisation(situation.history[-1])
        idle = {pool: 1.0 - share for pool, share in used.items()}
        least, most = min(used, key=lambda one: used[one]), max(used, key=lambda one: used[one])
        if used[least] == used[most] or used[least] > self.low or used[most] < self.high:
            return Decision(now, "no pool is used much less than another", idle=idle)
        better = shift_slots(situation.bounds, now, least, most)
        if better is None:
            return Decision(now, f"{most} cannot take a unit of {least}", idle=idle)
        cost = situation.costs.of(now, better)
        return Decision(better, f"{least} is used {used[least]:.0%}, {most} {used[most]:.0%}", cost_s=cost, idle=idle)


def new_threshold_policy(first: Split) -> HillClimbPolicy:
    """RLinf's."""
    return HillClimbPolicy(first, LOW, HIGH)


def utilisation(step: MeasuredStep) -> dict[str, float]:
    """Of each pool that has slots: busy slot-seconds beside all of them."""
    split, seconds = step.split, step.seconds or 1.0
    slots = {"rollout": split.rollout, "reward": split.reward, "train": split.train}
    return {pool: min(step.busy.get(pool, 0.0) / (count * seconds), 1.0) for pool, count in slots.items() if count}


def shift_slots(bounds: SplitBounds, now: Split, source: str, target: str) -> Split | None:
    """The nearest split with more slots for `target` and fewer for `source`."""
    fitting = [
        one
        for one in feasible_splits(bounds)
        if one.mode == "coexisting"
        and getattr(one, source) < getattr(now, source)
        and getattr(one, target) > getattr(now, target)
    ]
    return min(fitting, key=lambda one: (split_distance(one, now), one), default=None)


def static(start: PolicyStart) -> Policy:
    """One split for ever: for whoever wants to see what nothing would do."""
    return StaticPolicy(start.first)


def colocated(start: PolicyStart) -> Policy:
    """All slots in turn."""
    return ColocatedPolicy(start.first)


def hill_climb(start: PolicyStart) -> Policy:
    """One unit at a time, from the pool that is used least to the one that is used most."""
    return HillClimbPolicy(start.first)


def threshold(start: PolicyStart) -> Policy:
    """The same, only between pools that are used little and much."""
    return new_threshold_policy(start.first)
