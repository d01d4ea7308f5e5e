"""How long a response is expected to become: from the other responses to its prompt, the tokens that it has, and how long
its source's responses have been lately. Pure.

Lengths are looked at as logarithms, for their spread grows with their size. What a response has in common with the others of its
prompt is the source's `likeness`, the correlation within a prompt, estimated from the source's recent groups (and held to a
usual one while those are few). So the lengths to be expected are the source's own recent ones, moved towards those of the
prompt's responses, the further the more of these there are and the more alike they are, and drawn together, for less is unknown
then. Nothing is assumed of their form. A response that has n tokens will have more: of these lengths those below n are left
out. The expectation is the mean of what remains.

A prompt's responses are remembered as their distance from the source's mean at that time, not as tokens, so that they stay of
use while lengths grow over a run.

What responses under way have still to come is `gcore.rollout.length_prediction`'s. Knows no prompts, and remembers nothing
(`controllers.flow.peer` does).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

USUAL_LIKENESS, USUAL_COUNTS = 0.4, 8.0
"""The correlation within a prompt of a source of which nothing is known, and as how many groups that counts."""

MOST_LIKENESS = 0.95
"""However alike a few groups were."""

MOST_LOGS = 64
"""Lengths that stand for a source's recent ones: an expectation looks at each, and there are many expectations."""

BEYOND = 1.3
"""By how much longer than it is a response is expected to become that is longer than all that were known."""


@dataclass(frozen=True)
class SourceLengths:
    """A source's recent lengths. `logs`: their logarithms, in order; of many, evenly chosen ones."""

    logs: tuple[float, ...]
    likeness: float = USUAL_LIKENESS

    @classmethod
    def of(cls, groups: Iterable[Sequence[int]]) -> SourceLengths:
        """Of groups of responses, each to one prompt, in tokens."""
        grouped = [[_log(length) for length in group] for group in groups if group]
        return cls(_thinned(sorted(log for group in grouped for log in group)), _likeness(grouped))

    @cached_property
    def mean(self) -> float:
        """Of the logarithms."""
        return math.fsum(self.logs) / len(self.logs) if self.logs else 0.0

    @cached_property
    def spread(self) -> float:
        """Their standard deviation."""
        off = math.fsum((log - self.mean) ** 2 for log in self.logs)
        return math.sqrt(off / len(self.logs)) if self.logs else 0.0


@dataclass(frozen=True, slots=True)
class SiblingLengths:
    """Responses to one prompt: how many, and by how much the mean of their logarithms was above their source's."""

    count: int = 0
    above: float = 0.0

    @classmethod
    def of(cls, source: SourceLengths, lengths: Sequence[int]) -> SiblingLengths:
        """These, beside what is known of their source now."""
        if not lengths or not source.logs:
            return NONE
        return cls(len(lengths), math.fsum(map(_log, lengths)) / len(lengths) - source.mean)

    def joined(self, others: SiblingLengths) -> SiblingLengths:
        """Both."""
        count = self.count + others.count
        if not count:
            return NONE
        return SiblingLengths(count, (self.count * self.above + others.count * others.above) / count)


NONE = SiblingLengths()


def expected_length(source: SourceLengths, siblings: SiblingLengths, so_far: int, longest: int) -> float:
    """Tokens that a response which has `so_far` is expected to end with: never fewer than those, nor more than `longest`."""
    if not source.logs:
        return float(longest)
    weight = prompt_weight(siblings.count, source.likeness)
    middle = source.mean + weight * siblings.above
    narrow = math.sqrt(1.0 - source.likeness * weight)
    # Where the lengths that are above `so_far` begin among the source's, before these are moved and drawn together.
    first = 0
    if so_far > 0:
        first = bisect_right(source.logs, source.mean + (math.log(so_far) - middle) / narrow)
    top = math.log(longest)
    rest = [math.exp(min(middle + narrow * (log - source.mean), top)) for log in source.logs[first:]]
    total = math.fsum(rest) / len(rest) if rest else so_far * BEYOND
    return min(max(total, float(so_far)), float(max(longest, so_far)))


def _log(length: int) -> float:
    return math.log(max(length, 1))


