"""The predicted length of a response: better than its source's mean, and always plausible."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.rollout.length_prediction import (
    MOST_LIKENESS,
    NONE,
    USUAL_LIKENESS,
    SiblingLengths,
    SourceLengths,
    expected_length,
    tokens_left,
)

LONGEST = 6600
lengths = st.integers(0, 20_000)
groups = st.lists(st.lists(lengths, max_size=4), max_size=6)


def drawn(chance: random.Random, likeness: float, count: int) -> list[int]:
    """A group as the field has them: half below 440 tokens, one in a hundred above 2,400."""
    common = chance.gauss(0.0, 1.0)
    own = [math.sqrt(likeness) * common + math.sqrt(1 - likeness) * chance.gauss(0.0, 1.0) for _ in range(count)]
    return [min(max(round(440 * math.exp(0.73 * deviation)), 1), LONGEST) for deviation in own]


@given(groups, st.lists(lengths, max_size=8), st.lists(lengths, max_size=8), st.integers(0, 9000), st.integers(1, 9000))
def test_no_expectation_is_below_what_is_there_or_above_the_longest(
    recent: list[list[int]], before: list[int], siblings: list[int], so_far: int, longest: int
) -> None:
    source = SourceLengths.of(recent)
    known = SiblingLengths.of(source, before).joined(SiblingLengths.of(source, siblings))
    so_far = min(so_far, longest)
    found = expected_length(source, known, so_far, longest)
    assert math.isfinite(found)
    assert so_far <= found <= longest
    assert 0.0 <= tokens_left(source, known, siblings, [so_far, 0], longest) <= 2 * longest


@given(groups)
def test_how_alike_responses_are_is_a_share_and_never_all(recent: list[list[int]]) -> None:
    assert 0.0 <= SourceLengths.of(recent).likeness <= MOST_LIKENESS


def test_of_a_source_of_which_nothing_is_known_the_longest_is_expected() -> None:
    assert expected_length(SourceLengths.of([]), NONE, 7, 500) == 500.0


def test_without_anything_of_its_own_a_response_is_as_long_as_its_sources_are_in_the_mean() -> None:
    assert expected_length(SourceLengths.of([[100, 300], [200, 400]]), NONE, 0, 1000) == pytest.approx(250.0)


def test_response_longer_than_all_known_ones_is_expected_to_continue() -> None:
    assert expected_length(SourceLengths.of([[100, 300], [200, 400]]), NONE, 800, 2000) == pytest.approx(1040.0)


@pytest.mark.parametrize("likeness", [0.15, 0.4, 0.7, 0.93])
def test_the_likeness_within_a_prompt_is_found_again(likeness: float) -> None:
    chance = random.Random(3)
    found = SourceLengths.of([drawn(chance, likeness, 8) for _ in range(400)]).likeness
    assert found == pytest.approx(likeness, abs=0.06)


def test_one_group_says_nothing_of_likeness() -> None:
    assert SourceLengths.of([[5, 5, 5]]).likeness == USUAL_LIKENESS


@pytest.mark.parametrize("likeness", [0.15, 0.4, 0.7, 0.93])
@pytest.mark.parametrize("siblings", [2, 7])
@pytest.mark.parametrize("so_far", [0, 300])
def test_it_misses_by_less_than_the_sources_mean(likeness: float, siblings: int, so_far: int) -> None:
    """In the mean absolute error. Of a response that has tokens: than the mean of those of its source that became as long."""
    missed = by_mean = 0.0
    for seed in range(3):
        chance = random.Random(f"{likeness} {siblings} {seed}")
        recent = [drawn(chance, likeness, 8) for _ in range(64)]
        source = SourceLengths.of(recent)
        alike = [length for group in recent for length in group if length > so_far]
        mean = sum(alike) / len(alike)
        for _ in range(400):
            *others, own = drawn(chance, likeness, siblings + 1)
            if own > so_far:
                missed += abs(own - expected_length(source, SiblingLengths.of(source, others), so_far, LONGEST))
                by_mean += abs(own - mean)
    assert missed < by_mean * {0.15: 1.0, 0.4: 0.96, 0.7: 0.8, 0.93: 0.5}[likeness]


def test_sibling_lengths_stay_useful_when_lengths_double() -> None:
    chance = random.Random(5)
    early = [drawn(chance, 0.7, 8) for _ in range(64)]
    late = [[2 * length for length in group] for group in early]
    then, now = SourceLengths.of(early), SourceLengths.of(late)
    for group, grown in zip(early, late, strict=True):
        before, after = SiblingLengths.of(then, group), SiblingLengths.of(now, grown)
        assert before.above == pytest.approx(after.above)
