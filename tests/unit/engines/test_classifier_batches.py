"""The batching of a classifier's questions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcore.engines.torch.classifier import choose_batch

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)
SLOTS = st.integers(1, 20)
TOKENS = st.integers(1, 2000)


@given(LENGTHS, SLOTS, TOKENS)
def test_the_oldest_always_goes_and_nothing_goes_twice(lengths: list[int], slots: int, tokens: int) -> None:
    places = choose_batch(lengths, slots=slots, tokens=tokens)
    assert places[0] == 0
    assert len(set(places)) == len(places)
    assert all(0 <= place < len(lengths) for place in places)


@given(LENGTHS, SLOTS, TOKENS)
def test_a_batch_is_bounded_and_at_most_half_padding_unless_it_is_one_question(
    lengths: list[int], slots: int, tokens: int
) -> None:
    chosen = [lengths[place] for place in choose_batch(lengths, slots=slots, tokens=tokens)]
    padded = len(chosen) * max(chosen)
    assert len(chosen) <= slots
    assert len(chosen) == 1 or padded <= tokens
    assert padded <= 2 * sum(chosen)


@given(LENGTHS, SLOTS, TOKENS)
def test_all_are_taken_in_the_end(lengths: list[int], slots: int, tokens: int) -> None:
    waiting, passes = list(lengths), 0
    while waiting:
        for place in sorted(choose_batch(waiting, slots=slots, tokens=tokens), reverse=True):
            del waiting[place]
        passes += 1
    assert passes <= len(lengths)


@given(st.integers(1, 50), st.integers(1, 400), st.integers(1, 20))
def test_questions_of_one_length_fill_a_batch(length: int, count: int, slots: int) -> None:
    assert len(choose_batch([length] * count, slots=slots, tokens=length * slots)) == min(count, slots)


def test_those_that_are_nearest_in_length_go_with_the_oldest() -> None:
    assert choose_batch([10, 300, 11, 200, 9, 10], slots=4, tokens=4000) == [0, 5, 2, 4]
