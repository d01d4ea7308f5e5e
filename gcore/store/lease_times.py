"""The times of a lease, and the one inequality that ties them. Pure.

A renewal is sent `tick_s` after the last one was answered, is given up after `call_s` without an answer, and the next is sent
`retry_s` later. A lease must outlive one renewal that takes its whole time and one that is lost, and the process be held up
for `margin_s` besides:

    tick_s + 2 · call_s + retry_s + margin_s  <  ttl_s

Where it does not hold, one slow answer of the store costs a life: the peers take the shards over, and everything that was
made and not sealed is made again. Nothing unsafe follows from that, so this is checked at start and never again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gcore.errors import UsageError

TICKS_PER_TTL = 3
CALLS_PER_TTL = 5
MARGINS_PER_TTL = 10
LONGEST_RETRY_S = 0.5
"""Between a renewal that had no answer and the next."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """In seconds. `of` fills in what is not said."""

    ttl_s: int
    tick_s: float
    call_s: float
    margin_s: float

    @classmethod
    def of(
        cls, ttl_s: int, *, tick_s: float | None = None, call_s: float | None = None, margin_s: float | None = None
    ) -> LeaseTimes:
        """By default parts of the lease's life for which the inequality holds, whatever that is."""
        return cls(
            ttl_s,
            ttl_s / TICKS_PER_TTL if tick_s is None else tick_s,
            ttl_s / CALLS_PER_TTL if call_s is None else call_s,
            ttl_s / MARGINS_PER_TTL if margin_s is None else margin_s,
        )

    @property
    def retry_s(self) -> float:
        """From a renewal that had no answer to the next."""
        return min(LONGEST_RETRY_S, self.ttl_s / MARGINS_PER_TTL)

    @property
    def needed_s(self) -> float:
        """What a lease must outlive: the left side of the inequality."""
        return self.tick_s + 2 * self.call_s + self.retry_s + self.margin_s

    def check(self, where: str) -> LeaseTimes:
        """These times. Raises UsageError where the inequality does not hold; `where`: who was told them."""
        if self.needed_s < self.ttl_s:
            return self
        raise UsageError(
            f"a lease of lease_ttl_s = {self.ttl_s} s does not outlive lease_tick_s + 2 x lease_call_s + {self.retry_s:g} s "
            f"+ lease_margin_s = {self.tick_s:g} + 2 x {self.call_s:g} + {self.retry_s:g} + {self.margin_s:g} = "
            f"{self.needed_s:g} s, so one slow answer of the store would end it",
            where=where,
            fix="Raise lease_ttl_s, or lower the others; left out, they fit",
        )
