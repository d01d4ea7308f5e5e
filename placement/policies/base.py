"""What a placement policy is asked between two steps, and what it says. Pure.

A policy may keep what it remembers of its own moves; whoever plans hands in everything else. The same calls with the same situations
give the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from placement.measured import Measured
from placement.split import Bounds, Split


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """What changes are taken to cost, in seconds, from the newest that were measured: engines that move, and a train world of
    another size."""

    move_s: float
    world_s: float

    def of(self, before: Split, after: Split) -> float:
        """What the change takes."""
        if before == after:
            return 0.0
        moved = (before.mode, before.rollout, before.reward) != (after.mode, after.rollout, after.reward)
        return max(self.world_s if before.train != after.train else 0.0, self.move_s if moved else 0.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """Between two steps. `history`: what was measured, oldest first. `now`: the split there is, None before the first.
    `steps_left` None: nobody knows."""

    bounds: Bounds
    now: Split | None
    history: Sequence[Measured]
    costs: SwitchCosts
    steps_left: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    """The split of the next step, and why."""

    split: Split
    reason: str


class Policy(Protocol):
    """Decides on the split of each step."""

    def plan(self, situation: Situation) -> Decision:
        """The next step's."""
        ...
