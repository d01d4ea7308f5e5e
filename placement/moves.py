"""Changes of a job's placement ("moves"): how they are recorded, what their effect was, how they are put into words,
and the periods without one.

A move is decided between two steps (engines change their pool; the train world gets another size) or within a step
(slots are lent). Its reason contains the numbers that were known at the decision. Later the measured effect is recorded
beside the expected one: the outcome.

For the outcome, the seconds of the steps after a move are compared with those before. Step numbers recur after a
rollback, so steps are ordered by the sequence number of their log entry (`seq`). A move is credited with the steps
committed after its decision, until the next move between steps. The work of steps differs too (longer responses, slower
judges), so these differences are recorded beside the seconds.

A hold period is a series of steps after each of which the policy was called and nothing moved. A move between steps
ends it; a loan does not. The record has the newest decision, and sums of the expected and the actual time of the steps.
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
from gcore.ledger.records.restart_reasons import newest_reason
from placement.assign import role_changes, split_of
from placement.policies.base import Decision, SwitchCosts
from placement.slots import Snapshot, Split, count_noun

MOVE_PRIOR_S, WORLD_PRIOR_S = 10.0, 60.0
"""Assumed seconds of a change until one was measured: engines that change their pool; a train world of another size."""

STEP_IS_OVER = "the step ended, and reassigned slots return"
BATCH_IS_WHOLE = "the batch is complete, and reassigned slots return during training"
BETWEEN = (MoveKind.SPLIT, MoveKind.WORLD, MoveKind.MEND)
WITHIN = (MoveKind.LEND, MoveKind.RETURN)

CHANGING = (MoveKind.SPLIT, *WITHIN)
"""Kinds of moves in which engines change their pool and the train world stays."""


@dataclass(frozen=True, slots=True)
class MoveProposal:
    """A move that the controller with the placement lead wants to make, and the resulting plan. Plan None: the move
    needs a rollback that forms a new train world, or it is only reported (`placement.dry_run`)."""

    move: Move
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class MoveReport:
    """An update of the job's record of moves. `since`: store revision of the record that `moves` is based on; 0: there
    is none yet."""

    moves: Moves
    since: int


def split_part(split: Split) -> SplitPart:
    """Convert a split to its stored form."""
    return SplitPart(mode=split.mode, rollout=split.rollout, reward=split.reward, train=split.train)


def split_from(part: SplitPart) -> Split:
    """Convert the stored form of a split to a `Split`."""
    return Split(part.mode, part.rollout, part.reward, part.train)


def base_split(plan: Plan, snapshot: Snapshot | None = None) -> Split:
    """Return the split that the step began with, before slots were lent. `snapshot`: the present nodes; if they have
    fewer slots than that split, return the present split instead."""
    now = split_of(plan, snapshot)
    if plan.lent_from is None:
        return now
    base = split_from(plan.lent_from)
    slots = None if snapshot is None else snapshot.slots
    return base if slots is None or base.rollout + base.reward + base.train <= slots else now


def changed_slots(before: Plan, after: Plan) -> tuple[tuple[str, ...], int]:
    """Describe the slots whose pools differ between two plans (`role_changes`): the first few, and the number of the
    others."""
    lines = role_changes(before, after)
    return tuple(lines[:MOST_SLOTS_TOLD]), max(len(lines) - MOST_SLOTS_TOLD, 0)


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """When and by whom a decision is made: step and log entry number of head, the controller, its time in seconds.
    `dry`: decisions are reported but not carried out."""

    step: int
    seq: int
    by: str
    time: float
    dry: bool = False


def propose_move(
    decision: Decision, plan: Plan, after: Plan | None, base: Split, at: DecisionContext, back_for: str = STEP_IS_OVER
) -> MoveProposal | None:
    """Turn a policy's decision into a move of `plan`. Return None if nothing changes.

    `after`: the plan of the decided split; None if it needs a train world of another size. `base`: the split before
    slots were lent. `back_for`: the reason to record if the decision only returns lent slots.
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
    """Return the record of the first plan as a move. `expected_s`: predicted seconds of a step; None: not predicted."""
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
    """Add a record of the change from plan `before` to `plan` if no policy requested it: nodes came or went, or a train
    world was lost. `formed_because`: why the plan's train world was formed; empty for the first."""
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
        reason=(is_formed and formed_because) or newest_reason(plan.reason),
        by=at.by,
        time=at.time,
    )
    return moves.plus(move)


