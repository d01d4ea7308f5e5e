"""Moves of a job's placement: what changes of the plan are called, what came of them, decisions that moved nothing; all in words.

A move is decided between two steps (engines change over; the train world gets another size) or within one (slots are lent). Its reason is
in numbers that were known then, and its outcome is recorded beside what was expected.

Outcomes: step numbers recur after a rollback, so steps are ordered by the sequence number of their log entry. A move counts for what was
committed after the head that it was decided at, until the next move between steps. The work of steps differs too (longer responses,
slower judges), so what is known of that is recorded beside their seconds.

A hold period is a run of steps after which the policy was asked and nothing moved. A move between steps ends it, a loan does not. It keeps
its newest decision, and compares what was expected of each step with what it took, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gcore.ledger.records.job import (
    MOST_SLOTS_TOLD,
    NEWEST_STAYS,
    ForecastAccuracy,
    HoldPeriod,
    Move,
    MoveKind,
    MoveOutcome,
    Moves,
    Plan,
    SplitPart,
)
from placement.assign import role_changes, split_of
from placement.policies.base import Decision, SwitchCosts
from placement.slots import Snapshot, Split, count_noun

MOVE_PRIOR_S, WORLD_PRIOR_S = 10.0, 60.0
"""What changes are taken to cost until one was measured: engines that change over, a train world of another size."""

STEP_IS_OVER = "the step is over: what was lent goes back"
BATCH_IS_WHOLE = "the batch is whole: what was lent goes back while it is trained on"
BETWEEN = (MoveKind.SPLIT, MoveKind.WORLD, MoveKind.MEND)
WITHIN = (MoveKind.LEND, MoveKind.RETURN)

CHANGING = (MoveKind.SPLIT, *WITHIN)
"""Engines change over, and the train world stays."""


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A move that whoever leads wants, and the plan that it makes; None: a world, which a rollback places, or nothing at all but
    what is told."""

    move: Move
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The moves with what is known by now of what came of them, made from the record of that revision (0: there was none)."""

    moves: Moves
    since: int


def split_part(split: Split) -> SplitPart:
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


def changed_slots(before: Plan, after: Plan) -> tuple[tuple[str, ...], int]:
    """The slots that change, the first of them by name, and how many more there are."""
    lines = role_changes(before, after)
    return tuple(lines[:MOST_SLOTS_TOLD]), max(len(lines) - MOST_SLOTS_TOLD, 0)


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """Where and when a move is decided."""

    step: int
    seq: int
    by: str
    time: float
    dry: bool = False


def propose_move(
    decision: Decision, plan: Plan, after: Plan | None, base: Split, at: DecisionContext, back_for: str = STEP_IS_OVER
) -> MoveProposal | None:
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
    slots, more = ((), 0) if after is None else changed_slots(plan, after)
    move = Move(
        generation=plan.generation + 1,
        step=at.step,
        seq=at.seq,
        kind=kind,
        before=split_part(split_of(plan) if back else base),
        after=split_part(decision.split),
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
    return MoveProposal(move, None if at.dry else after)


def initial_move(plan: Plan, reason: str, expected_s: float | None, at: DecisionContext) -> Move:
    """What the job began with. `expected_s`: what a step was predicted to take."""
    split = split_of(plan)
    return Move(
        generation=plan.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.BEGIN,
        before=SplitPart(mode=split.mode, rollout=0, reward=0, train=0),
        after=split_part(split),
        reason=reason,
        expected_s=None if expected_s is None else round(expected_s, 3),
        by=at.by,
        time=at.time,
    )


def add_unrequested(
    moves: Moves, before: Plan | None, plan: Plan, at: DecisionContext, formed_because: str = ""
) -> Moves:
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
    slots, more = changed_slots(before, plan)
    move = Move(
        generation=plan.generation,
        step=at.step,
        seq=at.seq,
        kind=MoveKind.MEND,
        before=split_part(split_of(before)),
        after=split_part(split_of(plan)),
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


def is_repeated(moves: Moves, move: Move) -> bool:
    """Whether the same was told last, of a placement that only says what it would do."""
    newest = moves.newest
    return newest is not None and newest.state == "would" and (newest.kind, newest.after) == (move.kind, move.after)


def switch_costs(moves: Moves, start_s: float | None, told_s: float | None = None) -> SwitchCosts:
    """What changes cost. `start_s`: the newest start of a train world; `told_s`: what nodes tell that it takes to put an engine to sleep and
    to wake another. That may be a guess still (a controller that was started again has seen none wake), so where the job's own moves took
    less, what they took counts."""
    took_s = engine_change_s(moves)
    held = MOVE_PRIOR_S if took_s is None else took_s
    worlds = [cost for cost in (_took(moves).get(MoveKind.WORLD), start_s) if cost is not None]
    return SwitchCosts(
        move_s=min((cost for cost in (told_s, took_s) if cost is not None), default=MOVE_PRIOR_S),
        world_s=max(*worlds, held) if worlds else WORLD_PRIOR_S,
    )


def engine_change_s(moves: Moves) -> float | None:
    """What it took that engines changed over: the longest of the newest moves of each kind. None: it was never measured."""
    took = _took(moves)
    return max((took[kind] for kind in CHANGING if kind in took), default=None)


def _took(moves: Moves) -> dict[MoveKind, float]:
    """Of each kind of move the newest that was measured, seconds."""
    outcomes = [(move.kind, move.outcome) for move in moves.moves]
    return {kind: found.took_s for kind, found in outcomes if found is not None and found.took_s is not None}


MOST_AFTER = 5
"""Steps over which what came of a move is measured, at most; and before it, with which it is held."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A step that was committed, on head's chain or not. `seq`: its log entry's. `tokens`: of a response, on average; `question_s`: what a
    question took of a judge's engine. None: nobody measured it."""

    step: int
    seq: int
    seconds: float
    tokens: float | None = None
    question_s: float | None = None


