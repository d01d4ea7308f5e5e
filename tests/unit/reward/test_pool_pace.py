"""A slowdown of a reward is detected from its times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gcore.reward.pool import SETTLED, SLOW_IN_A_ROW, LatencyTrend


def after(*seconds: float) -> tuple[LatencyTrend, list[str]]:
    pace, told = LatencyTrend(), []
    for one in seconds:
        before, pace = pace, pace.note(one)
        if news := pace.news(before, "r"):
            told.append(news)
    return pace, told


def test_a_hundredfold_slowdown_is_told_once_within_three_responses_and_its_end_too() -> None:
    usual = [0.02] * SETTLED
    assert after(*usual, *[2.0] * (SLOW_IN_A_ROW - 1))[1] == []
    slow = after(*usual, *[2.0] * 20)
    assert slow[1] == ["reward 'r' takes 2 s per response, 100 times the usual 0.02 s"]
    assert slow[0].usual < 0.021
    assert after(*usual, *[2.0] * 20, 0.1, 0.02)[1][1:] == [
        "reward 'r' is back to its usual speed, 0.02 s per response"
    ]


def test_one_slow_response_and_what_nobody_would_notice_are_no_slowdown() -> None:
    assert after(*[0.02] * 20, 5.0, *[0.02] * 5, 5.0, 5.0, 0.02)[1] == []
    assert after(*[1e-5] * 20, *[0.04] * 50)[1] == []


@given(st.floats(1e-4, 1.0), st.lists(st.floats(0.5, 4.9), max_size=60))
def test_steady_reward_is_never_reported(usual: float, factors: list[float]) -> None:
    assert after(*[usual * f for f in [1.0] * SETTLED + factors])[1] == []
