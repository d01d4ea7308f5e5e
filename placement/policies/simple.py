"""Policies that do not forecast: `static` and `colocated` never move; two rules serve as baselines for `dynamic`.

`hill_climb`: after each step, move the fewest slots that are possible from the pool with the lowest utilization to the
one with the highest (the rule of the G-Core paper). `threshold`: the same, but only if one pool's utilization is below
`LOW` and another's above `HIGH` (the rule of RLinf). Neither considers the cost of a change, or lends slots within a
step.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.measurements import MeasuredStep
from placement.policies.base import Decision, Policy, PolicyStart, Situation
from placement.slots import Split, SplitBounds, feasible_splits, nearest_split, split_distance

LOW, HIGH = 0.4, 0.7
"""`threshold` moves slots only from a pool with a utilization below `LOW` to one with a utilization above `HIGH`."""


@dataclass(frozen=True)
class StaticPolicy:
    """Always chooses one split, or the most similar feasible one while slots are absent."""

    split: Split

    def plan(self, situation: Situation) -> Decision:
        """Return the fixed split."""
        return Decision(self.nearest(situation.bounds), "the split is fixed")

    def nearest(self, bounds: SplitBounds) -> Split:
        """Return the feasible split most similar to the fixed one, preferably of the same mode."""
        return nearest_split(bounds, self.split)


@dataclass(frozen=True)
class ColocatedPolicy:
    """Always chooses the co-located split, or the one most similar to `otherwise` if a slot cannot hold all models."""

    otherwise: Split

    def plan(self, situation: Situation) -> Decision:
        """Return the co-located split."""
        together = situation.bounds.all_together()
        if together is None:
            return Decision(nearest_split(situation.bounds, self.otherwise), "a slot cannot hold all models")
        return Decision(together, "all slots in turn")


@dataclass(frozen=True)
class HillClimbPolicy:
    """Moves the fewest possible slots after each step, by utilization. `first`: the split before the first step. `low`,
    `high`: move only from a pool with a utilization of at most `low` to one of at least `high`."""

    first: Split
    low: float = 1.0
    high: float = 0.0

    def plan(self, situation: Situation) -> Decision:
        """Decide as the module docstring describes."""
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
    """Create the hill-climbing policy with the utilization limits `LOW` and `HIGH` (RLinf's rule)."""
    return HillClimbPolicy(first, LOW, HIGH)


def utilisation(step: MeasuredStep) -> dict[str, float]:
    """Return each pool's utilization in a step: busy slot-seconds divided by all slot-seconds."""
    split, seconds = step.split, step.seconds or 1.0
    slots = {"rollout": split.rollout, "reward": split.reward, "train": split.train}
    return {pool: min(step.busy.get(pool, 0.0) / (count * seconds), 1.0) for pool, count in slots.items() if count}


def shift_slots(bounds: SplitBounds, now: Split, source: str, target: str) -> Split | None:
    """Return the feasible split most similar to `now` with more slots for the pool `target` and fewer for `source`;
    None if there is none."""
    fitting = [
        one
        for one in feasible_splits(bounds)
        if one.mode == "coexisting"
        and getattr(one, source) < getattr(now, source)
        and getattr(one, target) > getattr(now, target)
    ]
    return min(fitting, key=lambda one: (split_distance(one, now), one), default=None)


def static(start: PolicyStart) -> Policy:
    """Create a policy that keeps one split, as a baseline."""
    return StaticPolicy(start.first)


def colocated(start: PolicyStart) -> Policy:
    """Create a policy that uses the co-located split."""
    return ColocatedPolicy(start.first)


def hill_climb(start: PolicyStart) -> Policy:
    """Create a policy that moves one unit at a time from the least used pool to the most used one."""
    return HillClimbPolicy(start.first)


def threshold(start: PolicyStart) -> Policy:
    """Create a policy like `hill_climb` that moves slots only beyond the utilization limits `LOW` and `HIGH`."""
    return new_threshold_policy(start.first)