def _thinned(logs: Sequence[float]) -> tuple[float, ...]:
    """As many as are looked at, from the middle of as many equal parts."""
    if len(logs) <= MOST_LOGS:
        return tuple(logs)
    return tuple(logs[(2 * part + 1) * len(logs) // (2 * MOST_LOGS)] for part in range(MOST_LOGS))


def prompt_weight(count: int, likeness: float) -> float:
    """How far the mean of `count` responses tells where their prompt's lengths lie, 0 to 1."""
    return count * likeness / (1.0 + (count - 1) * likeness) if count else 0.0


def _likeness(groups: Sequence[Sequence[float]]) -> float:
    """The correlation within groups, by the analysis of variance; drawn to the usual one while there are few groups."""
    total = sum(map(len, groups))
    degrees = total - len(groups)
    if len(groups) < 2 or not degrees:
        return USUAL_LIKENESS
    means = [math.fsum(group) / len(group) for group in groups]
    mean = math.fsum(map(math.fsum, groups)) / total
    between = math.fsum(len(group) * (own - mean) ** 2 for group, own in zip(groups, means, strict=True)) / (
        len(groups) - 1
    )
    pairs = zip(groups, means, strict=True)
    within = math.fsum((log - own) ** 2 for group, own in pairs for log in group) / degrees
    size = (total - sum(len(group) ** 2 for group in groups) / total) / (len(groups) - 1)
    spread = between + (size - 1.0) * within
    if spread <= 0.0:
        return USUAL_LIKENESS
    found = min(max((between - within) / spread, 0.0), MOST_LIKENESS)
    return (found * len(groups) + USUAL_LIKENESS * USUAL_COUNTS) / (len(groups) + USUAL_COUNTS)


MIDDLES = tuple(0.6 * at for at in range(-4, 5))
"""Where a prompt's middle may lie, in standard deviations of what is known of it before its responses tell."""

LEAST_SPREAD = 0.05
"""Of logarithms: of lengths that were all the same the next may differ a little."""

LEAST_BETWEEN = 0.02
"""Share of the variance that lies between prompts, at least."""

HARDLY = 1e-12
"""A chance below which nothing is said by numbers any more."""


def tokens_left(
    source: SourceLengths, siblings: SiblingLengths, finished: Sequence[int], growing: Sequence[int], longest: int
) -> float:
    """Tokens still to come of a prompt's responses: of `growing`, which have so many, beside those that are `finished`.

    `siblings`: what was known of the prompt before; `longest`: tokens that a response has at most.

    Responses to a prompt are begun together, so those that are finished are the short ones: by them alone the others
    would be taken for short too. Each that goes on at n tokens tells that it is longer than n, and both are weighed:
    lengths are log-normal about their prompt's middle, the middles about the source's (a random effect; the source's
    `likeness` is the share that lies between prompts), and where the prompt's own lies is inferred from the finished
    and from the growing ones at once (survival analysis: right-censored lengths). What is to be expected beyond n is
    the mean of what such a length has above it, cut off at `longest`.
    """
    if not growing:
        return 0.0
    if not source.logs:
        return float(sum(max(longest - so_far, 0) for so_far in growing))
    spread = max(source.spread, LEAST_SPREAD)
    between = max(source.likeness, LEAST_BETWEEN)
    own, known = spread * math.sqrt(1.0 - between), prompt_weight(siblings.count, between)
    middle, unsure = source.mean + known * siblings.above, spread * math.sqrt(between * (1.0 - known))
    counts = Counter(min(so_far, longest) for so_far in growing)
    ended = [math.log(max(length, 1)) for length in finished if length < longest]
    outlived = counts + Counter({longest: len(finished) - len(ended)})
    middles = [middle + unsure * at for at in MIDDLES]
    weights = _weights(middles, ended, outlived, own)
    return math.fsum(
        count * share * _beyond(at, own, so_far, longest)
        for at, share in zip(middles, weights, strict=True)
        for so_far, count in counts.items()
    )


def _weights(middles: Sequence[float], ended: Sequence[float], outlived: Counter[int], own: float) -> list[float]:
    """How likely each middle is: before anything is told as of the normal distribution, then by what is."""
    logs = []
    for at, middle in zip(MIDDLES, middles, strict=True):
        told = -at * at / 2.0 - math.fsum(((log - middle) / own) ** 2 for log in ended) / 2.0
        for so_far, count in outlived.items():
            if so_far > 0:
                told += count * math.log(max(_above((math.log(so_far) - middle) / own), HARDLY))
        logs.append(told)
    most = max(logs)
    shares = [math.exp(log - most) for log in logs]
    total = math.fsum(shares)
    return [share / total for share in shares]


def _beyond(middle: float, own: float, so_far: int, longest: int) -> float:
    """The mean of what a length above `so_far` has beyond it, with nothing above `longest`."""
    if so_far >= longest:
        return 0.0
    low = (math.log(so_far) - middle) / own if so_far > 0 else -math.inf
    high = (math.log(longest) - middle) / own
    going_on = _above(low)
    if going_on < HARDLY:
        return min(so_far * (BEYOND - 1.0), float(longest - so_far))
    mean = math.exp(min(middle + own * own / 2.0, 700.0)) * (_above(low - own) - _above(high - own))
    found = (mean + longest * _above(high) - so_far * going_on) / going_on
    return min(max(found, 0.0), float(longest - so_far))


def _above(deviations: float) -> float:
    """The chance that a normal deviate is above."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))
