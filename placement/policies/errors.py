"""What forecasts of production turned out to be wrong by, and what the next ones are multiplied by for it. Pure but for what it remembers.

A split that was tried goes by its own error, pulled towards that of its mode; any other by that of its mode. A split that is plainly worse
than its like, two steps in a row, goes by its own at once: what a change made worse must not take dozens of steps to be believed. Its like
are those of its mode; of all slots in turn, which are one split only, those of the other.
How wrong forecasts still are once they are put right so is their spread, which decides how wide the dead band is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

import numpy as np

from placement.laws import Floats
from placement.policies.choices import Choices
from placement.split import Split
from placement.trends import plainly_off

DRAWN = 20.0
"""Steps of its own that count as much as what is known of a split's mode."""
RIGHT = 4.0
"""Steps of a mode that count as much as that forecasts of it are right: few, or what is wrong with all of them were held against the
splits that were tried alone, and each that was not would look better."""
FADE = 0.9
"""Weight of what was seen of a step beside that of one step later."""
UNTRIED = 0.05
"""What forecasts are taken to be wrong by before any step was compared with its own."""
PLAIN = 2.5
"""A split is plainly worse when it is off by so many standard deviations of the others of its mode more than they are."""
LEAST_SPREAD = 0.1
OWN, OTHERS = 5, 16
"""Newest steps of a split and of the others that are compared, at most."""
FEWEST_OWN, FEWEST_OTHERS = 2, 3
REMEMBERED = 64
UNTRIED_SLOTS = 0
"""Of each pool of a split that no step can have been made on."""

Shape = tuple[str, int, int]


@dataclass
class _Mean:
    """Weighted sum of logarithms, and the weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """One step more."""
        self.total = FADE * self.total + value
        self.weight = FADE * self.weight + 1.0

    def drawn_to(self, other: float, drawn: float) -> float:
        """As far as it is known, and else `other`, which counts as much as `drawn` steps."""
        return (self.total + drawn * other) / (self.weight + drawn)


@dataclass
class Errors:
    """Of one job. Logarithms."""

    spread: float = UNTRIED
    """What forecasts, put right by what was known then, were wrong by: a mean over the newest steps."""
    _of_split: dict[Shape, _Mean] = field(default_factory=dict)
    _of_mode: dict[str, _Mean] = field(default_factory=dict)
    _newest: deque[tuple[int, Shape, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, step: int, split: Split, off: float) -> None:
        """The step's production on `split` took exp(off) times what the model says."""
        self._count(step, _shape(split), off)

    def forget(self, since: int) -> None:
        """Steps from that one on were given up; what is known is what is remembered of those before."""
        kept = [one for one in self._newest if one[0] < since]
        if len(kept) == len(self._newest):
            return
        self._newest.clear()
        self._of_split, self._of_mode, self.spread = {}, {}, UNTRIED
        for one in kept:
            self._count(*one)

    def _count(self, step: int, shape: Shape, off: float) -> None:
        self.spread = FADE * self.spread + (1.0 - FADE) * abs(off - log(self._factor(shape)))
        self._newest.append((step, shape, off))
        self._of_split.setdefault(shape, _Mean()).add(off)
        self._of_mode.setdefault(shape[0], _Mean()).add(off)

    def factor(self, split: Split) -> float:
        """What the forecast of its production is to be multiplied by."""
        return self._factor(_shape(split))

    def factors(self, there: Choices) -> Floats:
        """The same of all of them, [splits]: those that were never tried have that of their mode."""
        found = np.empty(len(there.splits))
        for mode in ("coexisting", "colocated"):
            found[there.is_mode(mode)] = self._factor((mode, UNTRIED_SLOTS, UNTRIED_SLOTS))
        for shape in self._of_split:
            found[there.is_like(*shape)] = self._factor(shape)
        return found

    def _factor(self, shape: Shape) -> float:
        plain = self._plainly_worse(shape)
        if plain is not None:
            return exp(plain)
        mode = self._of_mode.get(shape[0]) or next(iter(self._of_mode.values()), None)
        of_mode = mode.drawn_to(0.0, RIGHT) if mode is not None else 0.0
        own = self._of_split.get(shape)
        return exp(own.drawn_to(of_mode, DRAWN) if own is not None else of_mode)

    def _plainly_worse(self, shape: Shape) -> float | None:
        """Its own error, if that is plainly above the others': those of its mode, or of the other one where it is the only one of its own."""
        own = [off for _, of, off in self._newest if of == shape][-OWN:]
        others = [off for _, of, off in self._newest if of != shape and of[0] == shape[0]][-OTHERS:]
        if not others:
            others = [off for _, of, off in self._newest if of != shape][-OTHERS:]
        if len(own) < FEWEST_OWN or len(others) < FEWEST_OTHERS:
            return None
        if plainly_off(others, own, LEAST_SPREAD, PLAIN) <= 0:
            return None
        return (sum(own) + median(others)) / (len(own) + 1)


def _shape(split: Split) -> Shape:
    return split.mode, split.rollout, split.reward
