"""What changes of a job's plan are called. Pure: records in, records out; in words `placement.move_words` says it.

A move is decided between two steps (engines change over; the train world gets another size) or within one (engines are lent). Its
reason is in numbers that were known then; what came of it (`placement.outcomes`) stands beside what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.ledger.job import Plan
from gcore.ledger.placing import MOST_SLOTS_TOLD, Move, MoveKind, Moves, SplitPart
from placement.assign import changes, split_of
from placement.plan import Snapshot
from placement.policies.base import Decision, SwitchCosts
from placement.split import Split

MOVE_PRIOR_S, WORLD_PRIOR_S = 10.0, 60.0
"""What changes are taken to cost until one was measured: engines that change over, a train world of another size."""
STEP_IS_OVER = "the step is over: what was lent goes back"
BATCH_IS_WHOLE = "the batch is whole: what was lent goes back while it is trained on"
BETWEEN = (MoveKind.SPLIT, MoveKind.WORLD, MoveKind.MEND)
WITHIN = (MoveKind.LEND, MoveKind.RETURN)
CHANGING = (MoveKind.SPLIT, *WITHIN)
"""Engines change over, and the train world stays."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A move that whoever leads wants, and the plan that it makes; None: a world, which a rollback places, or nothing at all but
    what is told."""

    move: Move
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Accounted:
    """The moves with what is known by now of what came of them, made from the record of that revision (0: there was none)."""

    moves: Moves
    since: int


def part_of(split: Split) -> SplitPart:
    """As it is stored."""
    return SplitPart(mode=split.mode, rollout=split.rollout, reward=split.reward, train=split.train)


def split_from(part: SplitPart) -> Split:
    """As it is planned with."""
    return Split(part.mode, part.rollout, part.reward, part.train)


def base_split(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """The split that the step began with: what is lent within it does not count. `snapshot`: of the nodes that are there; what was
    lent from more slots than they have is what there is."""
    now = split_of(plan, snapshot)
    if plan.lent_from is None:
        return now
    base = split_from(plan.lent_from)
    slots = None if snapshot is None else snapshot.slots
    return base if slots is None or base.rollout + base.reward + base.train <= slots else now


def told_slots(before: Plan, after: Plan) -> tuple[tuple[str, ...], int]:
    """The slots that change, the first of them by name, and how many more there are."""
    lines = changes(before, after)
    return tuple(lines[:MOST_SLOTS_TOLD]), max(len(lines) - MOST_SLOTS_TOLD, 0)


@dataclass(frozen=True, slots=True)
class Deciding:
    """Where and when a move is decided."""

    step: int
    seq: int
    by: str
    time: float
    dry: bool = False


def between_steps(
    decision: Decision, plan: Plan, after: Plan | None, base: Split, at: Deciding, back_for: str = STEP_IS_OVER
) -> Proposal | None:
    """What a policy's decision makes of `plan`. `after`: the plan of its split, None where that is a train world of another size.
    `back_for`: why what was lent goes back, where no more than that changes.

    None: nothing changes.
    """
    back = decision.split == base
    if back and after is None:
        return None
    if after is not None and plan.lent_from is None and (back or _roles(after) == _roles(plan)):
        return None
    kind = MoveKind.WORLD if after is None else MoveKind.RETURN if back else MoveKind.SPLIT
    slots, more = ((), 0) if after is None else told_slots(plan, after)
    move = Move(
        generation=plan.generation + 1,
        step=at.step,
        seq=at.seq,
        kind=kind,
        before=part_of(split_of(plan) if back else base),
        after=part_of(decision.split),
        slots=slots,
        more_slots=more,
        reason=back_for if back else decision.reason,
        idle={pool: round(share, 4) for pool, share in decision.idle.items()},
        gain_s=None if back else decision.gain_s,
        cost_s=None if back else decision.cost_s,
        expected_s=decision.expected_s,
        before_s=decision.before_s,
        by=at.by,
        time=at.time,
        within=back_for == BATCH_IS_WHOLE,
        state="would" if at.dry else "wanted" if after is None else "done",
    )
    return Proposal(move, None if at.dry else after)


def beginning_move(plan: Plan, reason: str, expected_s: float | None, at: Deciding) -> Move:
    """What the job began with. `expected_s`: what a step was predicted to take."""
    split = split_of(plan)
    return Move(
        generation=plan.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.BEGIN,
        before=SplitPart(mode=split.mode, rollout=0, reward=0, train=0),
        after=part_of(split),
        reason=reason,
        expected_s=None if expected_s is None else round(expected_s, 3),
        by=at.by,
        time=at.time,
    )


def with_unasked(moves: Moves, before: Plan | None, plan: Plan, at: Deciding, formed_because: str = "") -> Moves:
    """The moves with the newest change of the plan, where no policy asked for it: nodes came or went, or a train world was lost.
    `formed_because`: why the plan's world was placed, if it is not the first."""
    if before is None or any(move.generation >= plan.generation and move.state == "done" for move in moves.moves):
        return moves
    is_formed = before.world != plan.world
    if _roles(before) == _roles(plan) and before.ranks == plan.ranks and not is_formed:
        return moves
    wanted = moves.newest
    is_its = wanted is not None and wanted.kind is MoveKind.WORLD and wanted.generation == plan.generation
    if is_its and is_formed:
        return moves  # what came of that is told with it
    slots, more = told_slots(before, plan)
    move = Move(
        generation=plan.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.MEND,
        before=part_of(split_of(before)),
        after=part_of(split_of(plan)),
        slots=slots,
        more_slots=more,
        reason=(is_formed and formed_because) or plan.reason.split("; then ")[-1],
        by=at.by,
        time=at.time,
    )
    return moves.plus(move)


def _roles(plan: Plan) -> dict[tuple[str, str, str], bool]:
    """Which engines are awake. In whatever order: those of nodes that are away stand behind the others for a while."""
    return {place.key: not place.asleep for place in plan.engines}


def is_told(moves: Moves, move: Move) -> bool:
    """Whether the same was told last, of a placement that only says what it would do."""
    newest = moves.newest
    return newest is not None and newest.state == "would" and (newest.kind, newest.after) == (move.kind, move.after)


def costs(moves: Moves, start_s: float | None, told_s: float | None = None) -> SwitchCosts:
    """What changes cost. `start_s`: the newest start of a train world; `told_s`: what nodes tell that it takes to put an engine to sleep and
    to wake another. That may be a guess still (a controller that was started again has seen none wake), so where the job's own moves took
    less, what they took counts."""
    took_s = changing_took_s(moves)
    held = MOVE_PRIOR_S if took_s is None else took_s
    worlds = [cost for cost in (_took(moves).get(MoveKind.WORLD), start_s) if cost is not None]
    return SwitchCosts(
        move_s=min((cost for cost in (told_s, took_s) if cost is not None), default=MOVE_PRIOR_S),
        world_s=max(*worlds, held) if worlds else WORLD_PRIOR_S,
    )


def changing_took_s(moves: Moves) -> float | None:
    """What it took that engines changed over: the longest of the newest moves of each kind. None: it was never measured."""
    took = _took(moves)
    return max((took[kind] for kind in CHANGING if kind in took), default=None)


def _took(moves: Moves) -> dict[MoveKind, float]:
    """Of each kind of move the newest that was measured, seconds."""
    outcomes = [(move.kind, move.outcome) for move in moves.moves]
    return {kind: found.took_s for kind, found in outcomes if found is not None and found.took_s is not None}
