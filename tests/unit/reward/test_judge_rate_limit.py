"""How often something may be done: never more than the rate allows and one burst, whatever the rate changes to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.reward.judges.rate_limit import BURST_S, TokenBucket, burst_size

RATES = st.floats(0.001, 1000.0)
LOOKS = st.lists(st.tuples(st.floats(0.0, 20.0), RATES, st.integers(0, 300)), min_size=1, max_size=40)
"""Seconds since the look before, the rate that is told then, and how much is wanted."""


@given(first=RATES, looks=LOOKS)
def test_over_any_time_no_more_is_done_than_the_rates_allow_and_one_burst(
    first: float, looks: list[tuple[float, float, int]]
) -> None:
    bucket, now = TokenBucket.full(first, 0.0), 0.0
    done: list[int] = []
    gained: list[float] = []  # what the rates allow between the look before and this one
    bursts: list[float] = []
    before = first
    for seconds, rate, wanted in looks:
        now += seconds
        bucket = bucket.filled(rate, now)
        taken = 0
        while taken < wanted and bucket.wait_s == 0:
            bucket, taken = bucket.taken(), taken + 1
        done.append(taken)
        gained.append(seconds * min(before, rate))
        bursts.append(max(burst_size(before), burst_size(rate)))
        before = rate
    for begin in range(len(done)):
        for end in range(begin, len(done)):
            allowed = sum(gained[begin + 1 : end + 1]) + bursts[begin]
            assert sum(done[begin : end + 1]) <= allowed * (1 + 1e-6) + 1e-6


@given(rate=RATES, seconds=st.floats(1.0, 1000.0))
def test_whoever_always_waits_as_long_as_is_said_loses_nothing(rate: float, seconds: float) -> None:
    bucket, now, done = TokenBucket.full(rate, 0.0), 0.0, 0
    while now <= seconds and done < 2000:
        bucket = bucket.filled(rate, now)
        if bucket.wait_s > 0:
            now += bucket.wait_s
        else:
            bucket, done = bucket.taken(), done + 1
    assert done >= min(2000, int(rate * seconds * (1 - 1e-6)))


def test_what_timers_are_late_is_not_lost_up_to_a_burst() -> None:
    bucket = TokenBucket.full(100.0, 0.0)
    assert burst_size(100.0) == 100.0 * BURST_S == 10
    for _ in range(10):
        bucket = bucket.taken()
    late = bucket.filled(100.0, 0.05)
    for _ in range(5):
        late = late.taken()
    assert late.wait_s == pytest.approx(0.01)


def test_nothing_is_taken_that_must_wait() -> None:
    with pytest.raises(ValueError, match=r"nothing may be done for 2 s"):
        TokenBucket.full(0.5, 0.0).taken().taken()
