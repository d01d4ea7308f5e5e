"""Plug-ins of the jobs whose trips are recorded: GRPO that marks its calls, and a policy that moves a slot after each step.

The policy also asks gcore's own, so that what that enters is part of the trip; its answer is not taken.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import trip_hook

from gcore.flows import Peer, flow
from placement.policies.base import Decision, Situation
from placement.slots import Split


@flow(train={"advantage": "grpo"})
async def trip(peer: Peer) -> None:
    """GRPO."""
    trip_hook.in_flow.set(True)
    (point,) = entry_points(group="gcore.flows", name="grpo")
    await point.load()(peer)


class Swing:
    """One slot changes between rollout and the judge after each step."""

    def __init__(self, start: Any) -> None:
        (point,) = entry_points(group="gcore.placement", name="dynamic")
        self._own = point.load()(start)

    def plan(self, situation: Situation) -> Decision:
        """The next split."""
        self._own.plan(situation)
        step = situation.history[-1].step if situation.history else 0
        reward = 1 + step % 2
        split = Split("coexisting", situation.bounds.slots - reward - 1, reward, 1)
        return Decision(split, f"step {step} is over", expected_s=2.0, before_s=3.0)
