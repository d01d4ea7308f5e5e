"""What could have been had within one step: the best lending in a few moments, exact on small cases, and a bound for large ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from placement.simulate.kernel import BY_SCHEDULE, Floats, Ints, play
from placement.simulate.told import UNKNOWN


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
) -> Lent:
    """Of every schedule that moves up to one replica in each of so many moments, by trying all of them: 3 ** moments."""
    found = []
    for moves in product((0, 1, -1), repeat=moments):
        schedule = np.array(moves, dtype=np.int64)
        told = lengths, judged, pace, rollout, laws, most, BY_SCHEDULE, cost_s, every_s
        found.append(Lent(float(play(*told, UNKNOWN.pools, UNKNOWN.tail, schedule, 0, 0.0)[0]), moves))
    return min(found, key=lambda one: one.seconds)


def within_bound(lengths: Floats, judged: Floats, laws: Floats, most: Ints, replicas: int) -> float:
    """Seconds that no lending can be below on replicas of pace 1: the longest request alone, and a fluid that flows at no cost."""
    own = lengths * laws[0].sum() + judged * laws[1].sum()
    least = laws[:, 0] / most + laws[:, 1]
    return max(float(own.max()), float(lengths.sum() * least[0] + judged.sum() * least[1]) / replicas)
