"""`dynamic` as it plans real jobs: the same splits, and where nothing moves it says what the best other split would have saved and why that
was not taken. Pure.

What is decided is `placement.policies.dynamic`'s alone; this only looks at the same numbers once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.laws import Floats
from placement.policies.base import Decision, Situation
from placement.policies.dynamic import BAND, DWELL, LEAST_BAND, MARGIN, Dynamic
from placement.split import Split


@dataclass(frozen=True, slots=True)
class Weighed:
    """The splits there are, what each is expected to save in a step beside the one there is, `here`, and what the change to it costs in
    seconds. `before_s`: what a step takes on the one there is; `ahead`: steps in which a change must pay."""

    splits: Sequence[Split]
    here: int
    saved: Floats
    cost: Floats
    before_s: float
    ahead: int

    @property
    def best(self) -> int | None:
        """The other split that was nearest to being taken: worth its change, or else the quickest. None: there is no other."""
        if len(self.splits) < 2:
            return None
        others = np.arange(len(self.splits)) != self.here
        worth = np.where(others, self.saved * self.ahead - MARGIN * self.cost, -np.inf)
        return int(worth.argmax() if worth.max() > 0 else np.where(others, self.saved, -np.inf).argmax())


@dataclass
class Weighing(Dynamic):
    """Decides as `Dynamic` does."""

    def _decided(self, situation: Situation, splits: Sequence[Split], expected: Floats, ahead: int) -> Decision:
        decision = super()._decided(situation, splits, expected, ahead)
        now = situation.now
        if now is None or decision.split != now or now not in splits:
            return decision
        here = splits.index(now)
        cost = np.array([situation.costs.of(now, split) for split in splits])
        before = float(expected[here])
        weighed = Weighed(splits, here, before - expected, cost, before, ahead)
        return replace(decision, reason=why_not(weighed, max(LEAST_BAND, BAND * self._spread) * before))


def why_not(weighed: Weighed, band: float) -> str:
    """What the best other split would have saved, and why it is not taken. `band`: seconds of a step by which forecasts may be wrong."""
    best, before = weighed.best, _seconds(weighed.before_s)
    if best is None:
        return "no other split is possible"
    split, saved, cost = weighed.splits[best], float(weighed.saved[best]), float(weighed.cost[best])
    if saved <= 0:
        return f"no other split is expected to be quicker than {before} a step: the next best, {split}, would take {_seconds(-saved)} more"
    would = f"{split} would save {_seconds(saved)} of {before} a step"
    if saved <= band:
        return f"{would}, no more than the {_seconds(band)} by which forecasts may be wrong"
    if saved * weighed.ahead <= MARGIN * cost:
        whole = _seconds(saved * weighed.ahead)
        return f"{would}, {whole} in {weighed.ahead} steps, too little for a change that costs {_seconds(cost)}"
    return f"{would}, but a split is kept for {DWELL} steps"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
