"""What could have been had within one step: the best lending in a few moments, exact on small cases, and a bound for large ones.

`reached` holds the rule against the best of all that could have been lent at the moments at which the rule looks. These are a few, for all
schedules are tried: with more, both might lend at better moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from placement.simulate.kernel import BY_RULE, BY_SCHEDULE, NEVER, Floats, Ints, play
from placement.simulate.told import UNKNOWN, Told

NO_MOVES = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Lent:
    """When the last request has ended, and how many replicas were lent in each moment."""

    seconds: float
    moves: tuple[int, ...]


def best_schedule(
    lengths: Floats,
    judged: Floats,
    pace: Floats,
    rollout: int,
    laws: Floats,
    most: Ints,
    *,
    cost_s: float,
    every_s: float,
    moments: int,
    at_once: int = 1,
) -> Lent:
    """Of every schedule that moves up to `at_once` replicas in each of so many moments, by trying all of them: (2 * at_once + 1) ** moments."""
    found = []
    several = sorted(range(-at_once, at_once + 1), key=lambda count: (abs(count), -count))
    for moves in product(several, repeat=moments):
        schedule = np.array(moves, dtype=np.int64)
        told = lengths, judged, pace, rollout, laws, most, BY_SCHEDULE, cost_s, every_s
        found.append(Lent(float(play(*told, UNKNOWN.pools, UNKNOWN.tail, schedule, 0, 0.0)[0]), moves))
    return min(found, key=lambda one: one.seconds)


@dataclass(frozen=True, slots=True)
class Reached:
    """Seconds until a batch is whole: lent in the best way, by the rule, and with nothing lent."""

    best: Lent
    by_rule: float
    never: float

    @property
    def known(self) -> float:
        """What the best split for each step is taken to need: the shorter of the two others."""
        return min(self.by_rule, self.never)


def reached(
    lengths: Floats,
    judged: Floats,
    pace: Floats,
    rollout: int,
    laws: Floats,
    most: Ints,
    *,
    told: Told,
    cost_s: float,
    moments: int,
) -> Reached:
    """All three, if it is looked at so many moments whether to lend, evenly over the time that it takes with nothing lent. `told`: what the
    rule knows.

    None is shorter than the best: to lend nothing is one of the schedules, and the rule lends in those moments only, or takes longer than
    if nothing were lent."""
    work = lengths, judged, pace, rollout, laws, most
    never = float(play(*work, NEVER, cost_s, 1.0, UNKNOWN.pools, UNKNOWN.tail, NO_MOVES, 0, 0.0)[0])
    every_s = never / moments
    by_rule = float(play(*work, BY_RULE, cost_s, every_s, told.pools, told.tail, NO_MOVES, 0, 0.0)[0])
    best = best_schedule(*work, cost_s=cost_s, every_s=every_s, moments=moments, at_once=pace.size)
    return Reached(best, by_rule, never)


def within_bound(lengths: Floats, judged: Floats, laws: Floats, most: Ints, replicas: int) -> float:
    """Seconds that no lending can be below on replicas of pace 1: the longest request alone, and a fluid that flows at no cost."""
    own = lengths * laws[0].sum() + judged * laws[1].sum()
    least = laws[:, 0] / most + laws[:, 1]
    return max(float(own.max()), float(lengths.sum() * least[0] + judged.sum() * least[1]) / replicas)