def add_outcomes(
    moves: Moves, steps: Sequence[CommittedStep], took: Mapping[int, float], head_seq: int, plan: Plan
) -> Moves:
    """The moves with what is known by now of what came of them.

    `steps`: oldest first; `took`: by generation, seconds until a move had taken effect. `head_seq`, `plan`: as they are now, by which a
    world that was wanted was formed, or never will be.
    """
    known = list(moves.moves)
    for number, move in enumerate(known):
        others = {one.generation for one in known if one is not move and one.state == "done"}
        move = _formed_or_lapsed(move, others, head_seq, plan)
        if move.state == "done":
            later = next((one for one in known[number + 1 :] if _is_between(one)), None)
            earlier = next((one for one in reversed(known[:number]) if _is_between(one)), None)
            move = _measured(move, took.get(move.generation), _after(move, steps, later), _before(move, steps, earlier))
        known[number] = move
    return moves if tuple(known) == moves.moves else moves.model_copy(update={"moves": tuple(known)})


def _is_between(move: Move) -> bool:
    return move.kind in BETWEEN and move.state == "done"


def _formed_or_lapsed(move: Move, others: Collection[int], head_seq: int, plan: Plan) -> Move:
    """`others`: the plans that other moves made."""
    if move.state != "wanted" or head_seq == move.seq:
        return move
    # Head moves by the rollback that forms it, of as many ranks as can be placed, or by a step that was committed instead.
    formed = plan.generation >= move.generation and move.generation not in others
    return move.model_copy(update={"state": "done" if formed else "lapsed"})


def _after(move: Move, steps: Sequence[CommittedStep], later: Move | None) -> list[CommittedStep]:
    """The steps that tell what came of it. `later`: the next move between steps; what comes after that is no more of this one."""
    within, first = move.kind in WITHIN, move.step + 1
    made: dict[int, CommittedStep] = {}
    for one in steps:
        if one.seq > move.seq and (within or later is None or one.seq <= later.seq):
            made.setdefault(one.step, one)
    paid = made.get(first)  # the step at whose beginning it was made
    after = [made[step] for step in range(first + 1, first + 1 + MOST_AFTER) if step in made]
    if paid is not None and (within or (not after and later is not None)):
        return [paid]  # the next move came before there was a step that paid for nothing
    return [] if within else after


def _before(move: Move, steps: Sequence[CommittedStep], earlier: Move | None) -> list[CommittedStep]:
    """Those with which it is held. `earlier`: the move between steps before it, whose own steps they are."""
    made = {one.step: one for one in steps if one.seq <= move.seq and (earlier is None or one.seq > earlier.seq)}
    if earlier is not None:
        made.pop(earlier.step + 1, None)
    since = max(move.step - MOST_AFTER + 1, 2)  # in the first step everything is loaded
    return [made[step] for step in range(since, move.step + 1) if step in made]


