"""All splits that there are within some bounds, as a policy looks through them: one by one, by number, and all at once as arrays. Pure.

On a thousand slots there are tens of thousands; what is worked out of each of them one by one takes longer than the decision may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from placement.forecast import REWARD, ROLLOUT, TOGETHER, TRAIN, Shapes, shapes_of
from placement.laws import Floats
from placement.policies.base import SwitchCosts
from placement.policies.fixed import possible
from placement.split import Bounds, Split


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
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
def choices(bounds: Bounds) -> Choices:
    """Every feasible split, in order."""
    splits = possible(bounds)
    return Choices(splits, {split: number for number, split in enumerate(splits)}, shapes_of(splits))
