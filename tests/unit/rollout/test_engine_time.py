"""An engine's time totals are complete for any number of readings; and a reader's differences."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.rollout.engine_time import (
    Doing,
    EngineReading,
    EngineTimeMeter,
    EngineTimeSums,
    parse_reading,
    prometheus_text,
    time_between,
)

DOINGS: list[Doing] = ["working", "paused", "asleep"]
STRETCHES = st.lists(st.tuples(st.floats(0, 50), st.sampled_from(DOINGS), st.integers(0, 12)), min_size=1, max_size=30)


def total(sums: EngineTimeSums) -> float:
    return sums.busy_s + sums.idle_s + sums.paused_s + sums.asleep_s


@given(stretches=STRETCHES, rows=st.integers(1, 8))
def test_all_of_the_time_is_in_the_sums_and_they_only_grow(
    stretches: list[tuple[float, Doing, int]], rows: int
) -> None:
    meter, now, seen = EngineTimeMeter(rows, 5.0), 5.0, [EngineTimeSums(5.0)]
    for passed, doing, wanted in stretches:
        meter.note(doing, wanted, now)
        now += passed
        seen.append(meter.read(now))
    assert total(seen[-1]) == pytest.approx(now - 5.0)
    for one, other in pairwise(seen):
        assert all(getattr(one, name) <= getattr(other, name) + 1e-9 for name in EngineTimeSums.__dataclass_fields__)


@given(stretches=STRETCHES, looks=st.lists(st.floats(0, 1), max_size=10))
def test_time_totals_do_not_depend_on_readings(stretches: list[tuple[float, Doing, int]], looks: list[float]) -> None:
    watched, left, now = EngineTimeMeter(4, 0.0), EngineTimeMeter(4, 0.0), 0.0
    for passed, doing, wanted in stretches:
        watched.note(doing, wanted, now)
        left.note(doing, wanted, now)
        for part in sorted(looks):
            watched.read(now + part * passed)
        now += passed
    assert watched.read(now) == left.read(now)


def test_half_of_the_rows_are_half_of_the_time_and_more_than_all_are_no_more_than_all() -> None:
    meter = EngineTimeMeter(8, 0.0)
    meter.note("working", 4, 0.0)
    meter.note("working", 20, 10.0)
    sums = meter.read(15.0)
    assert (sums.busy_s, sums.idle_s) == (10.0, 5.0)
    assert (sums.active_s, sums.running_s) == (15.0, 80.0)


def metrics(sums: EngineTimeSums, *, scale: float = 1.0) -> str:
    return prometheus_text(sums, scale=scale) + "sglang:generation_tokens_total 70\nsglang:num_requests_total 3\n"


def test_two_readings_of_an_engine_make_the_stretch_between_them() -> None:
    one = parse_reading(metrics(EngineTimeSums(10.0, 1.0, 2.0, 0.5, 0.0, 2.0, 9.0)), 9.9, 10.2)
    other = parse_reading(metrics(EngineTimeSums(14.0, 3.0, 3.0, 1.0, 0.5, 5.0, 21.0)), 13.9, 14.1)
    found = time_between(one, other, rows=4)
    assert found is not None
    assert (found.begin, found.end) == (10.0, 14.0)
    assert (found.busy_s, found.idle_s, found.paused_s, found.asleep_s) == (2.0, 1.0, 0.5, 0.5)
    assert (found.active_s, found.running_s) == (3.0, 12.0)


def test_emulated_seconds_are_told_as_real_ones() -> None:
    reading = parse_reading(metrics(EngineTimeSums(100.0, busy_s=40.0), scale=0.1), 9.0, 11.0)
    assert reading.at == pytest.approx(10.0)
    assert reading.sums is not None
    assert reading.sums.busy_s == pytest.approx(4.0)


def test_an_engine_whose_clock_is_another_is_taken_to_have_answered_half_way() -> None:
    assert parse_reading(metrics(EngineTimeSums(1e6)), 10.0, 11.0).at == 10.5


def test_an_engine_that_began_anew_at_the_same_address_is_not_told_with_the_one_before() -> None:
    one, other = (
        parse_reading(metrics(EngineTimeSums(at, busy_s=busy)), 0.0, 99.0) for at, busy in ((10.0, 5.0), (11.0, 0.2))
    )
    assert time_between(one, other, rows=4) is None


def test_an_engine_that_was_asked_before_its_own_word_of_an_end_is_believed_for_all_of_its_time() -> None:
    """Its sums then go back a little, by what it was taken to be busy still."""
    meter = EngineTimeMeter(4, 0.0)
    meter.note("working", 4, 0.0)
    early = parse_reading(metrics(meter.read(10.0)), 9.9, 10.1)
    meter.note("working", 0, 9.9)
    later = parse_reading(metrics(meter.read(12.4)), 12.3, 12.5)
    found = time_between(early, later, rows=4)
    assert found is not None
    assert (found.begin, found.end, found.busy_s, found.running_s) == (10.0, 12.4, 0.0, 0.0)
    assert found.idle_s == pytest.approx(2.4)
    assert time_between(early, EngineReading(10.5, early.sums, 0, 0, 0, 0), rows=4) is None


def test_tokens_that_are_taken_back_take_no_time_with_them() -> None:
    one, other = (
        EngineReading(at, EngineTimeSums(at, busy_s=at), 1, 0, tokens, 1) for at, tokens in ((1.0, 5), (2.0, 4))
    )
    found = time_between(one, other, rows=4)
    assert found is not None
    assert (found.busy_s, found.tokens) == (1.0, 0)


def sglang(running: float, tokens: int, decoding: float | None) -> str:
    lines = [f'sglang:num_running_reqs{{model_name="m"}} {running}', f"sglang:generation_tokens_total {tokens}"]
    lines += [] if decoding is None else [f'sglang:inter_token_latency_seconds_sum{{model_name="m"}} {decoding}']
    return "\n".join([*lines, "sglang:cache_hit_rate nan", "# EOF"])


def test_of_sglang_the_seconds_between_tokens_are_the_integral_of_what_was_decoded() -> None:
    one, other = parse_reading(sglang(0, 0, 3.0), 9.0, 11.0), parse_reading(sglang(0, 100, 7.0), 13.0, 15.0)
    found = time_between(one, other, rows=4)
    assert found is not None
    assert (found.begin, found.end, found.busy_s, found.idle_s, found.running_s) == (10.0, 14.0, 1.0, 3.0, 4.0)


def test_of_sglang_without_latencies_what_runs_at_both_ends_is_taken_to_have_run_between() -> None:
    one, other = EngineReading(0.0, None, 0, 0, 0, 0), EngineReading(2.0, None, 4, 0, 0, 0)
    found = time_between(one, other, rows=4)
    assert found is not None
    assert (found.busy_s, found.idle_s) == (1.0, 1.0)
