"""What forecasts of production turned out to be wrong by, and what the next ones are multiplied by for it. Pure but for what it remembers.

A split that was tried goes by its own error, drawn to that of its mode; any other by that of its mode. A split that is plainly worse
than its like, two steps in a row, goes by its own at once: what a change made worse must not take dozens of steps to be believed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import exp
from statistics import median

from placement.split import Split
from placement.trends import plainly_off

DRAWN = 20.0
"""Steps of its own that count as much as what is known of a split's mode."""
RIGHT = 4.0
"""Steps of a mode that count as much as that forecasts of it are right: few, or what is wrong with all of them were held against the
splits that were tried alone, and each that was not would look better."""
FADE = 0.9
"""Weight of what was seen of a split beside that of one step later."""
PLAIN = 2.5
"""A split is plainly worse when it is off by so many standard deviations of the others of its mode more than they are."""
LEAST_SPREAD = 0.1
OWN, OTHERS = 5, 16
"""Newest steps of a split and of the others that are compared, at most."""
FEWEST_OWN, FEWEST_OTHERS = 2, 3
REMEMBERED = 64

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

    _of_split: dict[Shape, _Mean] = field(default_factory=dict)
    _of_mode: dict[str, _Mean] = field(default_factory=dict)
    _newest: deque[tuple[int, Shape, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, step: int, split: Split, off: float) -> None:
        """The step's production on `split` took exp(off) times what the model says."""
        self._newest.append((step, _shape(split), off))
        self._count(_shape(split), off)

    def forget(self, since: int) -> None:
        """Steps from that one on were given up; what is known is what is remembered of those before."""
        kept = [one for one in self._newest if one[0] < since]
        if len(kept) == len(self._newest):
            return
        self._newest = deque(kept, maxlen=REMEMBERED)
        self._of_split, self._of_mode = {}, {}
        for _, shape, off in kept:
            self._count(shape, off)

    def _count(self, shape: Shape, off: float) -> None:
        self._of_split.setdefault(shape, _Mean()).add(off)
        self._of_mode.setdefault(shape[0], _Mean()).add(off)

    def factor(self, split: Split) -> float:
        """What the forecast of its production is to be multiplied by."""
        plain = self._plainly_worse(split)
        if plain is not None:
            return exp(plain)
        mode = self._of_mode.get(split.mode) or next(iter(self._of_mode.values()), None)
        of_mode = mode.drawn_to(0.0, RIGHT) if mode is not None else 0.0
        own = self._of_split.get(_shape(split))
        return exp(own.drawn_to(of_mode, DRAWN) if own is not None else of_mode)

    def _plainly_worse(self, split: Split) -> float | None:
        """Its own error, if that is plainly above the others'."""
        shape = _shape(split)
        own = [off for _, of, off in self._newest if of == shape][-OWN:]
        others = [off for _, of, off in self._newest if of != shape and of[0] == split.mode][-OTHERS:]
        if len(own) < FEWEST_OWN or len(others) < FEWEST_OTHERS:
            return None
        if plainly_off(others, own, LEAST_SPREAD, PLAIN) <= 0:
            return None
        return (sum(own) + median(others)) / (len(own) + 1)


def _shape(split: Split) -> Shape:
    return split.mode, split.rollout, split.reward
