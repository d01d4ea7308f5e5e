"""Within a step: whether slots are lent between rollout and the judges now, and that what was lent goes back while ranks train.

A thin effect around `placement.loads`: it asks every node about once a second what its engines have to do, and sees by the same
answers when a plan has taken effect, so that it is known what changes cost. Where nothing is lent it asks only for as long as a plan
is taking effect. What it wants is a proposal, which whoever plans (`controllers.planner`) passes on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from controllers.forgone import Forgone, is_a_guess
from controllers.forming import awaits_world, placeable
from controllers.polling import Polling
from controllers.step_history import StepHistory
from controllers.taking_turns import takes_turns
from controllers.view import JobView
from gcore.clock import Clock
from gcore.config import JobSpec
from gcore.ledger.job import Plan
from gcore.ledger.mirror import JobMirror
from gcore.ledger.placing import NEWEST_MOVES, MoveKind
from gcore.tls.connecting import PLAIN, Connector
from placement.assign import assigned
from placement.live import Moving
from placement.loads import Loads, is_settled, lending, present, wanted
from placement.measured import Measured
from placement.moves import BATCH_IS_WHOLE, Deciding, Proposal, base_split, between_steps, costs
from placement.policies.base import Decision, SwitchCosts
from placement.speeds import Rows, Speeds, speeds_of

if TYPE_CHECKING:
    from placement.paces import Paces

log = logging.getLogger(__name__)

SETTLE_S, WORLD_SETTLE_S = 60.0, 600.0
"""A plan that has not taken effect for so long is taken to have cost so much, and holds up no more: one of engines, one with a new world."""


class Lender:
    """Of one job, on the controller that plans, for one incarnation."""

    def __init__(
        self,
        spec: JobSpec,
        uid: str,
        moving: Moving,
        rows: Rows,
        clock: Clock,
        history: StepHistory,
        connector: Connector = PLAIN,
    ) -> None:
        self._spec = spec
        self._moving = moving
        self._rows = rows
        self._clock = clock
        self._history = history
        self._polling = Polling(uid, clock, connector)
        self._paces: Paces | None = None
        self._forgone = Forgone()
        self._settled = 0
        """The generation that everything was seen to be as."""
        self._since: tuple[int, float] = (0, 0.0)
        """The plan's generation, and since when it is known."""
        self._came = 0
        """The newest generation that was heard as it was written, by who has led ever since: only of such a one is known how long it took. Who
        leads after another begins to look late, when the other's lease is over."""
        self.took: dict[int, float] = {}
        """By generation, the seconds until it had taken effect."""

    def note(self, before: JobMirror, after: JobMirror, me: str) -> None:
        """A change of the job's records. `me`: the incarnation that plans here, when it leads."""
        if after.plan is not None and after.plan.record.generation != self._since[0]:
            self._since = after.plan.record.generation, self._clock.monotonic()
            self._came = self._since[0] if before.plan is not None else 0
        if after.leader is None or after.leader.record.incarnation != me:
            self._came = 0

    @property
    def is_settling(self) -> bool:
        """Whether the newest plan is taking effect."""
        return self._since[0] != self._settled

    async def proposal(self, view: JobView, at: Deciding) -> Proposal | None:
        """What is to be lent, or to go back, now."""
        stored = view.mirror.plan
        assert stored is not None
        plan, placement = stored.record, self._spec.placement
        waits = awaits_world(view)  # another plan would take its place, and whatever is lent goes back by it anyway
        lends = placement.lends and not view.mirror.pin.fixes and bool(self._moving.judges) and not waits
        is_whole = view.seal is not None and not view.seal.collects and not view.rules.staleness
        if (is_whole or view.mirror.pin.fixes) and not waits and (back := self._given_back(view, plan, at)) is not None:
            return back
        if not lends and not self.is_settling:
            return None  # nobody needs to know what engines have to do
        loads = await self._polling.loads(view.nodes)
        self._look_whether_settled(view, plan, loads)
        cost = self.costs(view).move_s
        if not lends or is_whole or self.is_settling or self._clock.monotonic() < self._since[1] + cost:
            return None
        speeds = await asyncio.to_thread(self._speeds, self._history.steps(view.mirror))
        if speeds is None:
            return None
        if log.isEnabledFor(logging.DEBUG):
            found = wanted(present(plan, loads), loads, speeds, cost, self._rows)
            log.debug("to lend: %s, a change takes %.2f s", found, cost)
        members = frozenset(stored.record.node for stored in view.mirror.members.values())
        proposal = lending(plan, loads, speeds, cost, members, self._rows, at)
        if proposal is None and is_a_guess(view.mirror.moves, self.took):
            free = lending(plan, loads, speeds, 0.0, members, self._rows, at)
            proposal = self._forgone.weighed(free, view.head.step, cost)
        moved = view.mirror.moves.newest
        # Nothing changes by it, so it would be told again each second: once in a step is enough.
        has_told = placement.dry_run and moved is not None and moved.within and moved.step == view.head.step
        return None if has_told else proposal

    def costs(self, view: JobView) -> SwitchCosts:
        """What changes cost, by what was measured of them."""
        known = costs(view.mirror.moves, self._history.start_s(), self._polling.change_s)
        slots = [slot for node in view.nodes.values() for slot in node.slots]
        turns = any(takes_turns(self._spec, slot) for slot in slots)
        return replace(known, turn_s=known.move_s if turns else 0.0)

    def _look_whether_settled(self, view: JobView, plan: Plan, loads: Loads) -> None:
        generation, since = self._since
        if generation != plan.generation or not self.is_settling:
            return
        moved, took = view.mirror.moves.newest, self._clock.monotonic() - since
        of_world = moved is not None and moved.generation == generation and moved.kind is MoveKind.WORLD
        most = WORLD_SETTLE_S if of_world else SETTLE_S
        # Where a node came back with fewer slots, what the plan has on the others never comes up.
        engines = tuple(place for place in plan.engines if not view.has_lost(place.node, place.slots))
        known = plan.model_copy(update={"engines": engines})
        is_there = is_settled(known, loads, view.nodes) and (not of_world or _world_serves(view, plan))
        if not is_there and took < most:
            return
        self._settled = generation
        if moved is not None and moved.generation == generation == self._came:
            self.took[generation] = min(took, most)
            self.took = {one: took for one, took in self.took.items() if one > generation - NEWEST_MOVES}

    def _speeds(self, history: tuple[Measured, ...]) -> Speeds | None:
        """How fast engines are now. None: nobody knows yet. In a thread."""
        if self._paces is None:
            from placement.paces import Paces  # numpy: a daemon that no job lends in is started without it

            self._paces = Paces()
        self._paces.see(history)
        return speeds_of(history, self._rows, self._paces.since("rollout"), self._paces.since("reward"))

    def _given_back(self, view: JobView, plan: Plan, at: Deciding) -> Proposal | None:
        """What was lent goes back while ranks train, so that the next step does not wait for it."""
        if plan.lent_from is None:
            return None
        there = placeable(view)
        base = base_split(plan, there)
        back = Decision(base, f"{base}: {BATCH_IS_WHOLE}")
        generation, job = plan.generation + 1, self._moving
        after = assigned(
            base,
            plan,
            there,
            job.judges,
            world=plan.world,
            generation=generation,
            reason=back.reason,
            sizes=job.sizes,
        )
        return None if after is None else between_steps(back, plan, after, base, at, BATCH_IS_WHOLE)

    async def close(self) -> None:
        """Close all connections."""
        await self._polling.close()


def _world_serves(view: JobView, plan: Plan) -> bool:
    """Whether every rank of the plan's world has been claimed by a worker that serves."""
    claims = [view.mirror.claim(plan.world, place.rank) for place in plan.ranks]
    workers = [view.workers.get(claim.instance) if claim is not None else None for claim in claims]
    return all(worker is not None and worker.state == "serving" for worker in workers)
