"""Elastic reassignment within a step: slots are lent between rollout and the judges, and returned while ranks train.

The rule is in `placement.lending`. About once a second the leader (the controller that plans the job's placement) polls
every controller for the load of its engines (`LoadPoller`), directly and not through the store. A response is valid for
`STALE_S`. The responses also show when a plan has taken effect (every engine is awake or asleep as planned), and so how
long changes take. If lending is off, the leader polls only while a plan takes effect. The result is a proposal, which
the planner passes on.

`ForgoneGain`: until an engine of the job has changed its pool, the cost of a change is a deliberately high guess: it is
derived from the time to put engines to sleep, which is long during start. If the guess is so high that no loan is worth
it, it is never corrected, because nothing is measured without a change. So the gains of missed loans are added up, for
each step the best one. Once the sum reaches the guess, the next loan is made. If changes really are that expensive, the
loss is no more than the gains that were missed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import grpc

from controllers.inference.pool import EnginePool
from controllers.planning.history import StepHistory
from controllers.rules.memory import managed_engines, sleeping_engines, takes_turns
from controllers.rules.view import JobView
from controllers.rules.world import awaits_world, placeable_nodes
from gcore.api.rpc import VersionedStub
from gcore.api.tls import PLAIN, Connector
from gcore.api.v1 import placement_pb2 as pb
from gcore.api.v1 import placement_pb2_grpc
from gcore.config.spec import JobSpec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import NEWEST_MOVES, MoveKind, Moves, NodeRecord, Plan
from gcore.system.clock import Clock
from placement.assign import assign_split
from placement.lending import (
    EngineLoad,
    EngineRows,
    JobLoads,
    PoolSpeeds,
    decide_lending,
    follows_plan,
    make_lending_move,
    pool_speeds,
    present_plan,
)
from placement.measurements import MeasuredStep
from placement.moves import (
    BATCH_IS_WHOLE,
    CHANGING,
    DecisionContext,
    MoveProposal,
    base_split,
    engine_change_s,
    propose_move,
    switch_costs,
)
from placement.policies.base import Decision, SwitchCosts
from placement.request import PlacementRequest

if TYPE_CHECKING:  # imports numpy, which a daemon without a job does not need
    from placement.laws import PaceTracker

ANSWER_S = 2.0
"""Timeout of a poll. The polled controller asks engines that may be busy."""

STALE_S = 5.0
"""Seconds for which a response is used if no newer one arrives."""

WAKES_AS, WAKE_PRIOR_S = 3.0, 1.0
"""Until an engine has woken here, a wake is assumed to take `WAKES_AS` times as long as a sleep, plus `WAKE_PRIOR_S`
seconds."""

WORTH_KNOWING = "the cost of a change is not measured yet, and the missed gains have reached the estimate"

log = logging.getLogger(__name__)

SETTLE_S, WORLD_SETTLE_S = 60.0, 600.0
"""Maximum seconds that a plan may take to take effect; afterwards it no longer delays loans. The first number is for a
change of engines, the second for a new train world."""


async def own_loads(view: JobView, pools: Mapping[str, EnginePool]) -> pb.LoadsReply:
    """Return the load of the engines that this controller manages, as the answer to a poll. `pools`: by judge; the key
    of the policy's is empty."""
    known, asleep = managed_engines(view), sleeping_engines(view)
    loads: dict[str, tuple[int, int]] = {}
    for pool in pools.values():
        if not pool.beside_policy:  # else the policy's pool reports them
            loads |= await pool.loads(known)
    tokens, foreseen = pools[""].foreseen()
    reply = pb.LoadsReply(unseated={"rollout": 0, "reward": 0}, left_tokens=tokens, foreseen=foreseen)
    for pool in pools.values():
        reply.unseated["rollout" if pool.beside_policy else pool.pool] += pool.unseated()
    for name, engine in sorted(known.items()):
        worker = view.workers.get(name)
        if worker is None or name not in loads:
            continue
        running, waiting = loads[name]
        reply.engines.add(
            node=worker.node,
            slot=worker.slot,
            judge=worker.judge,
            running=running,
            waiting=waiting,
            ready=engine.version is not None and not engine.silent and name not in asleep,
            asleep=engine.asleep,
        )
    sleep_s = max((pool.slept_s for pool in pools.values() if pool.slept_s is not None), default=None)
    wake_s = max((pool.woke_s for pool in pools.values() if pool.woke_s is not None), default=None)
    if sleep_s is not None:
        reply.change_s = sleep_s + (wake_s if wake_s is not None else WAKES_AS * sleep_s + WAKE_PRIOR_S)
    return reply


