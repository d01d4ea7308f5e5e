"""Moves of a job's placement: their kinds, outcomes and sentences, and periods without a move.

A move is decided between two steps (engines change their pool; the train world gets another size) or within a step
(slots are lent). Its reason has the numbers that were known then. Its outcome is recorded beside the expectation.

Outcomes: step numbers recur after a rollback, so steps are ordered by the sequence number of their log entry. A move is
credited with the steps committed after the head at its decision, until the next move between steps. The work of steps
differs too (longer responses, slower judges), so these differences are recorded beside the seconds.

A hold period is a run of steps after which the policy was called and nothing moved. A move between steps ends it; a
loan does not. It keeps its newest decision, and compares the expected with the actual time of each step.
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
"""Assumed costs until one was measured: engines that change their pool, and a train world of another size."""

STEP_IS_OVER = "the step ended, and reassigned slots return"
BATCH_IS_WHOLE = "the batch is complete, and reassigned slots return during training"
BETWEEN = (MoveKind.SPLIT, MoveKind.WORLD, MoveKind.MEND)
WITHIN = (MoveKind.LEND, MoveKind.RETURN)

CHANGING = (MoveKind.SPLIT, *WITHIN)
"""Engines change their pool, and the train world stays."""


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A move that the leader wants, and the resulting plan. Plan None: a rollback forms the new world, or the move is
    only reported."""

    move: Move
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class MoveReport:
    """The moves with their known outcomes, and the revision of the record they are based on (0: no record)."""

    moves: Moves
    since: int


def split_part(split: Split) -> SplitPart:
    """Convert a split to its stored form."""
    return SplitPart(mode=split.mode, rollout=split.rollout, reward=split.reward, train=split.train)


def split_from(part: SplitPart) -> Split:
    """Convert a stored split to the planning type."""
    return Split(part.mode, part.rollout, part.reward, part.train)