def _measured(move: Move, took: float | None, after: Sequence[CommittedStep], before: Sequence[CommittedStep]) -> Move:
    known = move.outcome or MoveOutcome()
    outcome = known
    if took is not None and known.took_s is None:
        outcome = outcome.model_copy(update={"took_s": round(took, 3)})
    if after and len(after) >= known.steps:
        found = {
            "steps": len(after),
            "step_s": _mean(after, lambda one: one.seconds),
            "before_s": _mean(before, lambda one: one.seconds),
            "tokens": _mean(after, lambda one: one.tokens),
            "before_tokens": _mean(before, lambda one: one.tokens),
            "question_s": _mean(after, lambda one: one.question_s),
            "before_question_s": _mean(before, lambda one: one.question_s),
        }
        if (len(after), found["step_s"]) == (known.steps, known.step_s):
            found = {name: number for name, number in found.items() if getattr(known, name) is None}  # it came late
        outcome = outcome.model_copy(update={name: number for name, number in found.items() if number is not None})
    return move if outcome in (move.outcome, MoveOutcome()) else move.model_copy(update={"outcome": outcome})


def _mean(steps: Sequence[CommittedStep], number: Callable[[CommittedStep], float | None]) -> float | None:
    """Of those of which it is known."""
    found = [one for one in map(number, steps) if one is not None]
    return round(fmean(found), 3) if found else None


OTHER_WORK = 0.1
"""By how much the work of steps differs before a word is lost about it, as a share of what it was."""


def move_in_words(move: Move) -> str:
    """What was done, and why: one sentence that a person can follow."""
    before, after = split_from(move.before), split_from(move.after)
    match move.kind:
        case MoveKind.BEGIN:
            done, rest = ("begin", "began", "begun"), f"with {after}"
        case MoveKind.LEND:
            giver = "the judges" if _gains(before, after) == "rollout" else "rollout"
            rest = f"{count_noun(abs(after.reward - before.reward), 'slot')} from {giver} to {_gains(before, after)}"
            done = ("lend", "lent", "lent")
        case MoveKind.RETURN:
            done = ("give", "gave", "given")
            rest = f"{count_noun(abs(after.rollout - before.rollout), 'slot')} back to {_gains(before, after)}"
        case MoveKind.WORLD:
            done = ("form", "formed", "formed")
            rest = (
                f"a train world of {count_noun(after.train, 'rank')} in place of {before.train} ({before} -> {after})"
            )
        case MoveKind.MEND:  # nobody wished for it: it is never told before it is done
            became = (
                f"{before} became {after}" if before != after else f"what they had was placed anew, {after} as before"
            )
            return _because(f"nodes or workers came or went, and {became}", move)
        case _:
            done, rest = ("go", "went", "gone"), f"from {before} to {after}"
    return _because(_in_its_state(move, done, rest), move)


def _in_its_state(move: Move, done: tuple[str, str, str], rest: str) -> str:
    """`done`: the verb as it is, was, and has been."""
    now, was, been = done
    match move.state:
        case "would":
            return f"would have {been} {rest}"
        case "wanted":
            return f"wants to {now} {rest}"
        case "lapsed":
            return f"wanted to {now} {rest}"
        case _:
            return f"{was} {rest}"


def _because(what: str, move: Move) -> str:
    said = f"{what}, because {move.reason}" if move.reason else what
    return said + "; it was not formed before the next step" * (move.state == "lapsed")


def numbers_in_words(move: Move) -> str:
    """What was expected of it."""
    said = []
    if move.kind is MoveKind.BEGIN and move.expected_s is not None:
        said.append(f"a step was to take {move.expected_s:.3g} s")
    elif move.before_s is not None and move.expected_s is not None and move.kind in BETWEEN:
        said.append(f"a step was to take {move.expected_s:.1f} s instead of {move.before_s:.1f} s")
    elif move.gain_s is not None and move.gain_s > 0:
        said.append(f"it was to gain {move.gain_s:.1f} s")
    if move.cost_s is not None and move.cost_s > 0:
        said.append(f"the change was to cost {move.cost_s:.1f} s once")
    return ", and ".join(said)


