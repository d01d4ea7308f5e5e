"""The interface of placement policies, and the lookup of a policy by its name in the spec.

A policy, gcore's own or that of another package, is registered as an entry point of the group `gcore.placement`: a
function that takes a `PolicyStart` and returns a `Policy`. A policy decides only how many slots each pool gets (the
split); `placement.assign` chooses the slots. A policy may keep state between calls, but must be deterministic: the same
sequence of situations gives the same decisions.
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
    """Seconds that changes cost, from the newest measurements. `move_s`: engines change their pool. `world_s`: a train
    world of another size is formed. `turn_s`: sleep and wake at a phase change on co-located slots; 0 if all models
    stay in memory."""

    move_s: float
    world_s: float
    turn_s: float = 3.0

    def of(self, before: Split, after: Split) -> float:
        """Return the seconds that the change from split `before` to split `after` costs."""
        if before == after:
            return 0.0
        moved = (before.mode, before.rollout, before.reward) != (after.mode, after.rollout, after.reward)
        return max(self.world_s if before.train != after.train else 0.0, self.move_s if moved else 0.0)


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of a policy's decision between two steps.

    `bounds`: the allowed splits. `now`: the present split; None before the first. `history`: measured steps, oldest
    first. `steps_left`: steps until the end of the job; None: not known. `overlaps`: in a co-existing split, the next
    batch is generated while this one trains. `lends`: replicas are lent between rollout and judges within a step.
    """

    bounds: SplitBounds
    now: Split | None
    history: Sequence[MeasuredStep]
    costs: SwitchCosts
    steps_left: int | None
    overlaps: bool = False
    lends: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's decision: the split of the next step, and the reason.

    The numbers are for reports; a policy may leave them out. `expected_s`: expected seconds of a step. `before_s`: the
    same if the present split stayed. `cost_s`: seconds that the change takes once. `gain_s`: seconds saved over the
    steps that the policy considered, without the cost. `idle`: unused share of each pool's slot-seconds in the newest
    step.
    """

    split: Split
    reason: str
    expected_s: float | None = None
    before_s: float | None = None
    cost_s: float = 0.0
    gain_s: float = 0.0
    idle: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """Decides how many slots each pool gets, between steps."""

    def plan(self, situation: Situation) -> Decision:
        """Decide on the split of the next step."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyStart:
    """Arguments of a policy's factory. `first`: the split before any measurement: that of the spec, else co-located.
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
    """Find the factory of the policy with this name in `placement.policy`. Raises PluginFault if there is none."""
    return cast(PolicyFactory, find_plugin(KIND, name))