def base_split(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """Return the split at the beginning of the step, without loans. `snapshot`: the present nodes; if fewer slots are
    present than were lent, the present ones count."""
    now = split_of(plan, snapshot)
    if plan.lent_from is None:
        return now
    base = split_from(plan.lent_from)
    slots = None if snapshot is None else snapshot.slots
    return base if slots is None or base.rollout + base.reward + base.train <= slots else now


def changed_slots(before: Plan, after: Plan) -> tuple[tuple[str, ...], int]:
    """Return the names of the first changed slots, and how many more changed."""
    lines = role_changes(before, after)
    return tuple(lines[:MOST_SLOTS_TOLD]), max(len(lines) - MOST_SLOTS_TOLD, 0)


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """Position and author of a decision."""

    step: int
    seq: int
    by: str
    time: float
    dry: bool = False


def propose_move(
    decision: Decision, plan: Plan, after: Plan | None, base: Split, at: DecisionContext, back_for: str = STEP_IS_OVER
) -> MoveProposal | None:
    """Turn a policy's decision into a move of `plan`. `after`: the plan of the decided split; None if it needs a train
    world of another size. `back_for`: reason if lent slots only return.

    Return None if nothing changes.
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
    """Return the move that describes the first plan. `expected_s`: predicted seconds of a step."""
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
    """Add the newest change of the plan if no policy requested it: nodes came or went, or a train world was lost.
    `formed_because`: reason of the plan's train world, if it is not the first."""
    if before is None or any(move.generation >= plan.generation and move.state == "done" for move in moves.moves):
        return moves
    is_formed = before.world != plan.world
    if _roles(before) == _roles(plan) and before.ranks == plan.ranks and not is_formed:
        return moves
    wanted = moves.newest
    is_its = wanted is not None and wanted.kind is MoveKind.WORLD and wanted.generation == plan.generation
    if is_its and is_formed:
        return moves  # the move that formed the world has the outcome
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
    """Return which engines are awake. The order is ignored: for a while, engines of absent nodes are listed last."""
    return {place.key: not place.asleep for place in plan.engines}


def is_repeated(moves: Moves, move: Move) -> bool:
    """Whether the newest move is the same, in a placement that only reports what it would do."""
    newest = moves.newest
    return newest is not None and newest.state == "would" and (newest.kind, newest.after) == (move.kind, move.after)


def switch_costs(moves: Moves, start_s: float | None, told_s: float | None = None) -> SwitchCosts:
    """Return the costs of changes. `start_s`: newest start of a train world. `told_s`: seconds of a sleep and a wake as
    reported by the nodes. A restarted controller has not measured a wake and reports a guess, so if the job's own moves
    took less, their time counts."""
    took_s = engine_change_s(moves)
    held = MOVE_PRIOR_S if took_s is None else took_s
    worlds = [cost for cost in (_took(moves).get(MoveKind.WORLD), start_s) if cost is not None]
    return SwitchCosts(
        move_s=min((cost for cost in (told_s, took_s) if cost is not None), default=MOVE_PRIOR_S),
        world_s=max(*worlds, held) if worlds else WORLD_PRIOR_S,
    )


def engine_change_s(moves: Moves) -> float | None:
    """Return the seconds for engines to change their pool: the longest of the newest moves of each kind; None if never
    measured."""
    took = _took(moves)
    return max((took[kind] for kind in CHANGING if kind in took), default=None)


def _took(moves: Moves) -> dict[MoveKind, float]:
    """Return the seconds of the newest measured move of each kind."""
    outcomes = [(move.kind, move.outcome) for move in moves.moves]
    return {kind: found.took_s for kind, found in outcomes if found is not None and found.took_s is not None}


MOST_AFTER = 5
"""Maximum number of steps over which an outcome is measured, and of earlier steps it is compared with."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step, on head's chain or not. `seq`: of its log entry. `tokens`: mean per response. `question_s`:
    seconds of a judge engine per question. None: not measured."""

    step: int
    seq: int
    seconds: float
    tokens: float | None = None
    question_s: float | None = None


def add_outcomes(
    moves: Moves, steps: Sequence[CommittedStep], took: Mapping[int, float], head_seq: int, plan: Plan
) -> Moves:
    """Update the outcomes of the moves.

    `steps`: oldest first. `took`: seconds until a move had taken effect, by generation. `head_seq`, `plan`: present
    values; they show whether a wanted world was formed or never will be.
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
    """Set a wanted move to done or lapsed. `others`: generations of plans that other moves made."""
    if move.state != "wanted" or head_seq == move.seq:
        return move
    # A rollback advances head and forms the world, with as many ranks as can be placed; or a step was committed
    # instead.
    formed = plan.generation >= move.generation and move.generation not in others
    return move.model_copy(update={"state": "done" if formed else "lapsed"})


def _after(move: Move, steps: Sequence[CommittedStep], later: Move | None) -> list[CommittedStep]:
    """Return the steps credited to a move. `later`: the next move between steps; steps after it are not credited."""
    within, first = move.kind in WITHIN, move.step + 1
    made: dict[int, CommittedStep] = {}
    for one in steps:
        if one.seq > move.seq and (within or later is None or one.seq <= later.seq):
            made.setdefault(one.step, one)
    paid = made.get(first)  # the step at whose beginning the move was made
    after = [made[step] for step in range(first + 1, first + 1 + MOST_AFTER) if step in made]
    if paid is not None and (within or (not after and later is not None)):
        return [paid]  # the next move came before any step without the cost of this one
    return [] if within else after


def _before(move: Move, steps: Sequence[CommittedStep], earlier: Move | None) -> list[CommittedStep]:
    """Return the steps that the outcome is compared with. `earlier`: the previous move between steps; steps before it
    are excluded."""
    made = {one.step: one for one in steps if one.seq <= move.seq and (earlier is None or one.seq > earlier.seq)}
    if earlier is not None:
        made.pop(earlier.step + 1, None)
    since = max(move.step - MOST_AFTER + 1, 2)  # the first step includes loading
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
            found = {
                name: number for name, number in found.items() if getattr(known, name) is None
            }  # fill in late measurements only
        outcome = outcome.model_copy(update={name: number for name, number in found.items() if number is not None})
    return move if outcome in (move.outcome, MoveOutcome()) else move.model_copy(update={"outcome": outcome})


def _mean(steps: Sequence[CommittedStep], number: Callable[[CommittedStep], float | None]) -> float | None:
    """Return the mean over the steps with a known value."""
    found = [one for one in map(number, steps) if one is not None]
    return round(fmean(found), 3) if found else None


OTHER_WORK = 0.1
"""Minimum relative difference of the work of steps that is mentioned."""


def move_in_words(move: Move) -> str:
    """Say what was done and why, in one sentence."""
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
        case MoveKind.MEND:  # not requested by a policy, so always done
            became = f"{before} became {after}" if before != after else f"they were placed again, {after} as before"
            return _because(f"nodes or workers came or went, and {became}", move)
        case _:
            done, rest = ("go", "went", "gone"), f"from {before} to {after}"
    return _because(_in_its_state(move, done, rest), move)


def _in_its_state(move: Move, done: tuple[str, str, str], rest: str) -> str:
    """`done`: the verb in present tense, past tense and as participle."""
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
    """Say what was expected of the move."""
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
    """Say what the outcome of the move was."""
    outcome = move.outcome
    if move.state != "done":
        return ""
    if outcome is None:
        return "its outcome is not known"
    said = [f"it took {outcome.took_s:.1f} s"] if outcome.took_s is not None else []
    if outcome.step_s is not None and move.kind not in WITHIN:
        held = f", before it {outcome.before_s:.1f} s" if outcome.before_s is not None else ""
        steps = "step after it took" if outcome.steps == 1 else f"{outcome.steps} steps after it took"
        each = "" if outcome.steps == 1 else " each"
        said.append(f"the {steps} {outcome.step_s:.1f} s{each}{held}{_other_work(outcome)}")
    elif outcome.step_s is not None:
        said.append(f"the step it was in took {outcome.step_s:.1f} s")
    return "; ".join(said) or "its outcome is not known"


def _other_work(outcome: MoveOutcome) -> str:
    """Say how the work of the steps after the move differed from the steps before. Otherwise the change in seconds
    would be credited to the move."""
    said = []
    if _differ(outcome.tokens, outcome.before_tokens):
        said.append(f"responses of {outcome.tokens:.0f} tokens instead of {outcome.before_tokens:.0f}")
    if _differ(outcome.question_s, outcome.before_question_s):
        said.append(
            f"{outcome.question_s:.2g} s of a judge for each question instead of {outcome.before_question_s:.2g} s"
        )
    return ", with " + " and ".join(said) if said else ""


def _differ(after: float | None, before: float | None) -> bool:
    """Whether the difference is large enough to mention."""
    return after is not None and before is not None and abs(after - before) > OTHER_WORK * before


def _gains(before: Split, after: Split) -> str:
    return "rollout" if after.rollout > before.rollout else "the judges"


def extend_stay(
    newest: HoldPeriod | None, moves: Moves, at: DecisionContext, reason: str, expected_s: float | None = None
) -> HoldPeriod:
    """Extend the hold period `newest` with this decision, or begin a new one. `expected_s`: expected seconds of the
    next step."""
    expected = None if expected_s is None or not math.isfinite(expected_s) else round(expected_s, 3)
    more = {"step": at.step, "seq": at.seq, "reason": reason, "by": at.by, "time": at.time, "expected_s": expected}
    if newest is None or newest.step >= at.step or _is_over(newest, moves):
        return HoldPeriod.model_validate({"since": at.step, "began": at.time, **more})
    return HoldPeriod.model_validate(
        {"since": newest.since, "began": newest.began, "foretold": newest.foretold.model_dump(), **more}
    )


def add_taken(stay: HoldPeriod, took_s: float | None) -> HoldPeriod:
    """Record the actual time of the step after the newest decision. `took_s` None: not known yet."""
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
    """Add or replace a hold period in the record."""
    others = tuple(one for one in moves.stays if one.began != stay.began)
    return moves.model_copy(update={"stays": (*others, stay)[-NEWEST_STAYS:]})


def stay_in_words(stay: HoldPeriod) -> str:
    """Say why nothing moved, without the span (`span_in_words`)."""
    newest = ", the last time" if stay.step > stay.since else ","
    return f"nothing moved{newest} because {stay.reason}" if stay.reason else "nothing moved"


def foretold_in_words(foretold: ForecastAccuracy) -> str:
    """Compare actual and expected seconds of the steps after the decisions; empty if nothing was expected."""
    if not foretold.steps:
        return ""
    took = f"took {foretold.took_s:.1f} s where {foretold.expected_s:.1f} s were expected"
    if foretold.steps == 1:
        return f"the step that followed {took}"
    off = foretold.off_s / foretold.took_s if foretold.took_s else 0.0
    return f"the {foretold.steps} steps that followed {took}, each off by {off:.0%} on average"


def span_in_words(stay: HoldPeriod) -> str:
    """Say after which steps nothing moved."""
    return f"after steps {stay.since} to {stay.step}" if stay.step > stay.since else f"after step {stay.step}"