def _roles(plan: Plan) -> dict[tuple[str, str, str], bool]:
    """Return for each engine whether it is awake, to compare plans regardless of the order of their engines."""
    return {place.key: not place.asleep for place in plan.engines}


def is_repeated(moves: Moves, move: Move) -> bool:
    """Whether `move` repeats the newest recorded move of a placement that only reports what it would do."""
    newest = moves.newest
    return newest is not None and newest.state == "would" and (newest.kind, newest.after) == (move.kind, move.after)


def switch_costs(moves: Moves, start_s: float | None, told_s: float | None = None) -> SwitchCosts:
    """Estimate the costs of changes in seconds. `start_s`: duration of the newest start of a train world. `told_s`:
    duration of a sleep and a wake as the nodes report it. A restarted node has not measured one and reports a guess, so
    the smaller of that and the measured duration of the job's own moves is used."""
    took_s = engine_change_s(moves)
    held = MOVE_PRIOR_S if took_s is None else took_s
    worlds = [cost for cost in (_took(moves).get(MoveKind.WORLD), start_s) if cost is not None]
    return SwitchCosts(
        move_s=min((cost for cost in (told_s, took_s) if cost is not None), default=MOVE_PRIOR_S),
        world_s=max(*worlds, held) if worlds else WORLD_PRIOR_S,
    )


def engine_change_s(moves: Moves) -> float | None:
    """Return how many seconds it takes until engines have changed their pool: the longest among the newest measured
    moves of each kind in `CHANGING`; None if none was measured."""
    took = _took(moves)
    return max((took[kind] for kind in CHANGING if kind in took), default=None)


def _took(moves: Moves) -> dict[MoveKind, float]:
    """Return for each kind of move how many seconds the newest measured one took."""
    outcomes = [(move.kind, move.outcome) for move in moves.moves]
    return {kind: found.took_s for kind, found in outcomes if found is not None and found.took_s is not None}


MOST_AFTER = 5
"""Maximum number of steps after a move, and of steps before it, whose means are compared."""


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """Measurements of a committed step, which a rollback may have discarded since. `seq`: number of its log entry.
    `tokens`: mean per response. `question_s`: seconds of a judge engine per request. None: not measured."""

    step: int
    seq: int
    seconds: float
    tokens: float | None = None
    question_s: float | None = None


