"""The rate limiter: never more than the rate and one burst, also when the rate changes.

The gate of an external judge: concurrent requests, start rate, and backoff for all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.config.reward import ExternalJudge
from gcore.reward.judges.rate_limit import (
    BURST_S,
    FIRST_AWAY_S,
    KEY_AGAIN_S,
    LONGEST_HOLD_S,
    Cause,
    RateLimiter,
    TokenBucket,
    burst_size,
)
from gcore.testing import FakeClock

RATES = st.floats(0.001, 1000.0)
LOOKS = st.lists(st.tuples(st.floats(0.0, 20.0), RATES, st.integers(0, 300)), min_size=1, max_size=40)
"""Seconds since the last reading, the rate from then on, and the requested amount."""


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
def test_waiting_exactly_as_long_as_requested_reaches_the_rate(rate: float, seconds: float) -> None:
    bucket, now, done = TokenBucket.full(rate, 0.0), 0.0, 0
    while now <= seconds and done < 2000:
        bucket = bucket.filled(rate, now)
        if bucket.wait_s > 0:
            now += bucket.wait_s
        else:
            bucket, done = bucket.taken(), done + 1
    assert done >= min(2000, int(rate * seconds * (1 - 1e-6)))


def test_late_timers_lose_no_more_than_a_burst() -> None:
    bucket = TokenBucket.full(100.0, 0.0)
    assert burst_size(100.0) == 100.0 * BURST_S == 10
    for _ in range(10):
        bucket = bucket.taken()
    late = bucket.filled(100.0, 0.05)
    for _ in range(5):
        late = late.taken()
    assert late.wait_s == pytest.approx(0.01)


def test_nothing_is_taken_that_must_wait() -> None:
    with pytest.raises(ValueError, match=r"must wait for 2 s"):
        TokenBucket.full(0.5, 0.0).taken().taken()


@dataclass
class Ear:
    """A record of reports, and a budget that can be closed."""

    causes: dict[str, float] = field(default_factory=dict)
    why: str = ""
    troubles: list[str] = field(default_factory=list)
    empty: str = ""

    def held(self, judge: str, cause: Cause, seconds: float) -> None:
        self.causes[cause] = self.causes.get(cause, 0.0) + seconds

    def waits(self, judge: str, why: str) -> None:
        self.why = why

    def trouble(self, judge: str, topic: str, sentence: str) -> None:
        self.troubles.append(f"{topic}: {sentence}")

    def overdrawn(self, judge: str) -> str:
        return self.empty

    def note(self, judge: str, tokens_in: int, tokens_out: int) -> None:
        """Of no concern here."""


class Road:
    """Requests that pass a gate, each with a given duration."""

    def __init__(self, *, peers: int = 1, rate: float = 10.0, in_flight: int = 1000) -> None:
        self.clock, self.ear, self.peers = FakeClock(), Ear(), peers
        spec = ExternalJudge(url="http://x/v1", model="m", requests_per_s=rate, in_flight=in_flight)
        self.gate = RateLimiter("j", spec, self.ear, self.ear, self.clock, lambda: self.peers)
        self.starts: list[float] = []
        self.open, self.most_open = 0, 0
        self.tasks: list[asyncio.Task[None]] = []

    def send(self, count: int = 1, seconds: float = 0.0) -> None:
        self.tasks += [asyncio.ensure_future(self._one(seconds)) for _ in range(count)]

    async def _one(self, seconds: float) -> None:
        async with self.gate.turn():
            self.starts.append(self.clock.monotonic())
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            try:
                await self.clock.sleep(seconds)
            finally:
                self.open -= 1

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_no_more_requests_are_under_way_than_may_be() -> None:
    road = Road(rate=1000.0, in_flight=3)
    road.send(20, seconds=1.0)
    await road.clock.advance(30)
    assert len(road.starts) == 20
    assert road.most_open == 3
    assert "pace" not in road.ear.causes or road.ear.causes["pace"] < 1


async def test_requests_start_no_more_often_than_the_share_of_this_controller_allows_while_others_come_and_go() -> None:
    road = Road(peers=2)
    road.send(1000)
    await road.clock.advance(10)
    assert len(road.starts) == pytest.approx(50 + burst_size(5.0), abs=1)
    road.peers = 5
    before = len(road.starts)
    await road.clock.advance(10)
    assert len(road.starts) - before == pytest.approx(20, abs=2)
    road.peers = 1
    before = len(road.starts)
    await road.clock.advance(10)
    assert len(road.starts) - before == pytest.approx(100, abs=6)
    assert road.ear.causes["pace"] == pytest.approx(30, abs=1)
    assert road.ear.why == "", "the pace is nothing to tell people"
    await road.end()


async def test_while_the_server_wants_time_nothing_is_sent_and_never_for_longer_than_a_minute() -> None:
    road = Road()
    road.gate.hold(1e9)
    road.send(2)
    await road.clock.advance(LONGEST_HOLD_S - 0.1)
    assert road.starts == []
    assert road.ear.why == "the server of judge 'j' asked for a delay"
    await road.clock.advance(1)
    assert len(road.starts) == 2
    assert road.ear.why == ""
    assert road.ear.causes["server"] == pytest.approx(LONGEST_HOLD_S)


async def test_when_all_is_spent_requests_wait_and_go_on_when_there_is_more() -> None:
    road = Road()
    road.ear.empty = "all is spent"
    road.send(3)
    await road.clock.advance(10_000)
    assert (road.starts, road.ear.why) == ([], "all is spent")
    assert road.ear.causes["cost"] >= 9_999
    road.ear.empty = ""
    await road.clock.advance(2)
    assert len(road.starts) == 3
    assert road.ear.why == ""


async def test_a_key_that_is_not_taken_is_told_once_and_tried_with_one_request_a_minute() -> None:
    road = Road()
    road.gate.refuse("the key is wrong")
    road.send(10, seconds=5.0)
    await road.clock.advance(KEY_AGAIN_S - 1)
    assert road.starts == []
    assert road.ear.why == "the key is wrong; a request is retried every 60 s"
    await road.clock.advance(2)
    assert len(road.starts) == 1, "the others wait for what becomes of the first"
    road.gate.refuse("the key is wrong")
    await road.clock.advance(KEY_AGAIN_S + 1)
    assert len(road.starts) == 2
    assert road.ear.troubles == ["key: the key is wrong"]
    road.gate.accepted()
    await road.clock.advance(20)
    assert len(road.starts) == 10
    assert road.ear.troubles[1:] == ["key: judge 'j' accepts the key again"]


async def test_cancelled_waiter_lets_the_next_one_start() -> None:
    road = Road()
    road.ear.empty = "all is spent"
    road.send(2)
    await road.clock.advance(1)
    road.tasks[0].cancel()
    road.ear.empty = ""
    await road.clock.advance(2)
    assert len(road.starts) == 1
    assert road.ear.why == ""


async def test_while_the_server_answers_nobody_one_request_at_a_time_is_sent_later_and_later() -> None:
    road = Road()
    road.gate.away("nothing came")
    road.gate.away("nor did it for one that was sent before")
    road.send(10, seconds=0.1)
    await road.clock.advance(FIRST_AWAY_S - 0.1)
    assert road.starts == []
    assert road.ear.why == "nothing came; no request succeeds, and one is retried every 1 s"
    await road.clock.advance(0.15)
    assert len(road.starts) == 1, "the others wait for what becomes of the first"
    road.gate.away("nothing came again")
    await road.clock.advance(2 * FIRST_AWAY_S - 0.1)
    assert len(road.starts) == 1
    await road.clock.advance(0.15)
    assert len(road.starts) == 2
    road.gate.answered()
    await road.clock.advance(2)
    assert len(road.starts) == 10
    assert (road.ear.why, road.ear.troubles) == ("", [])
    assert road.ear.causes["away"] == pytest.approx(3 * FIRST_AWAY_S, abs=0.2)
