"""The interface of placement policies, and the lookup of a policy by its name in the spec.

The policies of gcore and of other packages are entry points of the group `gcore.placement`: a function that takes a
`PolicyStart` and returns a `Policy`. A policy decides on splits only; `placement.assign` finds the slots. A policy may
remember its own moves; all other input is in the `Situation`. The same calls with the same situations must give the
same decisions.
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
    """Costs of changes in seconds, from the newest measurements: engines that move, and a train world of another size.
    `turn_s`: sleep and wake at a phase change on co-located slots; 0 if all models stay in memory."""

    move_s: float
    world_s: float
    turn_s: float = 3.0

    def of(self, before: Split, after: Split) -> float:
        """Return the seconds that the change takes."""
        if before == after:
            return 0.0
        moved = (before.mode, before.rollout, before.reward) != (after.mode, after.rollout, after.reward)
        return max(self.world_s if before.train != after.train else 0.0, self.move_s if moved else 0.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """The state between two steps. `history`: measured steps, oldest first. `now`: the present split, None before the
    first. `steps_left` None: not known. `overlaps`: pools with slots of their own generate a batch while they train on
    the previous one. `lends`: replicas are lent within a step."""

    bounds: SplitBounds
    now: Split | None
    history: Sequence[MeasuredStep]
    costs: SwitchCosts
    steps_left: int | None
    overlaps: bool = False
    lends: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The split of the next step, and the reason. Numbers, if the policy has any: `expected_s`, expected seconds of a
    step; `before_s`, the same on the present split; `cost_s` of the change; `gain_s` over the steps considered, without
    the cost; `idle`, unused share of each pool's slot-seconds in the newest step."""

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
    """Arguments to create a policy. `first`: the split that the spec sets for the start, else co-located.
    `rollout_rows`, `reward_rows`: maximum of concurrent requests per engine. `sizes`: slots per engine."""

    first: Split
    rollout_rows: int
    reward_rows: int
    sizes: ReplicaSizes = SINGLE


class PolicyFactory(Protocol):
    """Creates a policy."""

    def __call__(self, start: PolicyStart) -> Policy:
        """Create a policy for one job on one controller."""
        ...


KIND = PluginKind("placement policy", "gcore.placement", "placement.policy")


def find_policy(name: str) -> PolicyFactory:
    """Find the factory of a policy by name. Raises PluginFault."""
    return cast(PolicyFactory, find_plugin(KIND, name))
