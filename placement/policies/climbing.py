"""The rules of others, which `dynamic` is held against. Pure.

`hill_climb`: after each step one unit goes from the pool that is used least to the one that is used most (the utilisation rule of the
paper on G-Core). `threshold`: the same, but only where one pool is used less than `LOW` and another more than `HIGH` (RLinf's rule).
Neither forecasts, weighs what a change costs, or lends within a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.measured import Measured
from placement.policies.base import Decision, Situation
from placement.policies.fixed import nearest, possible
from placement.split import Bounds, Split, distance

LOW, HIGH = 0.4, 0.7


@dataclass(frozen=True)
class HillClimb:
    """One unit at a time. `low`, `high`: only between pools that are used less, and more."""

    first: Split
    low: float = 1.0
    high: float = 0.0

    def plan(self, situation: Situation) -> Decision:
        """As the module says."""
        now = nearest(situation.bounds, situation.now or self.first)
        if not situation.history or situation.history[-1].seconds is None:
            return Decision(now, "nothing is measured of the newest step")
        used = utilisation(situation.history[-1])
        idle = {pool: 1.0 - share for pool, share in used.items()}
        least, most = min(used, key=lambda one: used[one]), max(used, key=lambda one: used[one])
        if used[least] == used[most] or used[least] > self.low or used[most] < self.high:
            return Decision(now, "no pool is used much less than another", idle=idle)
        better = shifted(situation.bounds, now, least, most)
        if better is None:
            return Decision(now, f"{most} cannot take a unit of {least}", idle=idle)
        cost = situation.costs.of(now, better)
        return Decision(better, f"{least} is used {used[least]:.0%}, {most} {used[most]:.0%}", cost_s=cost, idle=idle)


def threshold(first: Split) -> HillClimb:
    """RLinf's."""
    return HillClimb(first, LOW, HIGH)


def utilisation(step: Measured) -> dict[str, float]:
    """Of each pool that has slots: busy slot-seconds beside all of them."""
    split, seconds = step.split, step.seconds or 1.0
    slots = {"rollout": split.rollout, "reward": split.reward, "train": split.train}
    return {pool: min(step.busy.get(pool, 0.0) / (count * seconds), 1.0) for pool, count in slots.items() if count}


def shifted(bounds: Bounds, now: Split, source: str, target: str) -> Split | None:
    """The nearest split with more slots for `target` and fewer for `source`."""
    fitting = [
        one
        for one in possible(bounds)
        if one.mode == "coexisting"
        and getattr(one, source) < getattr(now, source)
        and getattr(one, target) > getattr(now, target)
    ]
    return min(fitting, key=lambda one: (distance(one, now), one), default=None)
