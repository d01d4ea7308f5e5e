"""pass@k against an enumeration of every choice in exact integers, and properties of every estimate."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.evaluation import mean_correct, mean_pass_at_k, pass_at_k


@st.composite
def cases(draw: st.DrawFn, most: int) -> tuple[int, int, int]:
    """n, c and k."""
    n = draw(st.integers(1, most))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(cases(8))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_correct_response(case: tuple[int, int, int]) -> None:
    n, c, k = case
    choices = list(itertools.combinations(range(n), k))
    right = sum(any(response < c for response in choice) for choice in choices)
    assert pass_at_k(n, c, k) == pytest.approx(right / len(choices), rel=1e-14, abs=0)


@given(cases(10_000))
def test_pass_at_k_keeps_its_digits_for_thousands_of_responses(case: tuple[int, int, int]) -> None:
    n, c, k = case
    every = math.comb(n, k)
    exact = Fraction(every - math.comb(n - c, k), every)
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-11, abs=0)


@given(cases(60))
def test_more_tries_and_more_correct_responses_never_lower_it(case: tuple[int, int, int]) -> None:
    n, c, k = case
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    if k < n:
        assert pass_at_k(n, c, k + 1) >= value * (1 - 1e-14)
    if c < n:
        assert pass_at_k(n, c + 1, k) >= value * (1 - 1e-14)


@given(cases(1000))
def test_trivial_estimates_are_exact(case: tuple[int, int, int]) -> None:
    n, c, k = case
    assert pass_at_k(n, c, 1) == c / n
    assert pass_at_k(n, 0, k) == 0.0
    assert pass_at_k(n, n, k) == 1.0
    assert pass_at_k(n, c, n) == float(c > 0)


def test_it_is_unbiased() -> None:
    """Over all outcomes of n tries that are right with chance p, its mean is 1 - (1 - p)^k; the naive one's is less."""
    n, k, p = 6, 3, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance))
    naive = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance))
    assert mean == pytest.approx(1 - (1 - p) ** k, rel=1e-12)
    assert naive < mean - 0.02


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_undefined_estimates_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, c, k)


@given(st.integers(1, 12), st.data())
def test_means_are_over_prompts(n: int, data: st.DataObject) -> None:
    corrects = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=20))
    k = data.draw(st.integers(1, n))
    by_correct = {c: corrects.count(c) for c in corrects}
    assert mean_pass_at_k(n, by_correct, k) == pytest.approx(sum(pass_at_k(n, c, k) for c in corrects) / len(corrects))
    assert mean_correct(n, by_correct) == pytest.approx(mean_pass_at_k(n, by_correct, 1))


def test_a_mean_over_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        mean_pass_at_k(2, {}, 1)
    with pytest.raises(ValueError, match="no responses"):
        mean_correct(2, {})


@pytest.mark.parametrize(("n", "k"), [(10_000, 5000), (10_000, 64), (2000, 1999), (300, 150)])
def test_the_mean_over_many_prompts_is_that_of_each_prompts_own_estimate(n: int, k: int) -> None:
    by_correct = {c: 1 + c % 3 for c in range(0, n + 1, n // 50)}
    each = math.fsum(times * pass_at_k(n, c, k) for c, times in by_correct.items()) / sum(by_correct.values())
    assert mean_pass_at_k(n, by_correct, k) == pytest.approx(each, rel=1e-12)
    few = dict.fromkeys(range(n // 300, n // 100 + 1), 1)
    each = math.fsum(pass_at_k(n, c, k) for c in few) / len(few)
    assert mean_pass_at_k(n, few, k) == pytest.approx(each, rel=1e-12)
    with pytest.raises(ValueError, match="is not defined"):
        mean_pass_at_k(n, {n + 1: 1}, k)
