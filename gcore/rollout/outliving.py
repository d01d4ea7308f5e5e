"""How many tokens responses that are under way have still to come, from those of the same prompt that are finished and from having
outlived them. Pure.

Responses to a prompt are begun together, so those that are finished are the short ones: by them alone the others would be taken for
short too. Each that goes on at n tokens tells that it is longer than n, and both are weighed: lengths are log-normal about their
prompt's middle, the middles about the source's (a random effect; the source's `likeness` is the share that lies between prompts), and
where the prompt's own lies is inferred from the finished and from the growing ones at once (survival analysis: right-censored
lengths). What is to be expected beyond n is the mean of what such a length has above it, cut off at `longest`.

How lengths of a source are known, and what is expected of a prompt that is not begun: `gcore.rollout.lengths`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from gcore.rollout.lengths import BEYOND, Siblings, SourceLengths, weight_of

MIDDLES = tuple(0.6 * at for at in range(-4, 5))
"""Where a prompt's middle may lie, in standard deviations of what is known of it before its responses tell."""
LEAST_SPREAD = 0.05
"""Of logarithms: of lengths that were all the same the next may differ a little."""
LEAST_BETWEEN = 0.02
"""Share of the variance that lies between prompts, at least."""
HARDLY = 1e-12
"""A chance below which nothing is said by numbers any more."""


def left(
    source: SourceLengths, siblings: Siblings, finished: Sequence[int], growing: Sequence[int], longest: int
) -> float:
    """Tokens still to come of a prompt's responses: of `growing`, which have so many, beside those that are `finished`.

    `siblings`: what was known of the prompt before; `longest`: tokens that a response has at most.
    """
    if not growing:
        return 0.0
    if not source.logs:
        return float(sum(max(longest - so_far, 0) for so_far in growing))
    spread = max(source.spread, LEAST_SPREAD)
    between = max(source.likeness, LEAST_BETWEEN)
    own, known = spread * math.sqrt(1.0 - between), weight_of(siblings.count, between)
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
