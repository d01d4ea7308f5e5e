"""How often something may be done: a token bucket. Pure; the moments are the caller's, and so is who waits for whom.

It holds what may be done at once. It fills at the rate, up to `burst_of` it, and each deed takes one out; what lacks is waited
for. When the rate changes, the time since the last look counts at the smaller of the two, so that over any time no more is
done than the rates allow and one burst.
"""

from __future__ import annotations

from dataclasses import dataclass

BURST_S = 0.1
"""What may be done at once is what the rate allows in so long: timers are late, and what they are late is not to be lost."""
_WHOLE = 1.0 - 1e-9
"""What a deed takes, but for rounding."""


def burst_of(rate: float) -> float:
    """The most that a bucket of this rate, in deeds a second, holds."""
    return max(1.0, rate * BURST_S)


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` deeds might be done at moment `at`; it has filled at `rate`, in deeds a second, until then."""

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> Bucket:
        """One that begins now."""
        return cls(rate, burst_of(rate), now)

    def filled(self, rate: float, now: float) -> Bucket:
        """As it is now, and of this rate from now on."""
        gained = max(0.0, now - self.at) * min(rate, self.rate)
        return Bucket(rate, min(burst_of(rate), self.level + gained), max(now, self.at))

    @property
    def wait_s(self) -> float:
        """Seconds until the next deed may be done, if the rate stays."""
        return 0.0 if self.level >= _WHOLE else (1.0 - self.level) / self.rate

    def taken(self) -> Bucket:
        """After a deed. Raises ValueError if it must wait."""
        if self.wait_s > 0:
            raise ValueError(f"nothing may be done for {self.wait_s:g} s")
        return Bucket(self.rate, max(0.0, self.level - 1.0), self.at)
