"""The remaining length of running responses: finished ones are biased to be short, so running ones are conditioned on survival."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.rollout.length_prediction import NONE, SiblingLengths, SourceLengths, tokens_left
from placement.lending import response_tail

LONGEST = 6600
lengths = st.integers(0, 9000)


def drawn(chance: random.Random, likeness: float, count: int) -> list[int]:
    """Half below 440 tokens, one in a hundred above 2,400."""
    common = chance.gauss(0.0, 1.0)
    own = [math.sqrt(likeness) * common + math.sqrt(1 - likeness) * chance.gauss(0.0, 1.0) for _ in range(count)]
    return [min(max(round(440 * math.exp(0.73 * deviation)), 1), LONGEST) for deviation in own]


@given(
    st.lists(st.lists(lengths, max_size=4), max_size=6),
    st.lists(lengths, max_size=6),
    st.lists(lengths, max_size=6),
    st.lists(lengths, max_size=6),
    st.integers(1, 9000),
)
def test_it_is_never_less_than_nothing_or_more_than_there_is_room_for(
    recent: list[list[int]], before: list[int], finished: list[int], growing: list[int], longest: int
) -> None:
    source = SourceLengths.of(recent)
    found = tokens_left(source, SiblingLengths.of(source, before), finished, growing, longest)
    assert math.isfinite(found)
    assert 0.0 <= found <= sum(max(longest - so_far, 0) for so_far in growing) + 1e-6


def test_nothing_is_left_of_nothing_and_all_of_what_nobody_knows() -> None:
    assert tokens_left(SourceLengths.of([[5, 9]]), NONE, [5], [], 100) == 0.0
    assert tokens_left(SourceLengths.of([]), NONE, [], [10, 0], 100) == 190.0


def test_response_that_outlives_its_siblings_is_expected_to_be_shorter_than_one_beside_long_ones() -> None:
    chance = random.Random(1)
    source = SourceLengths.of([drawn(chance, 0.7, 8) for _ in range(64)])
    beside_short = tokens_left(source, NONE, [100, 120, 140], [500], LONGEST)
    alone = tokens_left(source, NONE, [], [500], LONGEST)
    beside_long = tokens_left(source, NONE, [], [500] * 4, LONGEST) / 4
    assert beside_short < alone < beside_long


@pytest.mark.parametrize("likeness", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.93])
def test_of_a_step_under_way_it_knows_more_than_how_many_are_left(likeness: float, share: float) -> None:
    """Responses that were begun together and have as many tokens: what is left of them, by their prompts' own and by the number of those
    that go on alone. In the mean of logarithms. Where they are not alike at all there is nothing more to be known."""
    missed = by_count = 0.0
    for seed in range(12):
        chance = random.Random(f"{likeness} {seed}")
        recent = [[drawn(chance, likeness, 8) for _ in range(32)] for _ in range(2)]
        source = SourceLengths.of(group for step in recent for group in step)
        tail = response_tail([[length for group in step for length in group] for step in recent])
        now = [drawn(chance, likeness, 8) for _ in range(32)]
        every = sorted(length for group in now for length in group)
        so_far = every[int(share * len(every))]
        going = [length - so_far for length in every if length > so_far]
        told = sum(
            tokens_left(
                source, NONE, [n for n in group if n <= so_far], [so_far] * sum(n > so_far for n in group), LONGEST
            )
            for group in now
        )
        missed += abs(math.log(told / sum(going)))
        by_count += abs(math.log(tail[len(going)][1] * len(going) / sum(going)))
    assert missed < by_count * (1.2 if likeness == 0.0 else 1.0)
