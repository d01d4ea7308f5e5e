"""Loans that were not made because a change is taken to cost more than they would gain, though nobody has measured yet what a change costs.

Until an engine of the job has changed over, that cost is a guess, and meant to be a high one: it is worked out from how long engines took to
be put to sleep, which is long while everything starts. A guess that forbids every loan would never be put right, because nothing is
measured where nothing moves. So what these loans would have gained is added up, of each step the best one. Once the sum is as much as the
guess, the next loan is made all the same. A controller that plans from then on adds up anew. Where changes really are so dear, what one of
them costs is lost, and that is no more than what was given up before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gcore.ledger.placing import Moves
from placement.moves import CHANGING, Proposal, changing_took_s

WORTH_KNOWING = "what a change costs is a guess, and by now waiting has cost as much"


def is_a_guess(moves: Moves, took: Mapping[int, float]) -> bool:
    """Whether it was never measured what it takes that engines change over. `took`: what was measured by now, by the plan's generation,
    whether or not the record of moves has it yet."""
    if changing_took_s(moves) is not None:
        return False
    return not any(move.kind in CHANGING and move.state == "done" and move.generation in took for move in moves.moves)


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