def outcome_in_words(move: Move) -> str:
    """What came of it."""
    outcome = move.outcome
    if move.state != "done":
        return ""
    if outcome is None:
        return "nothing is known of what came of it"
    said = [f"it took {outcome.took_s:.1f} s"] if outcome.took_s is not None else []
    if outcome.step_s is not None and move.kind not in WITHIN:
        held = f", before it {outcome.before_s:.1f} s" if outcome.before_s is not None else ""
        steps = "step after it took" if outcome.steps == 1 else f"{outcome.steps} steps after it took"
        each = "" if outcome.steps == 1 else " each"
        said.append(f"the {steps} {outcome.step_s:.1f} s{each}{held}{_other_work(outcome)}")
    elif outcome.step_s is not None:
        said.append(f"the step it was in took {outcome.step_s:.1f} s")
    return "; ".join(said) or "nothing is known of what came of it"


def _other_work(outcome: MoveOutcome) -> str:
    """What the steps after it had to do, where it was more than those before it had, or less: else the move would be given the credit of
    it, or the blame."""
    said = []
    if _differ(outcome.tokens, outcome.before_tokens):
        said.append(f"responses of {outcome.tokens:.0f} tokens instead of {outcome.before_tokens:.0f}")
    if _differ(outcome.question_s, outcome.before_question_s):
        said.append(
            f"{outcome.question_s:.2g} s of a judge for each question instead of {outcome.before_question_s:.2g} s"
        )
    return ", with " + " and ".join(said) if said else ""


def _differ(after: float | None, before: float | None) -> bool:
    """By so much that it is worth a word."""
    return after is not None and before is not None and abs(after - before) > OTHER_WORK * before


def _gains(before: Split, after: Split) -> str:
    return "rollout" if after.rollout > before.rollout else "the judges"


def extend_stay(
    newest: HoldPeriod | None, moves: Moves, at: DecisionContext, reason: str, expected_s: float | None = None
) -> HoldPeriod:
    """`newest` with this decision, if that stretch goes on; else a new one that begins with it. `expected_s`: of the next step."""
    expected = None if expected_s is None or not math.isfinite(expected_s) else round(expected_s, 3)
    more = {"step": at.step, "seq": at.seq, "reason": reason, "by": at.by, "time": at.time, "expected_s": expected}
    if newest is None or newest.step >= at.step or _is_over(newest, moves):
        return HoldPeriod.model_validate({"since": at.step, "began": at.time, **more})
    return HoldPeriod.model_validate(
        {"since": newest.since, "began": newest.began, "foretold": newest.foretold.model_dump(), **more}
    )


def add_taken(stay: HoldPeriod, took_s: float | None) -> HoldPeriod:
    """Beside what the newest decision expected of the step after it, what that took. `took_s` None: nobody knows yet."""
    before, step = stay.foretold, stay.step + 1
    if took_s is None or stay.expected_s is None or before.newest >= step:
        return stay
    foretold = ForecastAccuracy(
        steps=before.steps + 1,
        newest=step,
        expected_s=round(before.expected_s + stay.expected_s, 3),
        took_s=round(before.took_s + took_s, 3),
        off_s=round(before.off_s + abs(took_s - stay.expected_s), 3),
    )
    return stay.model_copy(update={"foretold": foretold})


def _is_over(stay: HoldPeriod, moves: Moves) -> bool:
    return any(move.kind in BETWEEN and move.seq >= stay.seq for move in moves.moves)


def add_stay(moves: Moves, stay: HoldPeriod) -> Moves:
    """The record with what is known of it by now."""
    others = tuple(one for one in moves.stays if one.began != stay.began)
    return moves.model_copy(update={"stays": (*others, stay)[-NEWEST_STAYS:]})


def stay_in_words(stay: HoldPeriod) -> str:
    """Why nothing moved, without when that was (`span_in_words`)."""
    newest = ", the last time" if stay.step > stay.since else ","
    return f"nothing moved{newest} because {stay.reason}" if stay.reason else "nothing moved"


def foretold_in_words(foretold: ForecastAccuracy) -> str:
    """What the steps after the decisions took, beside what was expected of them; empty where nothing was."""
    if not foretold.steps:
        return ""
    took = f"took {foretold.took_s:.1f} s where {foretold.expected_s:.1f} s were expected"
    if foretold.steps == 1:
        return f"the step that followed {took}"
    off = foretold.off_s / foretold.took_s if foretold.took_s else 0.0
    return f"the {foretold.steps} steps that followed {took}, each off by {off:.0%} on average"


def span_in_words(stay: HoldPeriod) -> str:
    """After which steps nothing moved."""
    return f"after steps {stay.since} to {stay.step}" if stay.step > stay.since else f"after step {stay.step}"
