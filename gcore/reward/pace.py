"""How quick a reward is, against how quick it was: one that slows down is found by what it takes, not by a limit. Pure.

What is noted is the seconds of a slow response, or those of a response of a quick batch. Usual is a moving average over many.
`SLOW_IN_A_ROW` that take `FACTOR` times as long, and longer than anybody would overlook, are a slowdown; the average stands
still meanwhile, so that it is told against the time before. One at less than a third of the factor ends it. Ends no reward: that
is what `reward.timeout_s` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FACTOR = 10.0
SLOW_IN_A_ROW = 3
LEAST_S = 0.05
"""Seconds a response below which none is slow, whatever it was before."""
SETTLED = 8
"""Measurements after which the average is worth comparing with."""
WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a pool of rewards, or of other processes, is at: responses that wait, those it has served so far, and a sentence."""

    waiting: int
    scored: int
    what: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one reward. `usual`, `newest`: seconds a response; `streak`: slow ones in a row; `slow`: whether it was told."""

    usual: float = 0.0
    newest: float = 0.0
    count: int = 0
    streak: int = 0
    slow: bool = False

    def note(self, seconds: float) -> Pace:
        """A response has taken `seconds`."""
        if self.count < SETTLED:
            average = (self.usual * self.count + seconds) / (self.count + 1)
            return replace(self, usual=average, newest=seconds, count=self.count + 1)
        if seconds >= max(FACTOR * self.usual, LEAST_S):
            streak = self.streak + 1
            return replace(self, newest=seconds, streak=streak, slow=self.slow or streak >= SLOW_IN_A_ROW)
        if self.slow and seconds >= FACTOR / 3 * self.usual:
            return replace(self, newest=seconds, streak=0)
        usual = (1 - WEIGHT) * self.usual + WEIGHT * seconds
        return replace(self, usual=usual, newest=seconds, count=self.count + 1, streak=0, slow=False)

    def news(self, before: Pace, name: str) -> str:
        """What is to be told since `before`, or nothing."""
        if self.slow and not before.slow:
            times = self.newest / max(self.usual, 1e-9)
            return f"reward {name!r} takes {self.newest:.2g} s a response, {times:.0f} times as long as before ({self.usual:.2g} s)"
        if before.slow and not self.slow:
            return f"reward {name!r} is as quick as before again, {self.newest:.2g} s a response"
        return ""
