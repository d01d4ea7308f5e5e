"""What the controller that plans remembers of decisions that moved nothing, and when it tells the store.

The record of all moves is written as a whole each time. So the store is told of a stretch when it begins, and along with whatever else is
told of moves, and otherwise every few seconds only. What a stretch is, and when it is over, `placement.stays` says; nothing is written
here.

It also keeps what was expected of each step of a stretch, until it is known what the step took (`StepHistory.took`).
"""

from __future__ import annotations

from collections.abc import Callable

from gcore.clock import Clock
from gcore.ledger.placing import Moves, Stay
from placement.moves import Deciding
from placement.stays import stayed, with_stay, with_taken

TELL_S = 10.0
Took = Callable[[int, int], float | None]
"""Seconds of that step, committed after that sequence number of head's; None: it is not known."""


class Staying:
    """Of one job, on the controller that plans."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: Stay | None = None
        self._stored: Stay | None = None
        """The newest stretch as the store had it at the last look."""
        self._since = 0.0
        """Since when the store has it so."""

    def note(self, moves: Moves, at: Deciding, reason: str, expected_s: float | None, took: Took) -> None:
        """A decision moved nothing. `expected_s`: what it expects of the next step."""
        known = self._newest or (moves.stays[-1] if moves.stays else None)
        if known is not None:
            known = _with_taken(known, took)
        self._newest = stayed(known, moves, at, reason, expected_s)

    def forget(self) -> None:
        """Somebody else plans."""
        self._newest = None

    def told(self, moves: Moves, took: Took, *, at_once: bool) -> Moves:
        """The record as it is to stand in the store: with the newest stretch, if it is time to tell it. `at_once`: the record is written in any
        case, so it is."""
        if self._newest is not None:
            self._newest = _with_taken(self._newest, took)
        stay = self._newest
        stored = next((one for one in moves.stays if stay is not None and one.began == stay.began), None)
        now = self._clock.monotonic()
        if stored != self._stored:
            self._stored, self._since = stored, now
        if stay is None or stay == stored:
            return moves
        is_time = at_once or stored is None or now >= self._since + TELL_S
        return with_stay(moves, stay) if is_time else moves


def _with_taken(stay: Stay, took: Took) -> Stay:
    return with_taken(stay, took(stay.step + 1, stay.seq))
