"""How what a rank is fed is cut into calls."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from controllers.rules.step import EXCHANGE_LIMIT_S
from controllers.workers.ranks import LEAST_S, PART_BYTES, feed_timeout_s, share_bytes, split_shares
from gcore.train.rank.messages import write_payload
from gcore.types import Group, PromptRef, Sample, Version, VersionSpan

Share = tuple[Group, frozenset[int]]


def share(number: int, tokens: int) -> Share:
    span = (VersionSpan(Version(0, 0), 0, tokens),)
    sample = Sample((1,) * tokens, (-0.5,) * tokens, "", "stop", span)
    return Group(PromptRef(0, 0, number), (1, 2, 3), (sample, sample)), frozenset({0, 1})


sizes = st.lists(st.integers(1, 60), max_size=30)


@given(sizes, st.integers(1, 2000))
def test_every_share_is_in_one_part_in_order_and_no_part_is_empty(tokens: list[int], limit: int) -> None:
    shares = [share(number, count) for number, count in enumerate(tokens)]
    parts = list(split_shares(shares, limit))
    assert [one for part in parts for one in part] == shares
    assert all(parts)


@given(sizes, st.integers(1, 2000))
def test_a_part_is_within_the_limit_unless_it_is_one_large_group(tokens: list[int], limit: int) -> None:
    for part in split_shares([share(number, count) for number, count in enumerate(tokens)], limit):
        assert len(part) == 1 or sum(map(share_bytes, part)) <= limit


@given(sizes.filter(bool), st.integers(1, 2000))
def test_no_two_parts_would_fit_into_one(tokens: list[int], limit: int) -> None:
    parts = list(split_shares([share(number, count) for number, count in enumerate(tokens)], limit))
    for before, after in itertools.pairwise(parts):
        assert sum(map(share_bytes, before)) + share_bytes(after[0]) > limit


def test_the_size_is_that_of_the_payload_nearly() -> None:
    one = share(1, 5000)
    assert 0.95 < share_bytes(one) / len(write_payload([one])) <= 1.0


def test_what_nobody_holds_is_no_call() -> None:
    assert list(split_shares([])) == []


def test_a_part_over_the_slowest_line_is_there_before_the_batch_is_given_up() -> None:
    assert feed_timeout_s(0) == LEAST_S
    assert feed_timeout_s(PART_BYTES) < EXCHANGE_LIMIT_S
    assert feed_timeout_s(2 * PART_BYTES) > feed_timeout_s(PART_BYTES)
