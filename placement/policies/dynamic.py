"""`dynamic`, the default policy: choose the split with which the job is expected to finish first, including the costs
of changes.

1. The policy forecasts the step time on each feasible split (`placement.forecast`), and corrects it by the errors of
   earlier forecasts (`placement.policies.corrections`). An error is measured against the predicted time for the actual
   lengths of a step, so random variation of lengths is not an error.
2. A change must save more than it costs within the steps ahead. The policy looks as many steps ahead as have passed
   since response lengths last jumped: a period that has lasted so long is expected to last as long again. The saving is
   the mean over recent batches, minus its standard error.
3. A change must also save more per step than the dead band, a share of the typical forecast error.
4. After a change a few steps must pass before the next one, unless the present split has become impossible.
5. A change for the worse is reverted by the same rules, because the forecast error of the new split has been measured
   by then. A slowdown that only the co-located mode has does not count against other splits.

Lending within a step is decided in `placement.lending`; the forecast includes it. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import numpy as np

from placement.forecast import Forecast, LengthProfile, PoolLimits
from placement.laws import (
    SPEEDS,
    DecodeLaw,
    Floats,
    PaceTracker,
    fit_decode_law,
    fit_train_law,
    pool_points,
    since_jump,
    slope,
)
from placement.measurements import MeasuredStep
from placement.policies.base import Decision, Policy, PolicyStart, Situation
from placement.policies.corrections import ForecastErrors, ModeSlowdown, SplitChoices, list_choices
from placement.policies.simple import utilisation
from placement.slots import Split, count_turns


def dynamic(start: PolicyStart) -> Policy:
    """Create the policy for one job (entry point `dynamic` of `gcore.placement`)."""
    sizes = start.sizes
    return DynamicPolicy(PoolLimits(sizes.rollout, sizes.reward, start.rollout_rows, start.reward_rows), start.first)


MARGIN = 1.2
"""A change must save this many times its cost."""

SURE = 1.3
"""Number of standard errors that are subtracted from an expected saving."""

FEWEST = 2
"""Minimum number of batches from which the standard error of a saving is computed; with fewer it counts as 0."""


@dataclass(frozen=True)
class SplitSavings:
    """Compares the present split with all others.

    `splits`: the choices; `here`: index of the present one. `each`: predicted seconds of a step per batch and split,
    [batches, splits]. `cost`: seconds that the change to each split costs, [splits]. `ahead`: number of steps in which
    a change must pay off. `band`: saving in seconds per step up to which a change is ignored.
    """

    splits: Sequence[Split]
    here: int
    each: Floats
    cost: Floats
    ahead: int
    band: float

    @cached_property
    def expected(self) -> Floats:
        """Expected seconds of a step on each split, [splits]: the mean over the batches."""
        return np.asarray(self.each.mean(axis=0))

    @cached_property
    def saved(self) -> Floats:
        """Seconds that each split saves per step compared with the present one, [splits]."""
        return np.asarray(self.expected[self.here] - self.expected)

    @cached_property
    def unsure(self) -> Floats:
        """Uncertainty of the saving per step in seconds, [splits]: `SURE` standard errors of its mean over batches."""
        batches = len(self.each)
        if batches < FEWEST:
            return np.zeros(len(self.splits))
        off = (self.each[:, [self.here]] - self.each).std(axis=0, ddof=1)
        return np.asarray(SURE * off / np.sqrt(batches))

    @cached_property
    def worth(self) -> Floats:
        """Net gain of a change to each split in seconds, [splits]: the certain saving in all steps ahead minus `MARGIN`
        times the cost."""
        return np.asarray((self.saved - self.unsure) * self.ahead - MARGIN * self.cost)

    @cached_property
    def best(self) -> int:
        """Index of the split with the largest positive net gain whose saving exceeds the band; `here` if there is
        none."""
        worth = np.where(self.saved > self.band, self.worth, -np.inf)
        best = int(worth.argmax())
        return best if worth[best] > 0 else self.here

    def why_not(self) -> str:
        """Explain why the present split is kept: what the next best split would save, and why it is not chosen."""
        nearest, before = self._nearest(), _seconds(float(self.expected[self.here]))
        if nearest is None:
            return "no other split is possible"
        split, saved, cost = self.splits[nearest], float(self.saved[nearest]), float(self.cost[nearest])
        if saved <= 0:
            return f"no other split is expected to be quicker than {before} a step: the next best, {split}, would take {_seconds(-saved)} more"
        would = f"{split} would save {_seconds(saved)} of {before} a step"
        if saved <= self.band:
            return f"{would}, no more than the {_seconds(self.band)} by which forecasts may be wrong"
        if (saved - self.unsure[nearest]) * self.ahead <= 0:
            return f"{would}, but {_seconds(float(self.unsure[nearest]))} of that may be random variation of the newest steps"
        whole = _seconds(saved * self.ahead)
        steps = f"{self.ahead} step{'s' * (self.ahead != 1)}"
        return f"{would}, {whole} in {steps}, too little for a change that costs {_seconds(cost)}"

    def _nearest(self) -> int | None:
        """Return the index of the other split that came closest to being chosen: the one with the largest net gain, or
        the fastest one if no net gain is positive. None if there is no other split."""
        if len(self.splits) < 2:
            return None
        others = np.arange(len(self.splits)) != self.here
        worth = np.where(others, self.worth, -np.inf)
        return int(worth.argmax() if worth.max() > 0 else np.where(others, self.saved, -np.inf).argmax())


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


LEAST_AHEAD, MOST_AHEAD = 12, 100
"""Minimum and maximum number of steps over which a change must pay off."""

DWELL = 3
"""Minimum number of steps for which a split is kept."""

BAND = 0.2
"""Dead band: a change must save at least this share of the typical forecast error in each step."""

LEAST_BAND = 0.003
"""Lower limit of the dead band, as a share of the step time."""

REMEMBERED = 64
"""Number of newest steps that are kept."""

WINDOW = 8
"""Maximum number of newest steps whose batches a forecast uses."""

TREND = 32
"""Maximum number of newest steps to which the trend of lengths is fitted."""

TREND_AHEAD = 8
"""Maximum number of steps ahead for which lengths are forecast."""


@dataclass
class DynamicPolicy:
    """The policy with what it has learned about one job. `first`: the split before any measurement."""

    pools: PoolLimits
    first: Split
    _steps: list[MeasuredStep] = field(default_factory=list)
    """Newest steps, with the slowdown of the second mode divided out of their times."""
    _seen: dict[int, MeasuredStep] = field(default_factory=dict)
    """The same steps as they were measured, by step number."""
    _hindered: ModeSlowdown = field(default_factory=ModeSlowdown)
    _batches: list[LengthProfile] = field(default_factory=list)
    _errors: ForecastErrors = field(default_factory=ForecastErrors)
    _last: Split | None = None
    _since: int = 0
    """Number of steps for which the last split has been in use."""
    _stretch: int = 0
    """Number of steps since response or judgement lengths last jumped."""
    _paces: PaceTracker = field(default_factory=PaceTracker)

    def plan(self, situation: Situation) -> Decision:
        """Decide as the module docstring describes."""
        there, now = list_choices(situation.bounds), situation.now
        if now is None or not situation.history:
            first = self.first if self.first in there.at else there.splits[0]
            return Decision(now if now in there.at and now is not None else first, "nothing is measured yet")
        if now != self._last:  # a decided change may not have been carried out
            self._last, self._since = now, 0
        self._since += 1
        stretch = self._taken_in(situation)
        left = MOST_AHEAD if situation.steps_left is None else max(situation.steps_left, 0)
        ahead = min(max(stretch, LEAST_AHEAD), MOST_AHEAD, left)
        forecast = self._forecast(situation, stretch, min(ahead, TREND_AHEAD) / 2)
        return self._decided(situation, there, forecast.each(there.shapes, self._errors.factors(there)), ahead)

    def _decided(self, situation: Situation, there: SplitChoices, each: Floats, ahead: int) -> Decision:
        """Decide from the predicted seconds of a step. `there`: the allowed splits. `each`: seconds per batch and
        split, [batches, splits]. `ahead`: number of steps in which a change must pay off."""
        now, idle, splits = situation.now, _idle(situation.history[-1]), there.splits
        assert now is not None
        cost = there.cost(situation.costs, now)
        if now not in there.at:
            expected = each.mean(axis=0)
            best = int((expected * ahead + cost).argmin())
            why = f"{now} is not possible any more; {splits[best]} is expected to take {expected[best]:.1f} s a step"
            return Decision(splits[best], why, float(expected[best]), None, float(cost[best]), 0.0, idle)
        here = there.at[now]
        before = float(each[:, here].mean())
        band = max(LEAST_BAND, BAND * self._errors.spread) * before
        weighed = SplitSavings(splits, here, each, cost, ahead, band)
        best = weighed.best
        if best == here:
            return Decision(now, weighed.why_not(), before, before, idle=idle)
        saved, price = float(weighed.saved[best]), float(cost[best])
        if self._since < DWELL:
            why = f"{splits[best]} would save {saved:.1f} s a step, but a split is kept for {DWELL} steps"
            return Decision(now, why, before, before, idle=idle)
        gain = saved * ahead
        why = (
            f"{_said(idle, now, splits[best])}{splits[best]} saves {saved:.1f} s of {before:.1f} s a step, {gain:.0f} s in {ahead} step{'s' * (ahead != 1)}, "
            f"and costs {price:.1f} s"
        )
        return Decision(splits[best], why, float(weighed.expected[best]), before, price, gain, idle)

    def _taken_in(self, situation: Situation) -> int:
        """Learn from the steps of the history that are new or changed. Return the number of steps since response or
        judgement lengths last jumped."""
        self._give_up(situation.history)
        at = {step.step: i for i, step in enumerate(self._steps)}
        newest = self._steps[-1].step if self._steps else -1
        for step in situation.history[-REMEMBERED:]:
            i = at.get(step.step)
            if i is None and step.step > newest:
                self._steps.append(self._righted(step))
                self._batches.append(self._batch(step, len(self._batches)))
                self._paces.see(self._steps)
                self._learn(situation, step)
                self._count()
            elif i is not None and step is not self._seen.get(step.step):  # its accounts arrived later
                self._steps[i] = self._righted(step)
                self._batches[i] = self._batch(step, i)
                self._paces.see(self._steps)
        del self._steps[:-REMEMBERED], self._batches[:-REMEMBERED]
        self._seen = {step.step: self._seen[step.step] for step in self._steps}
        return self._stretch

    def _righted(self, step: MeasuredStep) -> MeasuredStep:
        """Return the step with the slowdown of the second mode divided out of its token times (`ModeSlowdown`)."""
        self._seen[step.step] = step
        before = [one for one in self._steps if one.step < step.step]

        def law(pool: str) -> DecodeLaw | None:
            most = self.pools.rollout_most if pool == "rollout" else self.pools.reward_most
            return fit_decode_law(before, pool, most, self._paces.since(pool)) if pool_points(before, pool) else None

        return self._hindered.righted(step, law)

    def _give_up(self, history: Sequence[MeasuredStep]) -> None:
        """Forget the steps that a rollback discarded: those missing at the end of the history, and those that were
        repeated with another result, which then count as new."""
        there, newest = {one.step: one for one in history}, history[-1].step
        gone = (i for i, one in enumerate(self._steps) if one.step > newest or _is_another(there.get(one.step), one))
        first = next(gone, None)
        if first is None:
            return
        kept = self._batches[:first]
        self._errors.forget(self._steps[first].step)
        self._hindered.forget(self._steps[first].step)
        del self._steps[first:]
        self._batches, self._stretch = [], 0
        for batch in kept:
            self._batches.append(batch)
            self._count()
        if self._steps:
            self._paces.see(self._steps)

    def _count(self) -> None:
        """Count the newest batch, and detect whether lengths have jumped in it."""
        self._stretch += 1
        self._stretch = min(self._stretch, *(logs.size - since_jump(logs.tolist()) for logs in self._logs()))

    def _batch(self, step: MeasuredStep, at: int) -> LengthProfile:
        """Return the length profile of a step's batch. `at`: its index among the kept batches. If its judgement lengths
        are not known (yet), those of the previous batch are used."""
        batch = LengthProfile.of(step)
        if batch.judgement > 0 or at == 0:
            return batch
        return replace(batch, judgement=self._batches[at - 1].judgement)

    def _logs(self) -> tuple[Floats, Floats]:
        """Return the logarithms of the mean response lengths and of the mean judgement lengths in each step since the
        last jump."""
        kept = self._batches[-min(self._stretch, TREND) :]
        lengths = np.log([max(batch.length, 1e-9) for batch in kept])
        return lengths, np.log([max(batch.judgement, 1e-9) for batch in kept])

    def _forecast(self, situation: Situation, stretch: int, forward: float) -> Forecast:
        """Return a model of the next steps. It uses the batches since lengths last jumped, with their lengths
        extrapolated along the trend to `forward` steps from now."""
        batches = tuple(self._batches[-min(stretch, WINDOW) :])
        age = np.arange(len(batches), 0, -1) - 1 + max(forward, 1.0)
        lengths, judgements = self._logs()
        return self._forecast_of(
            situation,
            batches,
            np.exp(np.clip(slope(lengths), -0.1, 0.1) * age),
            np.exp(np.clip(slope(judgements), -0.1, 0.1) * age),
        )

    def _forecast_of(
        self, situation: Situation, batches: tuple[LengthProfile, ...], longer: Floats, wordier: Floats
    ) -> Forecast:
        """Return a model of the next steps from these batches. `longer`, `wordier`: factors on the response and
        judgement lengths of each batch."""
        in_turn_s = count_turns(judged=situation.bounds.judged) * situation.costs.turn_s
        apart, together = self._others(in_turn_s)
        return Forecast(
            self.pools,
            fit_decode_law(self._steps, "rollout", self.pools.rollout_most, self._paces.since("rollout")),
            fit_decode_law(self._steps, "reward", self.pools.reward_most, self._paces.since("reward")),
            fit_train_law(self._steps),
            batches,
            longer,
            wordier,
            apart,
            together,
            situation.overlaps,
            situation.costs.move_s if situation.lends else None,
            situation.bounds.nodes,
            situation.bounds.group,
        )

    def _learn(self, situation: Situation, newest: MeasuredStep) -> None:
        """Record the forecast error of the newest step: its production time relative to the one predicted for its
        lengths and split. If only the length of the step is known, production took at most that long, so only a
        prediction that is longer is an error."""
        took = newest.produce_s if newest.produce_s is not None else newest.step_s
        if took is None or took <= 0:
            return
        model = self._forecast_of(situation, (self._batches[-1],), np.ones(1), np.ones(1))
        shapes = list_choices(situation.bounds).beside(newest.split)
        said = float(model.produce_s(shapes)[0, 0])  # includes the other splits, because lending depends on them
        if newest.produce_s is None and said * self._errors.factor(newest.split) <= took:
            return
        off = float(np.clip(np.log(took / max(said, 1e-9)), -1.0, 1.0))
        self._errors.add(newest.step, newest.split, off)

    def _others(self, in_turn_s: float) -> tuple[float, float]:
        """Return the seconds of a step that are neither production nor training, for co-existing and co-located splits.
        If one mode was never measured, its value follows from the other's. `in_turn_s`: seconds of the phase changes in
        a co-located step."""
        found = {
            mode: [s.other_s for s in self._steps if s.split.mode == mode and s.other_s is not None][-SPEEDS:]
            for mode in ("coexisting", "colocated")
        }
        apart = median(found["coexisting"]) if found["coexisting"] else None
        together = median(found["colocated"]) if found["colocated"] else None
        if apart is None:
            return max((together or 0.0) - in_turn_s, 0.0), together if together is not None else in_turn_s
        return apart, together if together is not None else apart + in_turn_s


def _idle(newest: MeasuredStep) -> dict[str, float]:
    """Return the unused share of each pool's slot-seconds in a step; empty if not measured."""
    if not newest.busy or not newest.seconds:
        return {}
    return {pool: 1.0 - share for pool, share in utilisation(newest).items()}


def _is_another(seen: MeasuredStep | None, known: MeasuredStep) -> bool:
    """Whether a step of the history is another run of the step `known`, repeated after a rollback: they differ in split
    or training. Accounts that arrive late do not count as a difference."""
    if seen is None or seen is known:
        return False
    return (seen.split, seen.train_tokens, seen.train_s) != (known.split, known.train_tokens, known.train_s)


def _said(idle: Mapping[str, float], now: Split, then: Split) -> str:
    """Return the beginning of a reason for the change from split `now` to `then`: which pools give and get slots, and
    the idle share of each in the newest step. If the mode changes, only the idle shares. `idle`: by pool; empty if not
    measured."""
    if not idle:
        return ""
    if now.mode != then.mode:
        return f"{', '.join(f'{pool} was idle for {share:.0%}' for pool, share in idle.items())} of the newest step: "
    said = []
    for pool in ("rollout", "reward", "train"):
        if more := getattr(then, pool) - getattr(now, pool):
            share = f" (idle for {idle[pool]:.0%} of the newest step)" if pool in idle else ""
            said.append((more, f"{pool} {'gets' if more > 0 else 'gives'} {abs(more)}{share}"))
    return f"{' and '.join(words for _, words in sorted(said))}: " if said else ""
