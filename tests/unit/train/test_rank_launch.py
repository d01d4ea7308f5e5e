"""A rank's time by phase: complete for any reader at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.train.rank.launch import PhaseMeter

PHASES = ["loading", "waiting", "update", "saving"]


@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from(PHASES), st.booleans()), max_size=20))
def test_every_second_is_of_the_phase_that_was_told_last(told: list[tuple[float, str, bool]]) -> None:
    phases, now, expected, phase = PhaseMeter("loading", 3.0), 3.0, {"loading": 0.0}, "loading"
    for passed, following, looks in told:
        now += passed
        expected[phase] = expected.get(phase, 0.0) + passed
        phases.tell(following, now)
        if looks:
            phases.read(now)
        phase = following
    found = phases.read(now)
    assert found.at == pytest.approx(now)
    assert found.seconds.keys() >= {name for name, seconds in expected.items() if seconds > 1e-6}
    for name, seconds in found.seconds.items():
        assert seconds == pytest.approx(expected.get(name, 0.0), abs=1e-9)


def test_a_clock_that_is_read_out_of_turn_takes_nothing_back() -> None:
    phases = PhaseMeter("waiting", 10.0)
    phases.tell("update", 12.0)
    assert phases.read(11.0).seconds == {"waiting": 2.0, "update": 0.0}
