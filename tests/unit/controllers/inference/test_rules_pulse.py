"""When an engine that took requests is silent, when it is hung, and what is said of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controllers.inference.rules import EngineHealth, HealthLimits, HealthState

PATIENCE = HealthLimits(silent_s=30.0, watchdog_s=120.0, request_s=100.0)


def test_one_that_owes_something_and_gives_no_sign_is_silent_then_hung_and_both_are_told() -> None:
    pulse = EngineHealth(0.0).begins(1000.0)
    assert pulse.look(PATIENCE, 1029.9, busy=True) == pulse
    assert pulse.verdict(PATIENCE, 1029.9) is HealthState.WELL
    silent = pulse.look(PATIENCE, 1030.0, busy=True)
    assert silent.verdict(PATIENCE, 1030.0) is HealthState.SILENT
    assert (
        silent.why(PATIENCE, 1030.0) == "has answered nothing for 30 s; its requests go to others, and it is asked on"
    )
    assert silent.verdict(PATIENCE, 1119.9) is HealthState.SILENT
    assert silent.verdict(PATIENCE, 1120.0) is HealthState.HUNG
    assert silent.why(PATIENCE, 1120.0) == "has answered nothing for 120 s; it is ended, and another started"


def test_one_that_was_left_is_silent_until_it_answers_also_without_work_and_with_new_work() -> None:
    silent = EngineHealth(0.0).look(PATIENCE, 30.0, busy=True)
    assert silent.look(PATIENCE, 50.0, busy=False).silent
    assert silent.begins(60.0) == silent
    back = silent.answers(70.0)
    assert back.verdict(PATIENCE, 500.0) is HealthState.WELL
    assert back.why(PATIENCE, 500.0) == ""


def test_one_that_owes_nothing_is_never_silent_and_never_asked() -> None:
    pulse = EngineHealth(0.0)
    assert pulse.look(PATIENCE, 1e6, busy=False) == pulse
    assert not pulse.wants_probe(PATIENCE, 1e6, 0.0, busy=False)


def test_one_at_work_is_asked_after_a_third_of_the_time_and_a_silent_one_each_second() -> None:
    pulse = EngineHealth(0.0)
    assert not pulse.wants_probe(PATIENCE, 9.9, 0.0, busy=True)
    assert pulse.wants_probe(PATIENCE, 10.0, 0.0, busy=True)
    assert not pulse.wants_probe(PATIENCE, 15.0, 10.0, busy=True)
    silent = pulse.look(PATIENCE, 30.0, busy=True)
    assert not silent.wants_probe(PATIENCE, 30.9, 30.0, busy=False)
    assert silent.wants_probe(PATIENCE, 31.0, 30.0, busy=False)


def test_one_that_answers_but_no_request_twice_in_a_row_is_hung_though_it_lives() -> None:
    pulse = EngineHealth(0.0).begins(0.0).answers(90.0)
    once = pulse.fails(PATIENCE, begun=0.0, now=100.0)
    assert once.verdict(PATIENCE, 100.0) is HealthState.WELL
    together = once.fails(PATIENCE, begun=1.0, now=101.0)  # begun before the first ran out: the same standstill
    assert together.verdict(PATIENCE, 101.0) is HealthState.WELL
    again = together.answers(150.0).fails(PATIENCE, begun=102.0, now=202.0)
    assert again.verdict(PATIENCE, 202.0) is HealthState.HUNG
    assert again.why(PATIENCE, 202.0) == (
        "answers, but no request within 100 s, twice in a row; it is ended, and another started"
    )


def test_a_response_in_between_or_a_quick_refusal_is_no_standstill() -> None:
    once = EngineHealth(0.0).fails(PATIENCE, begun=0.0, now=100.0)
    assert once.responds(101.0).fails(PATIENCE, begun=102.0, now=202.0).verdict(PATIENCE, 202.0) is HealthState.WELL
    assert once.fails(PATIENCE, begun=102.0, now=102.1).verdict(PATIENCE, 103.0) is HealthState.WELL


def test_weights_that_are_not_taken_make_it_silent_from_when_it_was_asked() -> None:
    idle = EngineHealth(5.0)
    asked = idle.in_vain(1000.0)
    assert asked.silent
    assert asked.why(PATIENCE, 1001.0) == ""  # it may just have died, which its supervisor tells
    assert asked.in_vain(1100.0).verdict(PATIENCE, 1120.0) is HealthState.HUNG
    assert asked.answers(1002.0).verdict(PATIENCE, 5000.0) is HealthState.WELL


@given(
    st.lists(st.tuples(st.sampled_from(["begins", "answers", "responds", "wait"]), st.floats(0.0, 29.0)), max_size=40)
)
def test_one_that_gives_a_sign_within_the_time_is_never_silent(happenings: list[tuple[str, float]]) -> None:
    now, pulse = 0.0, EngineHealth(0.0)
    for what, pause in happenings:
        now += pause
        pulse = pulse.look(PATIENCE, now, busy=True)
        assert pulse.verdict(PATIENCE, now) is HealthState.WELL
        pulse = pulse.answers(now) if what in ("wait", "begins") else getattr(pulse, what)(now)
