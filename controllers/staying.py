"""What whoever plans remembers of decisions that moved nothing, and when the store is told of it: at once where a stretch begins, with
whatever else is told of moves, and else every few seconds, for the record of all moves is written anew each time.

What a stretch is, and when it is over, says `placement.stays`; nothing is written here.
"""

from __future__ import annotations

from gcore.clock import Clock
from gcore.ledger.placing import Moves, Stay
from placement.moves import Deciding
from placement.stays import stayed, with_stay

TELL_S = 10.0


class Staying:
    """Of one job, on the controller that plans."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: Stay | None = None
        self._stored: Stay | None = None
        """As it stood in the store when it was looked at last, and since when it does."""
        self._since = 0.0

    def note(self, moves: Moves, at: Deciding, reason: str) -> None:
        """A decision moved nothing."""
        known = self._newest if self._newest is not None else next(iter(moves.stays[-1:]), None)
        self._newest = stayed(known, moves, at, reason)

    def forget(self) -> None:
        """Somebody else plans."""
        self._newest = None

    def told(self, moves: Moves, *, at_once: bool) -> Moves:
        """The record, with the stretch if it is time for it. `at_once`: it is written in any case."""
        stay = self._newest
        stored = next((one for one in moves.stays if stay is not None and one.began == stay.began), None)
        now = self._clock.monotonic()
        if stored != self._stored:
            self._stored, self._since = stored, now
        if stay is None or stay == stored:
            return moves
        is_time = at_once or stored is None or now >= self._since + TELL_S
        return with_stay(moves, stay) if is_time else moves
