"""The interface of placement policies, and finding one by its name in the spec.

gcore's own policies and those of other packages are entry points of the group `gcore.placement`: a function that takes a `PolicyStart` and
returns a `Policy`. A policy decides on splits only; `placement.assign` finds the slots. It may remember its own moves; everything else is
in the `Situation`. The same calls with the same situations give the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from gcore.plugins import PluginKind, find_plugin
from placement.measurements import MeasuredStep
from placement.slots import SINGLE, ReplicaSizes, Split, SplitBounds


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """What changes are taken to cost, in seconds, from the newest that were measured: engines that move, and a train world of
    another size. `turn_s`: sleep and wake of what takes its turn on co-located slots; 0 where all stay in memory."""

    move_s: float
    world_s: float
    turn_s: float = 3.0

    def of(self, before: Split, after: Split) -> float:
        """What the change takes."""
        if before == after:
            return 0.0
        moved = (before.mode, before.rollout, before.reward) != (after.mode, after.rollout, after.reward)
        return max(self.world_s if before.train != after.train else 0.0, self.move_s if moved else 0.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """Between two steps. `history`: what was measured, oldest first. `now`: the split there is, None before the first.
    `steps_left` None: nobody knows. `overlaps`: pools with slots of their own make a batch while they train on the one before.
    `lends`: replicas are lent within a step."""

    bounds: SplitBounds
    now: Split | None
    history: Sequence[MeasuredStep]
    costs: SwitchCosts
    steps_left: int | None
    overlaps: bool = False
    lends: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The split of the next step, and why. In numbers, where the policy has any: `expected_s`, what the step is expected to take;
    `before_s`, what it would on the split there is; `cost_s`, of the change; `gain_s`, in the steps it is weighed over, without its
    cost; `idle`, share of each pool's slot-seconds in the newest step that was not used."""

    split: Split
    reason: str
    expected_s: float | None = None
    before_s: float | None = None
    cost_s: float = 0.0
    gain_s: float = 0.0
    idle: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Decides on the split of each step."""

    def plan(self, situation: Situation) -> Decision:
        """Decide on the split of the next step."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyStart:
    """What a policy is made with. `first`: the split that the spec says to begin with, else all slots in turn; `rollout_rows`,
    `reward_rows`: requests that an engine runs at once, at most; `sizes`: slots of an engine."""

    first: Split
    rollout_rows: int
    reward_rows: int
    sizes: ReplicaSizes = SINGLE


class PolicyFactory(Protocol):
    """Makes a policy."""

    def __call__(self, start: PolicyStart) -> Policy:
        """Make a policy for one job, on one controller."""
        ...


KIND = PluginKind("placement policy", "gcore.placement", "placement.policy")


def find_policy(name: str) -> PolicyFactory:
    """Find the factory of a policy. Raises PluginFault."""
    return cast(PolicyFactory, find_plugin(KIND, name))
