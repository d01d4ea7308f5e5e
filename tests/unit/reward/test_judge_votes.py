"""Votes: the mean of the readable ones; without any, an error with an example."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.reward.judges.judge import (
    LONGEST_EXAMPLE,
    Judgement,
    UnreadAnswer,
    average_votes,
    bounded_mean,
    read_answers,
)
from gcore.reward.judges.types import Answer, JudgeError, Unreadable


def answers(*texts: str, truncated: bool = False) -> list[Answer]:
    return [Answer(text, 1, 1, truncated) for text in texts]


def read(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise Unreadable("it is no number") from error


def test_the_verdict_is_the_mean_of_those_that_can_be_read() -> None:
    told = average_votes(read_answers(answers("1", " what? ", "0.5", "who?"), read))
    assert told == Judgement(0.75, votes=2, unreadable=2, example="what?")
    assert average_votes(read_answers(answers("1"), read)) == Judgement(1.0, 1, 0, "")


@pytest.mark.parametrize(
    ("texts", "truncated", "message"),
    [
        pytest.param(["hm"], False, r"^the answer cannot be read: it is no number\.", id="one"),
        pytest.param(["hm", "no"], False, r"^none of 2 answers can be read: it is no number\.", id="two"),
        pytest.param(["hm"], True, r"no number, and it was truncated at max_new_tokens\.", id="cut off"),
        pytest.param([], False, "^the judge returned no answer", id="none"),
    ],
)
def test_without_one_that_can_be_read_there_is_no_verdict(texts: list[str], truncated: bool, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        average_votes(read_answers(answers(*texts, truncated=truncated), read))


def test_an_answer_that_was_cut_off_counts_if_it_can_be_read() -> None:
    assert average_votes(read_answers(answers("1", truncated=True), read)).value == 1.0


def test_an_example_is_the_beginning_and_stands_in_no_reason_so_that_reasons_that_are_alike_are_told_once() -> None:
    (lost,) = read_answers(answers("x" * 1000), read)
    assert isinstance(lost, UnreadAnswer)
    assert lost.example == "x" * LONGEST_EXAMPLE
    with pytest.raises(JudgeError) as caught:
        average_votes([lost])
    assert "xx" not in str(caught.value)


def test_a_broken_parser_is_no_unreadable_answer() -> None:
    def broken(text: str) -> float:
        raise JudgeError("verdict parser 'mine' raised KeyError")

    with pytest.raises(JudgeError, match="KeyError"):
        read_answers(answers("1"), broken)


@given(st.lists(st.floats(-3e38, 3e38) | st.none(), max_size=12))
def test_unreadable_votes_do_not_change_the_mean(votes: list[float | None]) -> None:
    told = read_answers(answers(*("?" if vote is None else repr(vote) for vote in votes)), read)
    values = [vote for vote in votes if vote is not None]
    if not values:
        with pytest.raises(JudgeError):
            average_votes(told)
        return
    one = average_votes(told)
    assert (one.votes, one.unreadable) == (len(values), len(votes) - len(values))
    assert one.value == bounded_mean(values)
    assert min(values) <= one.value <= max(values)
    assert one.example == ("?" if None in votes else "")


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=12))
def test_the_order_of_votes_does_not_matter(values: list[float]) -> None:
    assert bounded_mean(values) == bounded_mean(sorted(values)) == bounded_mean(values[::-1])
