"""Learned errors of forecasts, and by what the next forecasts are multiplied for them.

A split that was tried has its own error, pulled towards that of its mode; any other split has that of its mode. A split that is plainly
worse than the others of its mode (co-located, which is one split only: of the other mode) for two steps in a row has its own error at
once: a change for the worse must not take dozens of steps to be believed. The spread of the errors that remain after correction is the
width of the dead band.

`ModeSlowdown`: co-located, engines of several pools may be awake on one slot and slow one another down, which by their times alone looks as
if they had become slower. The slowdown in the mode that was not measured first is learned from its first steps and taken out of
their times, so laws and paces are those of the mode that was measured first. What a mode is slower by as a whole is part of its error. A
pool whose pace changes in the very steps in which the mode changes is taken to be slowed down by it, until the mode changes again.

`SplitChoices`: all splits within bounds, by number and as arrays, for on a thousand slots there are tens of thousands of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log
from statistics import median

import numpy as np
from numpy.typing import NDArray

from placement.forecast import REWARD, ROLLOUT, TOGETHER, TRAIN, Shapes, shapes_of
from placement.laws import POOLS, DecodeLaw, Floats, plain_offset
from placement.measurements import EngineSpeed, MeasuredStep
from placement.policies.base import SwitchCosts
from placement.slots import Mode, Split, SplitBounds, feasible_splits

LEARNED = 3
"""First steps of the other mode from which it is learned."""

LEAST = 1.25
"""Times longer, or shorter, below which nothing is taken out: engines differ, and so do steps."""


@dataclass
class ModeSlowdown:
    """Of one job."""

    _first: Mode | None = None
    """The mode in which engines were measured first."""
    _times: dict[str, dict[int, float]] = field(default_factory=dict)
    """By pool, and step of the other mode: how many times as long tokens took as the law of the first says."""

    def righted(self, step: MeasuredStep, law: Callable[[str], DecodeLaw | None]) -> MeasuredStep:
        """The step with times as if in the mode that was measured first; the same one, where nothing is to be taken out. `law`: a pool's,
        by the steps before; None: they do not have it."""
        if not step.speed:
            return step
        self._first = self._first or step.split.mode
        if step.split.mode == self._first:
            return step
        for pool in POOLS:
            self._learn(step, pool, law)
        times = {pool: self.times(pool) for pool in POOLS}
        if all(one == 1.0 for one in times.values()):
            return step
        speed = tuple(replace(one, token_s=one.token_s / times.get(one.pool, 1.0)) for one in step.speed)
        return replace(step, speed=speed)

    def times(self, pool: str) -> float:
        """How many times as long its tokens take in the other mode."""
        seen = [times for _, times in sorted(self._times.get(pool, {}).items())]
        found = median(seen[:LEARNED]) if seen else 1.0
        return found if not 1 / LEAST <= found <= LEAST else 1.0

    def forget(self, since: int) -> None:
        """Steps from that one on were given up."""
        self._times = {
            pool: {step: times for step, times in of.items() if step < since} for pool, of in self._times.items()
        }

    def _learn(self, step: MeasuredStep, pool: str, law: Callable[[str], DecodeLaw | None]) -> None:
        seen, known = [one for one in step.speed if one.pool == pool], self._times.setdefault(pool, {})
        if not seen or (step.step not in known and len(known) >= LEARNED):
            return
        before = law(pool)
        if before is not None:
            known[step.step] = _times_as_long(seen, before)


def _times_as_long(seen: list[EngineSpeed], law: DecodeLaw) -> float:
    said = law.at(np.array([one.running for one in seen]))
    return float(median((np.array([one.token_s for one in seen]) / np.maximum(said, 1e-9)).tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class SplitChoices:
    """`splits`: in their order; `at`: which of them a split is; `shapes`: of each, as forecasts are made of them."""

    splits: tuple[Split, ...]
    at: Mapping[Split, int]
    shapes: Shapes

    def is_mode(self, mode: str) -> NDArray[np.bool_]:
        """Which are of a mode, [splits]."""
        return np.asarray(self.shapes[:, TOGETHER] == (mode == "colocated"))

    def is_like(self, mode: str, rollout: int, reward: int) -> NDArray[np.bool_]:
        """Which have these engines, whatever world they have, [splits]."""
        shapes = self.shapes
        return np.asarray(self.is_mode(mode) & (shapes[:, ROLLOUT] == rollout) & (shapes[:, REWARD] == reward))

    def beside(self, split: Split) -> Shapes:
        """A split, and after it all with a train world as large."""
        return np.concatenate((shapes_of((split,)), self.shapes[self.shapes[:, TRAIN] == split.train]))

    def cost(self, costs: SwitchCosts, now: Split) -> Floats:
        """Of the change from `now` to each, seconds, [splits]: `SwitchCosts.of`."""
        stays = self.is_like(now.mode, now.rollout, now.reward)
        world = np.where(self.shapes[:, TRAIN] == now.train, 0.0, costs.world_s)
        cost = np.maximum(world, np.where(stays, 0.0, costs.move_s))
        return np.asarray(cost, dtype=np.float64)


@lru_cache(maxsize=16)
def list_choices(bounds: SplitBounds) -> SplitChoices:
    """Every feasible split, in order."""
    splits = feasible_splits(bounds)
    return SplitChoices(splits, {split: number for number, split in enumerate(splits)}, shapes_of(splits))


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
class ForecastErrors:
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

    def factors(self, there: SplitChoices) -> Floats:
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
        if plain_offset(others, own, LEAST_SPREAD, PLAIN) <= 0:
            return None
        return (sum(own) + median(others)) / (len(own) + 1)


def _shape(split: Split) -> Shape:
    return split.mode, split.rollout, split.reward
