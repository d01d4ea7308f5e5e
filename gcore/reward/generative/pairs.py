"""Pairwise judging: which responses of a group are held against each other, and what each is worth from the outcomes.

Every pair is asked in both orders, for judges prefer a place: what the order does then cancels out. The verdict of (first,
second) says how much better the first is: 1 the first, 0 the second, 0.5 equal. A pair's result is the mean of its orders
that have a verdict; a response is worth the mean of its pairs that have one. So the values of a group in which everything
was judged, and each has as many opponents, have the mean 0.5. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gcore.reward.generative.votes import mean

Pair = tuple[int, int]
Verdicts = Mapping[Pair, float]
"""(first, second) → how much better the first is, from 0 to 1. What could not be judged is not there."""


def pairs_of(n: int, opponents: int | None = None) -> tuple[Pair, ...]:
    """The pairs (i < j) of n responses that are held against each other, the same ones always.

    All of them; or each response against `opponents` others: those next to it in a ring. Where n and `opponents` are both
    odd, that cannot be for all, and one response has one opponent more.
    """
    if opponents is None or opponents >= n - 1:
        return tuple((i, j) for i in range(n) for j in range(i + 1, n))
    near = {_ordered(i, (i + distance) % n) for i in range(n) for distance in range(1, opponents // 2 + 1)}
    if opponents % 2 == 1:  # and the one on the other side of the ring
        near |= {_ordered(i, i + n // 2) for i in range(n // 2)}
        if n % 2 == 1:
            near.add(_ordered(n - 1, (n - 1 + n // 2) % n))
    return tuple(sorted(near))


def orders(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Both orders of each pair."""
    return tuple(order for i, j in pairs for order in ((i, j), (j, i)))


def values_of(n: int, pairs: Sequence[Pair], verdicts: Verdicts) -> tuple[float | None, ...]:
    """What each response is worth; None where none of its pairs has a verdict."""
    won: list[list[float]] = [[] for _ in range(n)]
    for i, j in pairs:
        result = result_of((i, j), verdicts)
        if result is not None:
            won[i].append(result)
            won[j].append(1.0 - result)
    return tuple(mean(results) if results else None for results in won)


def result_of(pair: Pair, verdicts: Verdicts) -> float | None:
    """How much better the pair's first is, over both orders; None if neither has a verdict."""
    i, j = pair
    told = [verdicts[i, j]] if (i, j) in verdicts else []
    told += [1.0 - verdicts[j, i]] if (j, i) in verdicts else []
    return mean(told) if told else None


def disagreed(pairs: Sequence[Pair], verdicts: Verdicts) -> float | None:
    """The share of pairs whose orders contradict each other, of those with both; None if there are none.

    They do if both prefer the first place, or both the second.
    """
    both = [(verdicts[i, j], verdicts[j, i]) for i, j in pairs if (i, j) in verdicts and (j, i) in verdicts]
    if not both:
        return None
    return sum(1 for one, other in both if (one > 0.5 and other > 0.5) or (one < 0.5 and other < 0.5)) / len(both)


def _ordered(i: int, j: int) -> Pair:
    return (i, j) if i < j else (j, i)
