"""Pairs: every response is compared with enough others, position bias cancels, and unreadable comparisons count for neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.reward.judges.judge import Pair, both_orders, choose_pairs, disagreement, pair_result, pair_values

SIZES = st.integers(0, 24)
SOME = st.integers(1, 26)


def others(n: int, pairs: tuple[Pair, ...]) -> list[int]:
    return [sum(1 for pair in pairs if i in pair) for i in range(n)]


@given(SIZES)
def test_all_are_held_against_all(n: int) -> None:
    assert others(n, choose_pairs(n)) == [max(0, n - 1)] * n
    assert len(set(choose_pairs(n))) == n * (n - 1) // 2


@given(SIZES, SOME)
def test_each_has_the_opponents_that_were_asked_for_and_one_has_one_more_where_it_cannot_be_else(
    n: int, opponents: int
) -> None:
    pairs = choose_pairs(n, opponents)
    wanted = min(opponents, max(0, n - 1))
    odd = n % 2 == 1 and wanted % 2 == 1
    assert sorted(others(n, pairs)) == sorted([wanted] * (n - odd) + [wanted + 1] * odd)
    assert len(set(pairs)) == len(pairs)
    assert all(0 <= i < j < n for i, j in pairs)
    assert pairs == choose_pairs(n, opponents)


def test_a_ring_is_those_next_to_each_other() -> None:
    assert choose_pairs(5, 2) == ((0, 1), (0, 4), (1, 2), (2, 3), (3, 4))
    assert choose_pairs(4, 1) == ((0, 2), (1, 3))
    assert choose_pairs(3, 1) == ((0, 1), (0, 2))


@given(SIZES, SOME)
def test_each_pair_is_asked_in_both_orders(n: int, opponents: int) -> None:
    pairs = choose_pairs(n, opponents)
    assert set(both_orders(pairs)) == {*pairs, *((j, i) for i, j in pairs)}
    assert len(both_orders(pairs)) == 2 * len(pairs)


@given(st.integers(2, 12), st.floats(0, 1))
def test_a_judge_that_only_looks_at_the_place_says_that_all_are_equal(n: int, first: float) -> None:
    pairs = choose_pairs(n)
    values = pair_values(n, pairs, dict.fromkeys(both_orders(pairs), first))
    assert values == pytest.approx([0.5] * n)
    assert disagreement(pairs, dict.fromkeys(both_orders(pairs), first)) == (0.0 if first == 0.5 else 1.0)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=10))
def test_a_judge_that_knows_gives_the_better_the_larger_share(quality: list[int]) -> None:
    n = len(quality)
    pairs = choose_pairs(n)
    verdicts = {
        (i, j): 0.5 + 0.5 * ((quality[i] > quality[j]) - (quality[i] < quality[j])) for i, j in both_orders(pairs)
    }
    values = pair_values(n, pairs, verdicts)
    assert disagreement(pairs, verdicts) == 0.0
    for i in range(n):
        for j in range(n):
            assert values[i] is not None
            assert values[j] is not None
            assert (quality[i] > quality[j]) == (values[i] > values[j] + 1e-9)


@st.composite
def judged(draw: st.DrawFn) -> tuple[int, tuple[Pair, ...], dict[Pair, float]]:
    n = draw(st.integers(0, 8))
    pairs = choose_pairs(n, draw(st.none() | st.integers(1, 8)))
    told = {order: draw(st.none() | st.floats(0, 1)) for order in both_orders(pairs)}
    return n, pairs, {order: value for order, value in told.items() if value is not None}


@given(judged())
def test_values_are_from_0_to_1_and_there_is_one_wherever_a_pair_was_judged(
    given: tuple[int, tuple[Pair, ...], dict[Pair, float]],
) -> None:
    n, pairs, verdicts = given
    values = pair_values(n, pairs, verdicts)
    for i, value in enumerate(values):
        assert (value is None) == all(i not in order for order in verdicts)
        assert value is None or 0.0 <= value <= 1.0
    share = disagreement(pairs, verdicts)
    assert share is None or 0.0 <= share <= 1.0


@given(judged())
def test_turning_every_pair_around_changes_nothing_but_names(
    given: tuple[int, tuple[Pair, ...], dict[Pair, float]],
) -> None:
    n, pairs, verdicts = given
    turned = {(j, i): 1.0 - value for (i, j), value in verdicts.items()}
    for before, after in zip(pair_values(n, pairs, verdicts), pair_values(n, pairs, turned), strict=True):
        assert after == (None if before is None else pytest.approx(before))


def test_a_pair_with_one_order_counts_by_that() -> None:
    assert pair_result((0, 1), {(0, 1): 0.8, (1, 0): 0.4}) == pytest.approx(0.7)
    assert pair_result((0, 1), {(0, 1): 0.8}) == 0.8
    assert pair_result((0, 1), {(1, 0): 0.25}) == 0.75
    assert pair_result((0, 1), {}) is None
    assert pair_values(3, choose_pairs(3), {(0, 1): 1.0}) == (1.0, 0.0, None)


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        pytest.param(1.0, 1.0, 1.0, id="both the first place"),
        pytest.param(0.0, 0.2, 1.0, id="both the second"),
        pytest.param(1.0, 0.0, 0.0, id="agreed"),
        pytest.param(0.5, 1.0, 0.0, id="equal is no contradiction"),
    ],
)
def test_orders_contradict_each_other_if_both_prefer_one_place(one: float, other: float, share: float) -> None:
    assert disagreement([(0, 1)], {(0, 1): one, (1, 0): other}) == share


def test_without_a_pair_with_both_orders_nothing_is_said() -> None:
    assert disagreement([(0, 1)], {(0, 1): 1.0}) is None
    assert disagreement([], {}) is None
