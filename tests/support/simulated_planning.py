"""Planning in the simulated cluster: production's planner and lender, a policy that requests random feasible placements, and engines with
simulated requests.

The engines' load is arbitrary: alternately rollout and the judges are behind, so that slots are lent back and forth constantly.
Speeds are given, not measured. The checks are that concurrent targets, loans and reports never contradict each other:
no move is lost from the record, and no loan takes the slots of a target train world.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

from simulated_workers import Floor

from controllers.planning.planner import PolicyFailed
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import SealState
from gcore.ledger.records.job import MoveKind, NodeRecord
from gcore.ledger.selection import resumable_checkpoints
from placement.lending import EngineLoad, JobLoads, PoolSpeed, PoolSpeeds
from placement.moves import BETWEEN, WITHIN
from placement.policies.base import Decision, Policy, PolicyStart, Situation
from placement.slots import feasible

T = TypeVar("T")
SPEED = PoolSpeed(alone_s=0.05, saturating=8.0, tokens=300.0, residual=150.0, rows=8)
CHANGE_S = 0.5
MUCH, LITTLE = 90, 1
"""Requests that wait at an engine."""


class Wandering:
    """A policy that wants any split that can be had."""

    def __init__(self, start: PolicyStart, chance: random.Random) -> None:
        self._first = start.first
        self._chance = chance

    def plan(self, situation: Situation) -> Decision:
        found = [one for one in feasible(situation.bounds) if one.mode == "coexisting"]
        if not found or self._chance.random() < 0.25:
            return Decision(situation.now or self._first, "it is well")
        return Decision(self._chance.choice(found), "why not")


class SimulatedPolling:
    """`controllers.planning.lender` of simulated engines."""

    change_s = CHANGE_S

    def __init__(self, floor: Floor, chance: random.Random) -> None:
        self._floor = floor
        self._chance = chance

    async def loads(self, nodes: Mapping[str, NodeRecord]) -> JobLoads:
        """Of the engines that serve."""
        behind = self._chance.choice(["rollout", "reward"])
        serving = [one for one in self._floor.engines.values() if one.alive and one.record.state == "serving"]
        return JobLoads(
            tuple(
                EngineLoad(
                    one.node,
                    one.spec.slot,
                    one.spec.judge,
                    0 if one.asleep else 2,
                    0 if one.asleep else MUCH if one.spec.role == behind else LITTLE,
                    ready=not one.nameless and not one.asleep,
                    asleep=one.asleep,
                )
                for one in serving
                if one.node in nodes
            ),
            {},
        )

    async def close(self) -> None:
        """Nothing is open."""


async def at_once(_: object, call: Callable[[], T]) -> T:
    """In place of a thread. Raises PolicyFailed."""
    try:
        return call()
    except ValueError as error:
        raise PolicyFailed(str(error)) from error


@contextlib.contextmanager
def planning(floor: Floor, chance: random.Random) -> Iterator[None]:
    """Production's planner asks simulated engines, and this policy, meanwhile."""

    def make(start: PolicyStart) -> Policy:
        return Wandering(start, chance)

    with contextlib.ExitStack() as stack:
        for where, what in (
            ("controllers.planning.lender.LoadPoller", lambda *_: SimulatedPolling(floor, chance)),
            ("controllers.planning.planner.PolicyRunner._in_thread", at_once),
            ("controllers.planning.planner.find_policy", lambda _: make),
            ("controllers.planning.lender.Lender._speeds", lambda *_: PoolSpeeds(SPEED, SPEED)),
        ):
            stack.enter_context(mock.patch(where, what))
        yield


def contradiction(before: JobMirror, after: JobMirror) -> str:
    """What must not happen to the moves and the plan from one revision of the store to the next, or nothing."""
    numbered = [
        {one.moves.total - len(one.moves.moves) + place: move for place, move in enumerate(one.moves.moves)}
        for one in (before, after)
    ]
    if after.moves.total < before.moves.total:
        return f"moves were lost: there were {before.moves.total}, and are {after.moves.total}"
    for number in numbered[0].keys() & numbered[1].keys():
        old, new = (one[number] for one in numbered)
        if (old.kind, old.generation, old.time) != (new.kind, new.generation, new.time):
            return f"move {number} is another one now: {old.kind} {old.generation}, then {new.kind} {new.generation}"
    made, wanted = after.moves.newest, before.moves.newest
    is_new = made is not None and after.moves.total > before.moves.total and after.plan != before.plan
    if (
        is_new
        and made is not None
        and made.kind in (*WITHIN, *BETWEEN)
        and wanted is not None
        and _may_be_formed(before)
    ):
        return f"{made.kind} {made.generation} took the place of the world that was wanted"
    return ""


def _may_be_formed(mirror: JobMirror) -> bool:
    """Whether a train world is wanted of this head and plan, and the next step is not trained yet."""
    wanted, head, plan = mirror.moves.newest, mirror.head, mirror.plan
    if wanted is None or head is None or plan is None or mirror.checkpoints is None:
        return False
    is_of_now = (wanted.seq, wanted.generation) == (head.record.seq, plan.record.generation + 1)
    if wanted.kind is not MoveKind.WORLD or wanted.state != "wanted" or not is_of_now:
        return False
    seal: Any = mirror.seals.get(head.record.step + 1)
    saved = resumable_checkpoints(head.record, mirror.checkpoints.record.entries)
    is_begun = seal is not None and (seal.record.state is SealState.READY or bool(seal.record.ready_parts))
    return not is_begun and bool(saved) and saved[0].step == head.record.step
