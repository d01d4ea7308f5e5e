"""How fast engines are, and what requests have still to come, for lending within a step: from a job's newest steps. Pure.

How far a request is nobody knows; how many of a step's responses are left is known, and how long those of the newest steps were. So what
the last one has still to come is what it is expected to be longer by than those that are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from placement.lending import doubling, left_s, of_each
from placement.measured import Measured

STEPS = 2
"""Newest steps from which lengths are."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests that an engine of each pool runs at once, at most."""

    rollout: int
    reward: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a pool's engines: seconds of a token alone, and how many requests make it twice that; tokens of one request; `rows`: requests
    that one runs at once, at most. `tail`: of a pool whose requests are all there when a step begins, by how many of them are left, what
    the last has still to come and what they have on average; none where they come one after another."""

    alone_s: float
    saturating: float
    tokens: float
    residual: float
    """Tokens that a request which runs has still to come, on average: long ones are met more often."""
    rows: int
    tail: tuple[tuple[float, float], ...] = ()

    def to_come(self, owed: float, begun: float) -> tuple[float, float, float]:
        """Tokens of a request, of those that run on average, and of the one that ends last."""
        if self.tail:
            longest, residual = self.tail[min(int(owed), len(self.tail) - 1)]
            return self.tokens, residual, longest
        each = of_each(owed, begun, self.tokens, self.residual)
        return each, each, each

    def left_s(self, owed: float, begun: float, engines: int) -> float:
        """Seconds until `engines` are done with what is owed, of which so many have begun; what does not run yet comes after what does."""
        return left_s(owed, engines, self.rows, *self.to_come(owed, begun), self.alone_s, self.saturating)

    def doubling(self, owed: float, begun: float, engines: int) -> float:
        """What `lent` takes as `saturating`."""
        return doubling(owed, engines, self.rows, *self.to_come(owed, begun), self.saturating)


def tail_of(steps: Sequence[Sequence[float]]) -> tuple[tuple[float, float], ...]:
    """By how many of a step's responses are left, what the last has still to come and what they have on average: the mean over steps,
    whose responses were all asked for at once."""
    sizes = [len(step) for step in steps if step]
    found = [(0.0, 0.0)] * (min(sizes, default=0) + 1)
    for step in (sorted(step, reverse=True) for step in steps if step):
        total = 0.0
        for left, length in enumerate(step[: len(found) - 1], start=1):
            total += length
            made = step[left] if left < len(step) else 0.0
            longest, mean = found[left]
            share = 1.0 / len(sizes)
            found[left] = (longest + share * (step[0] - made), mean + share * (total / left - made))
    return tuple(found)


def speed_of(history: Sequence[Measured], pool: str, rows: int, since: int) -> Speed | None:
    """What the newest steps tell, by the law that steps are forecast with; None: nothing. `since`: the step since which the pool has
    its pace (`placement.paces.Paces`)."""
    from placement.laws import law_of  # numpy: a daemon that no job lends in is started without it

    newest = history[-STEPS:]
    if pool == "rollout":
        lengths = [tokens for step in newest for tokens in step.lengths]
    else:
        lengths = [tokens / step.asked_per_response for step in newest for tokens in step.judged]
    is_measured = any(one.pool == pool for step in newest for one in step.speed)
    if not is_measured or not lengths or fmean(lengths) <= 0:
        return None
    law = law_of(history, pool, rows, since)
    mean = fmean(lengths)
    residual = fmean(tokens * tokens for tokens in lengths) / (2.0 * mean)
    tail = tail_of([step.lengths for step in newest]) if pool == "rollout" else ()
    return Speed(law.token_s, max(law.token_s / law.sequence_s, 1.0), mean, max(residual, mean / 2.0), rows, tail)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of both pools. `asked_each`: requests of the judges that a response comes to."""

    rollout: Speed
    reward: Speed
    asked_each: float = 1.0


def speeds_of(history: Sequence[Measured], rows: Rows, rollout_since: int, reward_since: int) -> Speeds | None:
    """Of both; None: of one nothing is known. The steps since which they have their paces are as for `speed_of`."""
    rollout = speed_of(history, "rollout", rows.rollout, rollout_since)
    reward = speed_of(history, "reward", rows.reward, reward_since)
    if rollout is None or reward is None:
        return None
    # Of a step that is not booked whole nobody knows how often its judges were asked.
    return Speeds(rollout, reward, fmean(step.asked_per_response for step in history[-STEPS:] if step.judged))