class LoadPoller:
    """Polls the controllers of all nodes for the load of their engines of one job. Must be closed."""

    def __init__(self, uid: str, clock: Clock, connector: Connector = PLAIN) -> None:
        self._connector = connector
        self._generation = connector.generation
        self._uid = uid
        self._clock = clock
        self._replies: dict[str, tuple[float, pb.LoadsReply]] = {}
        """By address: time and contents of the newest response."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.change_s: float | None = None
        """Seconds to put an engine to sleep and wake another, on the slowest node; None: not known on any node."""

    async def loads(self, nodes: Mapping[str, NodeRecord]) -> JobLoads:
        """Poll the controllers of these nodes. Return the load of all engines whose controller has responded within
        `STALE_S`."""
        addresses = {record.for_peers for record in nodes.values() if record.for_peers}
        if self._generation != self._connector.generation:  # open channels keep their old certificate
            self._generation = self._connector.generation
            await self.close()
        for gone in self._channels.keys() - addresses:
            await self._channels.pop(gone).close()
        found = await asyncio.gather(*map(self._ask, sorted(addresses)))
        now = self._clock.monotonic()
        self._replies |= {
            at: (now, reply) for at, reply in zip(sorted(addresses), found, strict=True) if reply is not None
        }
        self._replies = {
            at: known for at, known in self._replies.items() if at in addresses and now < known[0] + STALE_S
        }
        replies = [reply for _, (_, reply) in sorted(self._replies.items())]
        unseated: dict[str, int] = {}
        for reply in replies:
            for pool, count in reply.unseated.items():
                unseated[pool] = unseated.get(pool, 0) + count
        self.change_s = max((reply.change_s for reply in replies if reply.change_s > 0), default=None)
        engines = {load.key: load for reply in replies for load in map(_load, reply.engines)}
        tokens, foreseen = sum(reply.left_tokens for reply in replies), sum(reply.foreseen for reply in replies)
        return JobLoads(tuple(engines.values()), unseated, tokens, foreseen)

    async def _ask(self, address: str) -> pb.LoadsReply | None:
        channel = self._channels.get(address) or self._channels.setdefault(address, self._connector.channel(address))
        stub: Any = VersionedStub(placement_pb2_grpc.PlacementStub(channel))  # type: ignore[no-untyped-call]
        with contextlib.suppress(grpc.aio.AioRpcError):
            reply: pb.LoadsReply = await stub.Loads(pb.LoadsRequest(job_uid=self._uid), timeout=ANSWER_S)
            return reply
        return None

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def _load(load: pb.EngineLoad) -> EngineLoad:
    return EngineLoad(load.node, load.slot, load.judge, load.running, load.waiting, load.ready, load.asleep)


def is_unmeasured(moves: Moves, took: Mapping[int, float]) -> bool:
    """Whether no change of an engine's pool was measured so far in this job. `took`: measured seconds until a plan took
    effect, by plan generation, which may not be in the record of moves yet."""
    if engine_change_s(moves) is not None:
        return False
    return not any(move.kind in CHANGING and move.state == "done" and move.generation in took for move in moves.moves)


@dataclass
class ForgoneGain:
    """Adds up the gains of loans that were not made because a change was assumed to be too expensive."""

    _gains: dict[int, float] = field(default_factory=dict)
    """The largest missed gain of each step, in seconds."""

    def weighed(self, free: MoveProposal | None, step: int, guess_s: float) -> MoveProposal | None:
        """Record the loan that would be made now if changes cost nothing (`free`; None: none). Return it if the missed
        gains of all steps together have reached the assumed cost `guess_s`, else None."""
        gain = 0.0 if free is None else free.move.gain_s or 0.0
        self._gains[step] = max(self._gains.get(step, 0.0), gain)
        if free is None or sum(self._gains.values()) < guess_s:
            return None
        update = {"cost_s": round(guess_s, 3), "reason": f"{free.move.reason}; {WORTH_KNOWING}"}
        return MoveProposal(free.move.model_copy(update=update), free.plan)


class Lender:
    """Decides when slots of one job are lent or returned within a step, and measures how long plans take to take
    effect. One object for each run of a controller."""

    def __init__(
        self,
        spec: JobSpec,
        uid: str,
        moving: PlacementRequest,
        rows: EngineRows,
        clock: Clock,
        history: StepHistory,
        connector: Connector = PLAIN,
    ) -> None:
        self._spec = spec
        self._moving = moving
        self._rows = rows
        self._clock = clock
        self._history = history
        self._polling = LoadPoller(uid, clock, connector)
        self._paces: PaceTracker | None = None
        self._forgone = ForgoneGain()
        self._settled = 0
        """Generation of the newest plan that has taken effect."""
        self._since: tuple[int, float] = (0, 0.0)
        """Generation of the present plan, and since when this controller knows it."""
        self._came = 0
        """Generation of the newest plan that was written while this controller led. Only for such a plan the duration
        is measured, because a new leader learns of an earlier plan late."""
        self.took: dict[int, float] = {}
        """Seconds until a plan had taken effect, by its generation."""

    def note(self, before: JobMirror, after: JobMirror, me: str) -> None:
        """Process a change of the job's records. `me`: this run of the controller."""
        if after.plan is not None and after.plan.record.generation != self._since[0]:
            self._since = after.plan.record.generation, self._clock.monotonic()
            self._came = self._since[0] if before.plan is not None else 0
        if after.leader is None or after.leader.record.incarnation != me:
            self._came = 0

    @property
    def is_settling(self) -> bool:
        """Whether the newest plan is still taking effect."""
        return self._since[0] != self._settled

    async def proposal(self, view: JobView, at: DecisionContext) -> MoveProposal | None:
        """Return the move that lends or returns slots now; None if there is none. `at`: step, author and time of the
        decision."""
        stored = view.mirror.plan
        assert stored is not None
        plan, placement = stored.record, self._spec.placement
        waits = awaits_world(view)  # a new plan is due, and lent slots return with it
        lends = placement.lends and not view.mirror.pin.fixes and bool(self._moving.judges) and not waits
        is_whole = view.seal is not None and not view.seal.collects and not view.rules.staleness
        if (is_whole or view.mirror.pin.fixes) and not waits and (back := self._given_back(view, plan, at)) is not None:
            return back
        if not lends and not self.is_settling:
            return None  # the load is not needed
        loads = await self._polling.loads(view.nodes)
        self._check_settled(view, plan, loads)
        cost = self.costs(view).move_s
        if not lends or is_whole or self.is_settling or self._clock.monotonic() < self._since[1] + cost:
            return None
        speeds = await asyncio.to_thread(self._speeds, self._history.steps(view.mirror))
        if speeds is None:
            return None
        if log.isEnabledFor(logging.DEBUG):
            found = decide_lending(present_plan(plan, loads), loads, speeds, cost, self._rows)
            log.debug("lending decision: %s, cost of a change %.2f s", found, cost)
        members = frozenset(stored.record.node for stored in view.mirror.members.values())
        proposal = make_lending_move(plan, loads, speeds, cost, members, self._rows, at)
        if proposal is None and is_unmeasured(view.mirror.moves, self.took):
            free = make_lending_move(plan, loads, speeds, 0.0, members, self._rows, at)
            proposal = self._forgone.weighed(free, view.head.step, cost)
        moved = view.mirror.moves.newest
        # A dry run changes nothing, so the move would be proposed every second: report it once per step.
        has_told = placement.dry_run and moved is not None and moved.within and moved.step == view.head.step
        return None if has_told else proposal

    def costs(self, view: JobView) -> SwitchCosts:
        """Return the costs of placement changes in seconds, measured or assumed."""
        known = switch_costs(view.mirror.moves, self._history.start_s(), self._polling.change_s)
        slots = [slot for node in view.nodes.values() for slot in node.slots]
        turns = any(takes_turns(self._spec, slot) for slot in slots)
        return replace(known, turn_s=known.move_s if turns else 0.0)

    def _check_settled(self, view: JobView, plan: Plan, loads: JobLoads) -> None:
        """Check whether the plan has taken effect, or is overdue; then record how long it took."""
        generation, since = self._since
        if generation != plan.generation or not self.is_settling:
            return
        moved, took = view.mirror.moves.newest, self._clock.monotonic() - since
        of_world = moved is not None and moved.generation == generation and moved.kind is MoveKind.WORLD
        most = WORLD_SETTLE_S if of_world else SETTLE_S
        # If a node returned with fewer slots, the plan's engines on the missing slots never start.
        engines = tuple(place for place in plan.engines if not view.has_lost(place.node, place.slots))
        known = plan.model_copy(update={"engines": engines})
        is_there = follows_plan(known, loads, view.nodes) and (not of_world or _world_serves(view, plan))
        if not is_there and took < most:
            return
        self._settled = generation
        if moved is not None and moved.generation == generation == self._came:
            self.took[generation] = min(took, most)
            self.took = {one: took for one, took in self.took.items() if one > generation - NEWEST_MOVES}

    def _speeds(self, history: tuple[MeasuredStep, ...]) -> PoolSpeeds | None:
        """Estimate the present speeds of both pools; None: not measured yet. Runs in a thread."""
        if self._paces is None:
            from placement.laws import PaceTracker  # imports numpy: a daemon without lending does not load it

            self._paces = PaceTracker()
        self._paces.see(history)
        return pool_speeds(history, self._rows, self._paces.since("rollout"), self._paces.since("reward"))

    def _given_back(self, view: JobView, plan: Plan, at: DecisionContext) -> MoveProposal | None:
        """Return the move that gives lent slots back while ranks train, so that the next step does not wait for it;
        None if no slots are lent."""
        if plan.lent_from is None:
            return None
        there = placeable_nodes(view)
        base = base_split(plan, there)
        back = Decision(base, f"{base}: {BATCH_IS_WHOLE}")
        generation, job = plan.generation + 1, self._moving
        after = assign_split(
            base,
            plan,
            there,
            tuple(job.judges),
            world=plan.world,
            generation=generation,
            reason=back.reason,
            sizes=job.sizes,
        )
        return None if after is None else propose_move(back, plan, after, base, at, BATCH_IS_WHOLE)

    async def close(self) -> None:
        """Close all connections."""
        await self._polling.close()


def _world_serves(view: JobView, plan: Plan) -> bool:
    """Whether every train rank of the plan has a serving worker."""
    claims = [view.mirror.claim(plan.world, place.rank) for place in plan.ranks]
    workers = [view.workers.get(claim.instance) if claim is not None else None for claim in claims]
    return all(worker is not None and worker.state == "serving" for worker in workers)