def add_outcomes(
    moves: Moves, steps: Sequence[CommittedStep], took: Mapping[int, float], head_seq: int, plan: Plan
) -> Moves:
    """Record what the steps after each move showed: its effect on the step time, and how long it took.

    `steps`: measured steps, oldest first. `took`: seconds from the decision until the move took effect, by plan
    generation. `head_seq`, `plan`: sequence number of head and the present plan; they show whether a train world that
    was wanted has been formed, or a step was committed without it. Return the same record if nothing changes.
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
    """Set the state of a move that waits for a new train world: `done` if the world was formed, `lapsed` if a step was
    committed without it. `others`: generations of the plans that other moves made."""
    if move.state != "wanted" or head_seq == move.seq:
        return move
    # A rollback advances head and forms the world, with as many ranks as can be placed; or a step was committed
    # instead.
    formed = plan.generation >= move.generation and move.generation not in others
    return move.model_copy(update={"state": "done" if formed else "lapsed"})


def _after(move: Move, steps: Sequence[CommittedStep], later: Move | None) -> list[CommittedStep]:
    """Return the steps that show the effect of a move. `later`: the next move between steps; steps after it are
    excluded."""
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
    """Return the steps before a move, with which those after it are compared. `earlier`: the previous move between
    steps; steps before it are excluded."""
    made = {one.step: one for one in steps if one.seq <= move.seq and (earlier is None or one.seq > earlier.seq)}
    if earlier is not None:
        made.pop(earlier.step + 1, None)
    since = max(move.step - MOST_AFTER + 1, 2)  # the first step includes loading
    return [made[step] for step in range(since, move.step + 1) if step in made]


def _measured(move: Move, took: float | None, after: Sequence[CommittedStep], before: Sequence[CommittedStep]) -> Move:
    """Return the move with its outcome from these steps. `took`: seconds until it took effect. A recorded outcome is
    only replaced by one over at least as many steps."""
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
    """Return the mean of `number` over the steps in which it was measured; None if it never was."""
    found = [one for one in map(number, steps) if one is not None]
    return round(fmean(found), 3) if found else None


OTHER_WORK = 0.1
"""Relative difference between the work of the steps after a move and before it, above which it is mentioned."""


def move_in_words(move: Move) -> str:
    """Describe a move and its reason in one sentence without a subject, e.g. `lent 2 slots from rollout to the judges,
    because ...`."""
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
    """Build the verb phrase for the state of a move. `done`: the verb as infinitive, past tense and participle. `rest`:
    the words after the verb."""
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
    """Describe the gain and the cost that were expected of a move; empty if nothing was."""
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
    """Describe the measured outcome of a move: how long it took, and the step times after and before it."""
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
    """Describe how the work of the steps after a move differed from that before; empty if it hardly did. Without this
    a reader would attribute the whole change of the step time to the move."""
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
    """Return the name of the pool that has more slots after a loan or return."""
    return "rollout" if after.rollout > before.rollout else "the judges"


def extend_stay(
    newest: HoldPeriod | None, moves: Moves, at: DecisionContext, reason: str, expected_s: float | None = None
) -> HoldPeriod:
    """Record a decision not to move: extend the hold period `newest`, or begin a new one if a move or a rollback came
    after it. `expected_s`: expected seconds of the next step."""
    expected = None if expected_s is None or not math.isfinite(expected_s) else round(expected_s, 3)
    more = {"step": at.step, "seq": at.seq, "reason": reason, "by": at.by, "time": at.time, "expected_s": expected}
    if newest is None or newest.step >= at.step or _is_over(newest, moves):
        return HoldPeriod.model_validate({"since": at.step, "began": at.time, **more})
    return HoldPeriod.model_validate(
        {"since": newest.since, "began": newest.began, "foretold": newest.foretold.model_dump(), **more}
    )


def add_taken(stay: HoldPeriod, took_s: float | None) -> HoldPeriod:
    """Add the actual time of the step after the newest decision to the hold period, to compare it with the expected
    time. `took_s`: its seconds; None: not known yet."""
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
    """Whether a move between steps ended the hold period."""
    return any(move.kind in BETWEEN and move.seq >= stay.seq for move in moves.moves)


def add_stay(moves: Moves, stay: HoldPeriod) -> Moves:
    """Add a hold period to the record of moves, or replace the one that began at the same time."""
    others = tuple(one for one in moves.stays if one.began != stay.began)
    return moves.model_copy(update={"stays": (*others, stay)[-NEWEST_STAYS:]})


def stay_in_words(stay: HoldPeriod) -> str:
    """Say why nothing moved in a hold period. `span_in_words` says after which steps."""
    newest = ", the last time" if stay.step > stay.since else ","
    return f"nothing moved{newest} because {stay.reason}" if stay.reason else "nothing moved"


def foretold_in_words(foretold: ForecastAccuracy) -> str:
    """Compare the actual with the expected seconds of the steps in a hold period in words; empty if nothing was
    expected."""
    if not foretold.steps:
        return ""
    took = f"took {foretold.took_s:.1f} s where {foretold.expected_s:.1f} s were expected"
    if foretold.steps == 1:
        return f"the step that followed {took}"
    off = foretold.off_s / foretold.took_s if foretold.took_s else 0.0
    return f"the {foretold.steps} steps that followed {took}, each off by {off:.0%} on average"


def span_in_words(stay: HoldPeriod) -> str:
    """Say after which steps nothing moved, e.g. `after steps 3 to 9`."""
    return f"after steps {stay.since} to {stay.step}" if stay.step > stay.since else f"after step {stay.step}"
