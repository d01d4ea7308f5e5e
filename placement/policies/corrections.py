"""Learn the errors of step-time forecasts, and correct later forecasts by them.

`ForecastErrors`: the error of a forecast is the logarithm of measured over predicted production time. A split on which
steps ran has its own mean error, shrunk towards that of its mode (co-existing or co-located). Any other split has the
mean error of its mode. If a split is significantly worse than the others of its mode for two steps in a row, its own
error counts fully at once, so that the policy does not need dozens of steps to leave it. (The co-located mode has one
split only; it is compared with the other mode.) The error that remains after correction sets the dead band of the
policy: smaller savings are ignored.

`ModeSlowdown`: in a co-located split, engines of several pools may be awake on one slot and slow each other down, so
that they seem to have become slower. The slowdown of the mode that the job ran in second is learned from its first
steps and divided out of its times, so that fitted laws refer to the mode that the job ran in first. Any remaining
difference is part of the mode's forecast error. If the speed of a pool changes in the same steps as the mode, the
change is attributed to the mode until the mode changes again.

`SplitChoices`: all splits within bounds as arrays, because 1000 slots have tens of thousands of splits.
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
"""Number of first steps in the second mode from which the slowdown is learned."""

LEAST = 1.25
"""A slowdown or speedup below this factor is not corrected, because engines and steps always differ a little."""


@dataclass
class ModeSlowdown:
    """Learns by which factor a job's engines are slower (or faster) in one mode than in the other. A job starts in one
    mode (co-existing or co-located) and may change to the other, called its second mode."""

    _first: Mode | None = None
    """The mode in which engines were measured first; times are converted to it."""
    _times: dict[str, dict[int, float]] = field(default_factory=dict)
    """By pool and step in the second mode: measured token time relative to that expected in the first mode."""

    def righted(self, step: MeasuredStep, law: Callable[[str], DecodeLaw | None]) -> MeasuredStep:
        """Convert the token times of a step to those of the mode that was measured first. Return the same step if
        nothing is corrected. `law`: returns the decode law fitted to a pool's earlier steps, or None if there are
        none."""
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
        """Return by which factor a pool's token time is longer in the second mode; 1 if it is not significant."""
        seen = [times for _, times in sorted(self._times.get(pool, {}).items())]
        found = median(seen[:LEARNED]) if seen else 1.0
        return found if not 1 / LEAST <= found <= LEAST else 1.0

    def forget(self, since: int) -> None:
        """Discard the steps from `since` on, which were rolled back."""
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
    """Return the median ratio of the measured token times to those of `law`."""
    said = law.at(np.array([one.running for one in seen]))
    return float(median((np.array([one.token_s for one in seen]) / np.maximum(said, 1e-9)).tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class SplitChoices:
    """The splits that a policy chooses from. `at`: index of each in `splits`. `shapes`: their features for the
    forecast, [splits, 4]."""

    splits: tuple[Split, ...]
    at: Mapping[Split, int]
    shapes: Shapes

    def is_mode(self, mode: str) -> NDArray[np.bool_]:
        """Return for each split whether it has this mode, [splits]."""
        return np.asarray(self.shapes[:, TOGETHER] == (mode == "colocated"))

    def is_like(self, mode: str, rollout: int, reward: int) -> NDArray[np.bool_]:
        """Return for each split whether it has this mode and these slots for engines, with any train world,
        [splits]."""
        shapes = self.shapes
        return np.asarray(self.is_mode(mode) & (shapes[:, ROLLOUT] == rollout) & (shapes[:, REWARD] == reward))

    def beside(self, split: Split) -> Shapes:
        """Return the features of a split, followed by those of all splits with an equally large train world."""
        return np.concatenate((shapes_of((split,)), self.shapes[self.shapes[:, TRAIN] == split.train]))

    def cost(self, costs: SwitchCosts, now: Split) -> Floats:
        """Return the seconds that the change from `now` to each split costs, [splits]: `SwitchCosts.of` as an
        array."""
        stays = self.is_like(now.mode, now.rollout, now.reward)
        world = np.where(self.shapes[:, TRAIN] == now.train, 0.0, costs.world_s)
        cost = np.maximum(world, np.where(stays, 0.0, costs.move_s))
        return np.asarray(cost, dtype=np.float64)


@lru_cache(maxsize=16)
def list_choices(bounds: SplitBounds) -> SplitChoices:
    """List every feasible split, in order."""
    splits = feasible_splits(bounds)
    return SplitChoices(splits, {split: number for number, split in enumerate(splits)}, shapes_of(splits))


DRAWN = 20.0
"""Weight of the mode's mean error in the error of a split, in steps: a split with this many steps of its own has the
mean of its own error and that of its mode."""

RIGHT = 4.0
"""Weight of the prior "no error" in the mean error of a mode, in steps. It is small, because otherwise an error that
all forecasts share would count against the tried splits only, and every untried split would look better."""

FADE = 0.9
"""Weight of a step in a mean relative to the step after it."""

UNTRIED = 0.05
"""Assumed relative error of forecasts before any step was compared with its forecast."""

PLAIN = 2.5
"""A split is significantly worse if its error exceeds that of the others by this many standard deviations."""

LEAST_SPREAD = 0.1
"""Lower limit of the standard deviation that `PLAIN` multiplies."""

OWN, OTHERS = 5, 16
"""Maximum number of newest steps, of a split and of the others, that are compared."""

FEWEST_OWN, FEWEST_OTHERS = 2, 3
"""Minimum number of these steps; with fewer nothing is significant."""

REMEMBERED = 64
"""Number of newest steps that are kept."""

UNTRIED_SLOTS = 0
"""Slots per pool of an imaginary split on which no step can have run, to look up the error of untried splits."""

Shape = tuple[str, int, int]
"""Key of the learned errors: mode, rollout slots and reward slots, with any train world."""


@dataclass
class _Mean:
    """Mean of logarithms in which older values weigh less: weighted sum and total weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        """Add the value of the newest step."""
        self.total = FADE * self.total + value
        self.weight = FADE * self.weight + 1.0

    def drawn_to(self, other: float, drawn: float) -> float:
        """Return the mean, shrunk towards `other`, which has the weight of `drawn` steps."""
        return (self.total + drawn * other) / (self.weight + drawn)


@dataclass
class ForecastErrors:
    """Errors of the production-time forecasts of one job, as logarithms of measured over predicted time."""

    spread: float = UNTRIED
    """Mean absolute error of the corrected forecasts; newer steps weigh more."""
    _of_split: dict[Shape, _Mean] = field(default_factory=dict)
    _of_mode: dict[str, _Mean] = field(default_factory=dict)
    _newest: deque[tuple[int, Shape, float]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, step: int, split: Split, off: float) -> None:
        """Record the forecast error of a step on `split`: its production took exp(`off`) times the predicted time."""
        self._count(step, _shape(split), off)

    def forget(self, since: int) -> None:
        """Discard the steps from `since` on, which were rolled back. The errors are computed again from the earlier
        steps."""
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
        """Return the factor that corrects the predicted production time on a split."""
        return self._factor(_shape(split))

    def factors(self, there: SplitChoices) -> Floats:
        """Return the correction factors of all splits, [splits]. Splits on which no step ran have that of their
        mode."""
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
        """Return the own error of a split if it is significantly above that of the other splits of its mode (of all
        others if its mode has no other), else None."""
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
