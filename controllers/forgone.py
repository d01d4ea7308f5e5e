"""Loans that were not made, because a change is taken to cost more than they gain, while nobody has measured what one costs.

Until an engine of the job has changed over, that is a guess, and meant to be a high one: an engine that was put to sleep while
everything started took long. A guess that forbids every loan is never put right, for nothing is measured where nothing moves. So what
those loans would have gained is added up, of each step the best; once that is as much as the guess, the next is made all the same. Whoever
plans next begins to add up anew. Where changes really are so dear, one is lost, and no more than was given away before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gcore.ledger.placing import MoveKind, Moves
from placement.moves import Proposal

MEASURED_BY = (MoveKind.SPLIT, MoveKind.LEND, MoveKind.RETURN)
WORTH_KNOWING = "what a change costs is a guess, and by now waiting has cost as much"


def is_a_guess(moves: Moves) -> bool:
    """Whether no engine of the job has changed over yet."""
    if moves.total > len(moves.moves):
        return False  # moves so many that the first are forgotten
    return not any(move.state == "done" and move.kind in MEASURED_BY for move in moves.moves)


def told_or_took(told_s: float, took_s: float, moves: Moves) -> float:
    """What a change costs, where nodes tell `told_s`, which may be their guess still (a controller that was started again has seen none), and
    the job's own moves took `took_s`, if any did."""
    outcomes = (move.outcome for move in moves.moves if move.kind in MEASURED_BY)
    is_measured = any(outcome is not None and outcome.took_s is not None for outcome in outcomes)
    return min(told_s, took_s) if is_measured else told_s


@dataclass
class Forgone:
    """Of one job, on the controller that plans."""

    _gains: dict[int, float] = field(default_factory=dict)
    """By step."""

    def weighed(self, free: Proposal | None, step: int, guess_s: float) -> Proposal | None:
        """The loan that is made all the same. `free`: what would be lent within `step` if a change cost nothing; `guess_s`: what it is
        taken to cost."""
        gain = 0.0 if free is None else free.move.gain_s or 0.0
        self._gains[step] = max(self._gains.get(step, 0.0), gain)
        if free is None or sum(self._gains.values()) < guess_s:
            return None
        update = {"cost_s": round(guess_s, 3), "reason": f"{free.move.reason}; {WORTH_KNOWING}"}
        return Proposal(free.move.model_copy(update=update), free.plan)
