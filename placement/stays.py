"""Stretches of steps after which a policy was asked and nothing moved: what is kept of them, and in words. Pure.

A stretch goes on until something moves between two steps; what is lent within a step does not end it. Of its decisions the newest is kept,
with its reason.
"""

from __future__ import annotations

from gcore.ledger.placing import NEWEST_STAYS, Moves, Stay
from placement.moves import BETWEEN, Deciding


def stayed(newest: Stay | None, moves: Moves, at: Deciding, reason: str) -> Stay:
    """`newest` with this decision, if that stretch goes on; else a new one that begins with it."""
    more = {"step": at.step, "seq": at.seq, "reason": reason, "by": at.by, "time": at.time}
    if newest is None or newest.step >= at.step or _is_over(newest, moves):
        return Stay.model_validate({"since": at.step, "began": at.time, **more})
    return Stay.model_validate({"since": newest.since, "began": newest.began, **more})


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


def span_in_words(stay: Stay) -> str:
    """After which steps nothing moved."""
    return f"after steps {stay.since} to {stay.step}" if stay.step > stay.since else f"after step {stay.step}"
