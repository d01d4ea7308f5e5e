"""The watchdog, exactly at its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.worker.lifecycle import SIGNAL_STOPPED, ProgressOk, ProgressStalled, Watchdog

FRESH = Watchdog(limit_s=10, loading_limit_s=100, phase="loading", since=0)


@pytest.mark.parametrize(
    ("phase", "now", "expected"),
    [
        ("update", 9.9, ProgressOk(10)),
        ("update", 10.0, ProgressStalled("update", 0)),
        ("loading", 99.0, ProgressOk(100)),
        ("loading", 100.0, ProgressStalled("loading", 0)),
        ("waiting", 1e9, ProgressOk(None)),
    ],
    ids=["work in time", "work stands still", "loading may take longer", "loading stands still", "waiting may last"],
)
def test_a_phase_without_progress_is_judged_by_its_own_limit(
    phase: str, now: float, expected: ProgressOk | ProgressStalled
) -> None:
    assert FRESH.note(phase, 1, 0).verdict(now) == expected


def test_the_same_phase_with_the_same_number_is_no_progress() -> None:
    dog = FRESH.note("update", 3, 1).note("update", 3, 9)
    assert dog.verdict(11) == ProgressStalled("update", 1)
    assert dog.note("update", 4, 9).verdict(11) == ProgressOk(19)
    assert dog.note("saving", 3, 9).verdict(11) == ProgressOk(19)


def test_a_hang_is_told_with_phase_and_seconds() -> None:
    assert ProgressStalled("update", 2.0).reason(14.4) == "no progress in phase 'update' for 12 s"


def test_a_child_stopped_by_a_signal_hangs_even_where_it_may_wait() -> None:
    dog = FRESH.note("waiting", 0, 0).note_stopped(stopped=True, now=50)
    assert dog.note_stopped(stopped=True, now=55).verdict(59) == ProgressOk(60)
    assert dog.verdict(60) == ProgressStalled(SIGNAL_STOPPED, 50)
    assert dog.note_stopped(stopped=False, now=55).verdict(1e9) == ProgressOk(None)


REPORTS = st.lists(
    st.tuples(st.sampled_from(["waiting", "loading", "update"]), st.integers(0, 3), st.floats(0, 30)), max_size=20
)


@given(REPORTS)
def test_the_verdict_turns_exactly_when_it_was_said_to_be_due(reports: list[tuple[str, int, float]]) -> None:
    dog, now = FRESH, 0.0
    for phase, progress, later in reports:
        now += later
        dog = dog.note(phase, progress, now)
    if dog.due is None:
        assert dog.phase == "waiting"
        assert dog.verdict(1e12) == ProgressOk(None)
    else:
        assert isinstance(dog.verdict(dog.due), ProgressStalled)
        assert dog.verdict(dog.due - 0.001) == ProgressOk(dog.due)


@given(st.lists(st.floats(0, 9.9), max_size=30))
def test_who_gets_on_within_the_limit_never_hangs(gaps: list[float]) -> None:
    dog, now = FRESH, 0.0
    for progress, gap in enumerate(gaps):
        now += gap
        assert isinstance(dog.verdict(now), ProgressOk)
        dog = dog.note("update", progress, now)
