"""What came of moves: what the steps after each took, beside those before it. Pure: records in, records out.

The numbers of steps tell nothing of their order, for after a rollback they come again. So what was committed when is told by the sequence
number of its log entry: a move has part in what was committed after the head that it was decided at, until the next move between steps.

The work of steps differs too: responses become longer, judges slower. So what is known of that stands beside their seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from gcore.ledger.job import Plan
from gcore.ledger.placing import Move, MoveOutcome, Moves
from placement.moves import BETWEEN, WITHIN

MOST_AFTER = 5
"""Steps over which what came of a move is measured, at most; and before it, with which it is held."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that was committed, on head's chain or not. `seq`: its log entry's. `tokens`: of a response, on average; `question_s`: what a
    question took of a judge's engine. None: nobody measured it."""

    step: int
    seq: int
    seconds: float
    tokens: float | None = None
    question_s: float | None = None


def with_outcomes(
    moves: Moves, steps: Sequence[Committed], took: Mapping[int, float], head_seq: int, plan: Plan
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


def _after(move: Move, steps: Sequence[Committed], later: Move | None) -> list[Committed]:
    """The steps that tell what came of it. `later`: the next move between steps; what comes after that is no more of this one."""
    within, first = move.kind in WITHIN, move.step + 1
    made: dict[int, Committed] = {}
    for one in steps:
        if one.seq > move.seq and (within or later is None or one.seq <= later.seq):
            made.setdefault(one.step, one)
    paid = made.get(first)  # the step at whose beginning it was made
    after = [made[step] for step in range(first + 1, first + 1 + MOST_AFTER) if step in made]
    if paid is not None and (within or (not after and later is not None)):
        return [paid]  # the next move came before there was a step that paid for nothing
    return [] if within else after


def _before(move: Move, steps: Sequence[Committed], earlier: Move | None) -> list[Committed]:
    """Those with which it is held. `earlier`: the move between steps before it, whose own steps they are."""
    made = {one.step: one for one in steps if one.seq <= move.seq and (earlier is None or one.seq > earlier.seq)}
    if earlier is not None:
        made.pop(earlier.step + 1, None)
    since = max(move.step - MOST_AFTER + 1, 2)  # in the first step everything is loaded
    return [made[step] for step in range(since, move.step + 1) if step in made]


def _measured(move: Move, took: float | None, after: Sequence[Committed], before: Sequence[Committed]) -> Move:
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


def _mean(steps: Sequence[Committed], number: Callable[[Committed], float | None]) -> float | None:
    """Of those of which it is known."""
    found = [one for one in map(number, steps) if one is not None]
    return round(fmean(found), 3) if found else None
