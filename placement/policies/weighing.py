"""What every other split would save beside the one there is, whether a change to it is worth what it costs, and why or why not in words. Pure.

A saving is the mean over the batches that a forecast is made of. It is as unsure as it differs between them: what is luck with lengths
differs, what a split is really better by does not. What a saving may well be less by is taken away from it. And no change is made that
saves no more than the dead band, the share of a step by which forecasts of production turned out to be wrong.

What is looked ahead to, and when a split is left at all, is `placement.policies.dynamic`'s to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from placement.laws import Floats
from placement.split import Split

MARGIN = 1.2
"""A change must save so many times what it costs."""
SURE = 1.3
"""Standard errors of what a change saves that are taken away from it."""
FEWEST = 2
"""Batches from which on it is known how much a saving differs."""


@dataclass(frozen=True)
class Weighed:
    """`splits`: that there are, of which `here` is the one in use. `each`: what a step of each batch takes on each, seconds, [batches,
    splits]; `cost`: seconds of the change to each, [splits]; `ahead`: steps in which a change must pay; `band`: seconds of a step by which
    forecasts are wrong."""

    splits: Sequence[Split]
    here: int
    each: Floats
    cost: Floats
    ahead: int
    band: float

    @cached_property
    def expected(self) -> Floats:
        """Of a step on each split, seconds."""
        return np.asarray(self.each.mean(axis=0))

    @cached_property
    def saved(self) -> Floats:
        """On each split, in a step, seconds."""
        return np.asarray(self.expected[self.here] - self.expected)

    @cached_property
    def unsure(self) -> Floats:
        """What may well be missing of it: as many standard errors as count, seconds."""
        batches = len(self.each)
        if batches < FEWEST:
            return np.zeros(len(self.splits))
        off = (self.each[:, [self.here]] - self.each).std(axis=0, ddof=1)
        return np.asarray(SURE * off / np.sqrt(batches))

    @cached_property
    def worth(self) -> Floats:
        """Of a change to each split: what it surely saves in all steps ahead without what it costs, seconds."""
        return np.asarray((self.saved - self.unsure) * self.ahead - MARGIN * self.cost)

    @cached_property
    def best(self) -> int:
        """The split that is worth most; `here`, if no change is worth making."""
        worth = np.where(self.saved > self.band, self.worth, -np.inf)
        best = int(worth.argmax())
        return best if worth[best] > 0 else self.here

    def why_not(self) -> str:
        """Why `here` is best: what the best of the others would save, and why that is not taken."""
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
            return f"{would}, but {_seconds(float(self.unsure[nearest]))} of that may be luck with the newest steps"
        whole = _seconds(saved * self.ahead)
        steps = f"{self.ahead} step{'s' * (self.ahead != 1)}"
        return f"{would}, {whole} in {steps}, too little for a change that costs {_seconds(cost)}"

    def _nearest(self) -> int | None:
        """The other split that was nearest to being taken: worth its change, or else the quickest. None: there is no other."""
        if len(self.splits) < 2:
            return None
        others = np.arange(len(self.splits)) != self.here
        worth = np.where(others, self.worth, -np.inf)
        return int(worth.argmax() if worth.max() > 0 else np.where(others, self.saved, -np.inf).argmax())


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
