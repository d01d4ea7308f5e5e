"""Stretches of steps after which a policy was asked and nothing moved: what is kept of them, and in words. Pure.

A stretch goes on until something moves between two steps; what is lent within a step does not end it. Of its decisions the newest is kept,
with its reason. What was expected of its steps is compared with what they took, each once (`with_taken`).
"""

from __future__ import annotations

import math

from gcore.ledger.placing import NEWEST_STAYS, Foretold, Moves, Stay
from placement.moves import BETWEEN, Deciding


def stayed(newest: Stay | None, moves: Moves, at: Deciding, reason: str, expected_s: float | None = None) -> Stay:
    """`newest` with this decision, if that stretch goes on; else a new one that begins with it. `expected_s`: of the next step."""
    expected = None if expected_s is None or not math.isfinite(expected_s) else round(expected_s, 3)
    more = {"step": at.step, "seq": at.seq, "reason": reason, "by": at.by, "time": at.time, "expected_s": expected}
    if newest is None or newest.step >= at.step or _is_over(newest, moves):
        return Stay.model_validate({"since": at.step, "began": at.time, **more})
    return Stay.model_validate(
        {"since": newest.since, "began": newest.began, "foretold": newest.foretold.model_dump(), **more}
    )


def with_taken(stay: Stay, took_s: float | None) -> Stay:
    """Beside what the newest decision expected of the step after it, what that took. `took_s` None: nobody knows yet."""
    before, step = stay.foretold, stay.step + 1
    if took_s is None or stay.expected_s is None or before.newest >= step:
        return stay
    foretold = Foretold(
        steps=before.steps + 1,
        newest=step,
        expected_s=round(before.expected_s + stay.expected_s, 3),
        took_s=round(before.took_s + took_s, 3),
        off_s=round(before.off_s + abs(took_s - stay.expected_s), 3),
    )
    return stay.model_copy(update={"foretold": foretold})


def _is_over(stay: Stay, moves: Moves) -> bool:
    return any(move.kind in BETWEEN and move.seq >= stay.seq for move in moves.moves)


def with_stay(moves: Moves, stay: Stay) -> Moves:
    """The record with what is known of it by now."""
    others = tuple(one for one in moves.stays if one.began != stay.began)
    return moves.model_copy(update={"stays": (*others, stay)[-NEWEST_STAYS:]})


def stay_in_words(stay: Stay) -> str:
    """Why nothing moved, without when that was (`span_in_words`)."""
    newest = ", the last time" if stay.step > stay.since else ","
    return f"nothing moved{newest} because {stay.reason}" if stay.reason else "nothing moved"


def foretold_in_words(foretold: Foretold) -> str:
    """What the steps after the decisions took, beside what was expected of them; empty where nothing was."""
    if not foretold.steps:
        return ""
    took = f"took {foretold.took_s:.1f} s where {foretold.expected_s:.1f} s were expected"
    if foretold.steps == 1:
        return f"the step that followed {took}"
    off = foretold.off_s / foretold.took_s if foretold.took_s else 0.0
    return f"the {foretold.steps} steps that followed {took}, each off by {off:.0%} on average"


def span_in_words(stay: Stay) -> str:
    """After which steps nothing moved."""
    return f"after steps {stay.since} to {stay.step}" if stay.step > stay.since else f"after step {stay.step}"
