"""Between two steps: which split the job's policy wants for the next ones, and what is proposed because of it.

The policy is asked about what is possible on the slots that are there, in a thread of its own (`controllers.consulting`). What it gives is held
to what a person fixed and to what can be had (`placement.live`), and becomes places on slots (`placement.assign`). A policy that raises, or
wants what cannot be had, moves nothing. When it is asked, and what comes of the answer, is the planner's (`controllers.planner`): nothing is
written here, and nobody is told.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from controllers.consulting import Consulting, PolicyFailed
from controllers.forming import is_at_hand, may_use_copies, placeable
from controllers.step_history import StepHistory
from controllers.view import JobView
from gcore.config import JobSpec
from gcore.ledger.job import Plan
from gcore.ledger.placing import MOST_REASON
from gcore.plugins import RAISED, sentence_of
from placement.assign import assigned
from placement.live import Moving, Start, bounds_of, first_split, obeying
from placement.moves import Deciding, Proposal, base_split, between_steps, is_told
from placement.named import find_policy
from placement.plan import Snapshot, counted
from placement.policies.base import Decision, Policy, Situation, SwitchCosts
from placement.speeds import Rows
from placement.split import Bounds, Split

log = logging.getLogger(__name__)


class _CannotBe(Exception):
    """Why nothing is moved, for people."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What came of it. `proposal` None: nothing is to move. `kept`: why the policy keeps the split there is; None: it does not. `expected_s`:
    what it expects of a step on that one. `trouble`: what stands in the way, for people; empty: nothing does; None: that was not looked at."""

    proposal: Proposal | None = None
    kept: str | None = None
    expected_s: float | None = None
    trouble: str | None = None


class NextSplit:
    """Of one job, on one controller, for one incarnation. `moving`: what the job says of its placement; `rows`: requests that engines run."""

    def __init__(self, spec: JobSpec, moving: Moving, rows: Rows, history: StepHistory) -> None:
        self._spec = spec
        self._moving = moving
        self._rows = rows
        self._history = history
        self._consulting = Consulting()
        self._policy: Policy | None = None

    def forget(self) -> None:
        """Somebody else plans: who plans here next asks a new policy."""
        self._policy = None

    async def wished(self, view: JobView, costs: SwitchCosts, at: Deciding) -> Wish:
        """What the policy wants for the next steps. `costs`: of changes."""
        stored = view.mirror.plan
        assert stored is not None
        plan, pin = stored.record, view.mirror.pin
        if pin.frozen:
            return Wish()  # what is lent goes back all the same (`controllers.lender`)
        there = placeable(view)
        if not {place.node for place in plan.ranks} <= {one.node for one in there.nodes}:
            return Wish()  # who holds a rank is away: it comes back with it, or the world is lost and placed anew
        base = base_split(plan, there)
        try:
            decision = await self._decision(view, plan, there, base, costs)
            proposal = await asyncio.to_thread(self._proposal, decision, plan, there, base, at)
        except _CannotBe as error:
            return Wish(trouble=str(error))
        if proposal is not None and is_told(view.mirror.moves, proposal.move):
            proposal = None
        if decision.split == base:
            return Wish(proposal, decision.reason, decision.expected_s, "")
        return Wish(proposal, trouble="")

    async def _decision(self, view: JobView, plan: Plan, there: Snapshot, base: Split, costs: SwitchCosts) -> Decision:
        """What is possible of what the policy decides. Raises _CannotBe."""
        pin, policy = view.mirror.pin, self._spec.placement.policy
        limits = bounds_of(there, self._moving, pin, len(plan.ranks))
        if not (is_at_hand(view) or may_use_copies(view)):
            limits = replace(limits, train_sizes=(len(plan.ranks),))  # another world could not go on from here
        slots = counted(limits.slots, "slot")
        first = first_split(limits, self._moving)
        if first is None:
            raise _CannotBe(f"the pools do not fit on {slots} with {pin}; nothing is moved")
        asked = await self._asked(view, limits, base, first, costs)
        decision = await asyncio.to_thread(obeying, asked, limits, pin)  # it may look through all splits there are
        if decision is None:
            raise _CannotBe(f"{pin}, and that cannot be had on {slots}; nothing is moved")
        if decision.split != base and not limits.allows(decision.split):
            raise _CannotBe(
                f"policy {policy!r} wants {decision.split}, which cannot be had on {slots}; nothing is moved"
            )
        return decision

    async def _asked(self, view: JobView, limits: Bounds, base: Split, first: Split, costs: SwitchCosts) -> Decision:
        """What the policy decides. Raises _CannotBe."""
        name, steps = self._spec.placement.policy, self._spec.flow.steps
        situation = Situation(
            bounds=limits,
            now=base,
            history=self._history.steps(view.mirror),
            costs=costs,
            steps_left=None if steps is None else steps - view.head.step,
            overlaps=self._spec.rollout.staleness > 0,
            lends=self._spec.placement.lends,
        )
        try:
            if self._policy is None:
                start = Start(first, self._rows.rollout, self._rows.reward, self._moving.sizes)
                self._policy = await self._consulting.made(lambda: find_policy(name)(start))
            return await self._consulting.asked(self._policy, situation)
        except RAISED as error:  # the edge to foreign code: who makes a policy may raise anything
            log.exception("placement policy %s", name)
            self._policy = None
            why = error.what if isinstance(error, PolicyFailed) else sentence_of(error)
            raise _CannotBe(f"placement policy {name!r} failed, and nothing is moved: {why}") from error

    def _proposal(self, decision: Decision, plan: Plan, there: Snapshot, base: Split, at: Deciding) -> Proposal | None:
        """What it makes of the plan. In a thread: a thousand slots take a moment. Raises _CannotBe."""
        return between_steps(decision, plan, self._placed(decision, plan, there), base, at)

    def _placed(self, decision: Decision, plan: Plan, there: Snapshot) -> Plan | None:
        """The plan of its split; None: of one with another train world, which a rollback places. Raises _CannotBe."""
        split = decision.split
        if split.train != len(plan.ranks):
            return None
        after = assigned(
            split,
            plan,
            there,
            self._moving.judges,
            world=plan.world,
            generation=plan.generation + 1,
            reason=f"{split}: {decision.reason}"[:MOST_REASON],
            sizes=self._moving.sizes,
        )
        if after is None:
            raise _CannotBe(
                f"policy {self._spec.placement.policy!r} wants {split}, and as the ranks lie no node has whole engines' slots for that; "
                "nothing is moved"
            )
        return after
