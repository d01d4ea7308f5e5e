"""Predicts the length of a response from the other responses to its prompt, its tokens so far, and the recent lengths of
its data source. Pure.

Lengths are modeled as logarithms, because their spread grows with their size. `likeness` is the intraclass correlation:
how similar the lengths of one prompt's responses are, from 0 to 1. It is estimated from the source's recent groups (and
shrunk to a usual value while these are few). The predicted distribution is the source's recent lengths, shifted towards
the lengths of the prompt's responses (the more, the more responses there are and the higher the correlation), and
narrowed, because the uncertainty is lower then. No distribution is assumed. A response that has n tokens will be
longer, so lengths below n are dropped. The expectation is the mean of the rest.

A prompt's responses are stored as their distance from the source's mean at that time instead of as tokens, so that they
stay useful while lengths grow during a run.

`tokens_left` predicts the remaining tokens of unfinished responses. The module is stateless (`controllers.flow.peer`
keeps the state).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

USUAL_LIKENESS, USUAL_COUNTS = 0.4, 8.0
"""Prior of `likeness` (the correlation within a prompt), and its weight as a number of groups."""

MOST_LIKENESS = 0.95
"""Maximum of the estimated `likeness`."""

MOST_LOGS = 64
"""Maximum number of lengths that represent a source's recent ones, because each prediction reads all of them."""

BEYOND = 1.3
"""Predicted ratio of final to current length for a response longer than all known ones."""


@dataclass(frozen=True)
class SourceLengths:
    """Recent response lengths of a data source. `logs`: their logarithms, sorted; of many, an evenly spaced selection.

    `likeness`: the correlation of lengths within a prompt.
    """

    logs: tuple[float, ...]
    likeness: float = USUAL_LIKENESS

    @classmethod
    def of(cls, groups: Iterable[Sequence[int]]) -> SourceLengths:
        """Build from groups; a group has the lengths in tokens of the responses to one prompt."""
        grouped = [[_log(length) for length in group] for group in groups if group]
        return cls(_thinned(sorted(log for group in grouped for log in group)), _likeness(grouped))

    @cached_property
    def mean(self) -> float:
        """Mean of the logarithms; 0 without lengths."""
        return math.fsum(self.logs) / len(self.logs) if self.logs else 0.0

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithms; 0 without lengths."""
        off = math.fsum((log - self.mean) ** 2 for log in self.logs)
        return math.sqrt(off / len(self.logs)) if self.logs else 0.0


@dataclass(frozen=True, slots=True)
class SiblingLengths:
    """Earlier response lengths of one prompt: their number, and their mean logarithm minus the data source's."""

    count: int = 0
    above: float = 0.0

    @classmethod
    def of(cls, source: SourceLengths, lengths: Sequence[int]) -> SiblingLengths:
        """Build from the lengths in tokens of a prompt's responses, relative to the source's current mean."""
        if not lengths or not source.logs:
            return NONE
        return cls(len(lengths), math.fsum(map(_log, lengths)) / len(lengths) - source.mean)

    def joined(self, others: SiblingLengths) -> SiblingLengths:
        """Combine with other responses to the same prompt."""
        count = self.count + others.count
        if not count:
            return NONE
        return SiblingLengths(count, (self.count * self.above + others.count * others.above) / count)


NONE = SiblingLengths()
"""A prompt without known responses."""


def expected_length(source: SourceLengths, siblings: SiblingLengths, so_far: int, longest: int) -> float:
    """Predict the final length in tokens of a response that has `so_far` tokens, at most `longest`.

    `siblings`: earlier responses to the same prompt.
    """
    if not source.logs:
        return float(longest)
    weight = prompt_weight(siblings.count, source.likeness)
    middle = source.mean + weight * siblings.above
    narrow = math.sqrt(1.0 - source.likeness * weight)
    # Index of the first of the source's lengths that exceeds `so_far` after shifting and narrowing.
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
    """Select at most `MOST_LOGS` of the sorted values, evenly spaced: the middles of parts of equal size."""
    if len(logs) <= MOST_LOGS:
        return tuple(logs)
    return tuple(logs[(2 * part + 1) * len(logs) // (2 * MOST_LOGS)] for part in range(MOST_LOGS))


def prompt_weight(count: int, likeness: float) -> float:
    """Weight from 0 to 1 of the mean of a prompt's `count` responses; the rest is the weight of the source's mean."""
    return count * likeness / (1.0 + (count - 1) * likeness) if count else 0.0


def _likeness(groups: Sequence[Sequence[float]]) -> float:
    """Estimate the intraclass correlation by one-way analysis of variance; few groups are shrunk to `USUAL_LIKENESS`.

    `groups`: logarithms of lengths, by prompt.
    """
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
"""Grid for a prompt's mean logarithm, in standard deviations of its prior; `tokens_left` integrates over it."""

LEAST_SPREAD = 0.05
"""Minimum standard deviation of logarithms, because lengths that were all equal so far may differ next time."""

LEAST_BETWEEN = 0.02
"""Minimum share of the variance that lies between prompts (`likeness`)."""

HARDLY = 1e-12
"""Lower bound of probabilities, for numerical stability."""


def tokens_left(
    source: SourceLengths, siblings: SiblingLengths, finished: Sequence[int], growing: Sequence[int], longest: int
) -> float:
    """Predict the sum of the remaining tokens of a prompt's unfinished responses (`growing`: their tokens so far).

    `finished`: lengths of the finished ones. `siblings`: earlier responses to the prompt; `longest`: maximum tokens per
    response.

    Responses to a prompt start together, so the finished ones are the short ones, and using them alone would
    underestimate the others. An unfinished response at n tokens shows that its length exceeds n. Both are used: lengths
    are log-normal around their prompt's mean, and means around the source's (a random effect; `likeness` is the share
    of variance between prompts). The prompt's mean is inferred from finished and unfinished responses together
    (survival analysis with right-censored lengths). The expected rest beyond n is the mean excess over n, truncated at
    `longest`.
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
    """Posterior probability of each grid point for the prompt's mean logarithm: normal prior times likelihood.

    `ended`: logarithms of finished lengths. `outlived`: number of unfinished responses by tokens so far. `own`:
    standard deviation within a prompt.
    """
    logs = []
    for at, middle in zip(MIDDLES, middles, strict=True):
        likelihood = -at * at / 2.0 - math.fsum(((log - middle) / own) ** 2 for log in ended) / 2.0
        for so_far, count in outlived.items():
            if so_far > 0:
                likelihood += count * math.log(max(_above((math.log(so_far) - middle) / own), HARDLY))
        logs.append(likelihood)
    most = max(logs)
    shares = [math.exp(log - most) for log in logs]
    total = math.fsum(shares)
    return [share / total for share in shares]


def _beyond(middle: float, own: float, so_far: int, longest: int) -> float:
    """Mean of the remaining tokens of a response that has `so_far` tokens, truncated at `longest`.

    The length is log-normal with mean `middle` and standard deviation `own` of the logarithm.
    """
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
    """Probability that a standard normal variable exceeds `deviations`."""
    return 0.5 * math.erfc(deviations / math.sqrt(2.0))
