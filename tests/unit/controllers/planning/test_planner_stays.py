"""Steps without a move: the reason, its records in the store and the run's folder, and its text for users."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.cli.view.placement import history_tree, placement_story
from controllers.planning.history import NAME, MovesFile, read_moves, read_stays
from controllers.planning.planner import TELL_S, HoldLog
from gcore.ledger.records.job import (
    MOST_STAY_BYTES,
    NEWEST_STAYS,
    ForecastAccuracy,
    HoldPeriod,
    Move,
    MoveKind,
    Moves,
)
from gcore.testing import FakeClock
from placement.measurements import MeasuredStep
from placement.moves import DecisionContext, add_stay, add_taken, extend_stay, split_part
from placement.policies.base import PolicyStart, Situation, SwitchCosts
from placement.policies.dynamic import SplitSavings, dynamic
from placement.slots import Split, SplitBounds

HERE, BETTER, WORSE = Split("coexisting", 4, 1, 1), Split("coexisting", 3, 2, 1), Split("coexisting", 2, 3, 1)


def unknown(step: int, after: int) -> None:
    """Step times without measurements of their parts."""


def at(step: int, seq: int | None = None) -> DecisionContext:
    return DecisionContext(step, step if seq is None else seq, "a", 100.0 + step)


def moved(step: int, kind: MoveKind = MoveKind.SPLIT) -> Move:
    fields = {
        "generation": step,
        "seq": step,
        "before": split_part(HERE),
        "after": split_part(BETTER),
        "time": 100.0 + step,
    }
    return Move.model_validate({"kind": kind, "step": step, "reason": "rollout was idle"} | fields)


@pytest.mark.parametrize(
    ("saved", "differs", "cost", "band", "said"),
    [
        pytest.param(
            0.1, 0.0, 0.0, 0.4, f"{BETTER} would save 0.10 s of 8.0 s a step, no more than the 0.40 s by which", id="band"
        ),
        pytest.param(
            1.0, 0.0, 20.0, 0.4, "1.0 s of 8.0 s a step, 12.0 s in 12 steps, too little for a change that costs 20.0 s",
            id="cost",
        ),
        pytest.param(
            1.0, 4.0, 0.0, 0.4, "save 1.0 s of 8.0 s a step, but 2.6 s of that may be random variation of the newest steps", id="luck"
        ),
        pytest.param(
            -0.5, 0.0, 0.0, 0.4, f"quicker than 8.0 s a step: the next best, {BETTER}, would take 0.50 s more", id="best"
        ),
    ],
)  # fmt: skip
def test_of_the_best_other_split_it_is_said_what_it_would_save_and_why_it_is_not_taken(
    saved: float, differs: float, cost: float, band: float, said: str
) -> None:
    """`differs`: of the saving from batch to batch, twice as many standard deviations as its standard error has of four batches."""
    luck = differs * np.array([-1.0, -1.0, 1.0, 1.0]) * np.sqrt(3) / 2
    each = np.stack([np.full(4, 8.0), 8.0 - saved + luck, 9.0 - saved + luck], axis=1)
    weighed = SplitSavings((HERE, BETTER, WORSE), 0, each, np.array([0.0, cost, cost]), 12, band)
    assert weighed.best == weighed.here
    assert said in weighed.why_not()
    alone = SplitSavings((HERE,), 0, each[:, :1], np.zeros(1), 12, band)
    assert alone.best == alone.here
    assert alone.why_not() == "no other split is possible"


@given(
    each=st.lists(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=3), min_size=1, max_size=8),
    costs=st.tuples(st.just(0.0), st.floats(0.0, 60.0), st.floats(0.0, 60.0)),
    ahead=st.integers(1, 100),
    band=st.floats(0.0, 5.0),
)
def test_a_change_that_is_worth_making_saves_more_than_its_band_its_cost_and_what_is_unsure(
    each: list[list[float]], costs: tuple[float, ...], ahead: int, band: float
) -> None:
    weighed = SplitSavings((HERE, BETTER, WORSE), 0, np.array(each), np.array(costs), ahead, band)
    best = weighed.best
    if best == weighed.here:
        assert "would " in weighed.why_not()
    else:
        assert weighed.saved[best] > band
        assert (weighed.saved[best] - weighed.unsure[best]) * ahead > costs[best]


def test_a_change_that_saves_less_than_the_dead_band_does_not_stand_in_the_way_of_one_that_saves_more() -> None:
    each = np.tile([8.0, 7.7, 7.5], (4, 1))
    assert SplitSavings((HERE, BETTER, WORSE), 0, each, np.array([0.0, 0.0, 3.0]), 12, 0.4).best == 2


def test_one_lucky_step_moves_nothing_and_a_steady_gain_does() -> None:
    here, cost = np.full(8, 10.0), np.zeros(2)
    lucky, steady = here.copy(), here - 1.0
    lucky[0] = 2.0
    assert SplitSavings((HERE, BETTER), 0, np.stack([here, lucky], axis=1), cost, 12, 0.1).best == 0
    assert SplitSavings((HERE, BETTER), 0, np.stack([here, steady], axis=1), cost, 12, 0.1).best == 1


@given(produced=st.lists(st.floats(2.0, 60.0), min_size=1, max_size=12), cost=st.floats(0.0, 60.0))
def test_where_a_live_job_keeps_its_split_the_reason_tells_of_another_one(produced: list[float], cost: float) -> None:
    bounds = SplitBounds(6, 1, 1, (1, 2), True, False)
    live, now = dynamic(PolicyStart(HERE, 8, 8)), HERE
    history: list[MeasuredStep] = []
    for step, seconds in enumerate(produced):
        lengths = (40.0, 80.0, 200.0)
        history.append(
            MeasuredStep(step, now, lengths, (20.0,) * 3, sum(lengths), seconds, 2.0, 0.5, (), {})
        )  # fmt: skip
        decision = live.plan(Situation(bounds, now, tuple(history), SwitchCosts(cost, 2 * cost), 100))
        if decision.split == now:
            assert "would " in decision.reason
        now = decision.split


def test_a_stretch_goes_on_until_something_moves_between_two_steps() -> None:
    moves, stay = Moves(), None
    for step in range(1, 4):
        stay = extend_stay(stay, moves, at(step), f"why {step}")
    assert (stay.since, stay.step, stay.reason, stay.began) == (1, 3, "why 3", 101.0)
    lent = moves.plus(moved(3, MoveKind.LEND))
    assert extend_stay(stay, lent, at(4), "why").since == 1
    assert extend_stay(stay, lent.plus(moved(4)), at(5), "why").since == 5
    assert extend_stay(stay, moves, at(2, seq=9), "rolled back").since == 2


@given(st.lists(st.tuples(st.booleans(), st.text(max_size=800)), max_size=60))
def test_the_record_keeps_the_newest_stretches_only_and_each_is_small(decisions: list[tuple[bool, str]]) -> None:
    moves, stay = Moves(), None
    for step, (moves_now, why) in enumerate(decisions):
        if moves_now:
            moves = moves.plus(moved(step))
        else:
            stay = extend_stay(stay, moves, at(step), why)
            moves = add_stay(moves, stay)
    assert len(moves.stays) <= NEWEST_STAYS
    assert [one.began for one in moves.stays] == sorted({one.began for one in moves.stays})
    assert all(len(one.model_dump_json().encode()) <= MOST_STAY_BYTES for one in moves.stays)
    assert stay is None or moves.stays[-1] == stay


@given(
    steps=st.lists(st.tuples(st.none() | st.floats(0.1, 1e3), st.none() | st.floats(0.1, 1e3)), min_size=1, max_size=30)
)
def test_each_step_of_which_something_was_expected_is_compared_once(
    steps: list[tuple[float | None, float | None]],
) -> None:
    """`steps`: what was expected of each, and what it took."""
    took: dict[int, float | None] = {}
    staying, moves = HoldLog(FakeClock(), lambda step, after: took.get(step)), Moves()
    for step, (expected, _) in enumerate(steps):
        took[step] = steps[step - 1][1]
        staying.note(moves, at(step), "why", expected)
        moves = staying.with_newest_stay(moves, at_once=True)
    took[len(steps)] = steps[-1][1]
    for _ in range(2):
        moves = staying.with_newest_stay(moves, at_once=True)
    told = moves.stays[-1].foretold
    both = [(expected, took) for expected, took in steps if expected is not None and took is not None]
    assert told.steps == len(both)
    assert told.expected_s == pytest.approx(sum(expected for expected, _ in both), abs=0.1)
    assert told.took_s == pytest.approx(sum(took for _, took in both), abs=0.1)
    assert told.off_s == pytest.approx(sum(abs(took - expected) for expected, took in both), abs=0.1)


async def test_a_step_before_which_another_controller_planned_is_compared_too_and_one_that_was_rolled_back_is_not() -> (
    None
):
    first, moves = HoldLog(FakeClock(), unknown), Moves()
    first.note(moves, at(1), "why", 2.0)
    moves = first.with_newest_stay(moves, at_once=True)
    asked: list[tuple[int, int]] = []

    def took(step: int, after: int) -> float | None:
        asked.append((step, after))
        return 3.0 if step == 2 else None

    other = HoldLog(FakeClock(), took)
    other.note(moves, at(2, seq=7), "why", 2.5)
    (stay,) = other.with_newest_stay(moves, at_once=True).stays
    assert (stay.foretold.steps, stay.foretold.took_s, stay.foretold.off_s) == (1, 3.0, 1.0)
    assert asked == [(2, 1), (3, 7)]
    assert extend_stay(stay, moves, at(1, seq=9), "rolled back").foretold == ForecastAccuracy()


@pytest.mark.parametrize("expected", [float("nan"), float("inf"), None])
def test_non_finite_expectations_are_not_compared(expected: float | None) -> None:
    stay = extend_stay(None, Moves(), at(1), "why", expected)
    assert stay.expected_s is None
    assert add_taken(stay, 2.0) == stay


async def test_the_store_is_told_at_once_where_a_stretch_begins_and_then_now_and_then() -> None:
    clock = FakeClock()
    staying, moves = HoldLog(clock, unknown), Moves()
    staying.note(moves, at(1), "why 1", None)
    moves = staying.with_newest_stay(moves, at_once=False)
    assert [one.step for one in moves.stays] == [1]
    assert staying.with_newest_stay(moves, at_once=False) is moves
    staying.note(moves, at(2), "why 2", None)
    assert staying.with_newest_stay(moves, at_once=False) is moves
    assert [one.step for one in staying.with_newest_stay(moves, at_once=True).stays] == [2]
    await clock.advance(TELL_S)
    assert [one.reason for one in staying.with_newest_stay(moves, at_once=False).stays] == ["why 2"]
    other = HoldLog(clock, unknown)  # another controller plans, and goes on with the stretch
    other.note(moves, at(5), "why 5", None)
    assert [(one.since, one.step) for one in other.with_newest_stay(moves, at_once=True).stays] == [(1, 5)]
    other.forget()
    assert other.with_newest_stay(moves, at_once=True) is moves


def test_the_runs_folder_has_a_stretch_once_it_is_over_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    file, first = MovesFile(tmp_path), extend_stay(None, Moves(), at(1), "why")
    moves = add_stay(Moves(), first)
    file.keep(moves)
    assert read_stays(tmp_path / NAME) == []
    longer = extend_stay(first, moves, at(3), "why")
    moves = add_stay(add_stay(moves, longer).plus(moved(3)), extend_stay(longer, moves.plus(moved(3)), at(4), "why"))
    for _ in range(2):
        file.keep(moves)
        MovesFile(tmp_path).keep(moves)
    assert read_stays(tmp_path / NAME) == [longer]
    file.keep(moves, to_the_end=True)
    assert [(one.since, one.step) for one in read_stays(tmp_path / NAME)] == [(1, 3), (4, 4)]
    assert read_moves(tmp_path / NAME) == [moved(3)]
    assert len((tmp_path / NAME).read_text().splitlines()) == 3


def test_a_stretch_is_written_once_whatever_the_clock_says_of_those_before_it(tmp_path: Path) -> None:
    """Another node leads, whose clock is an hour behind."""
    file, moves = MovesFile(tmp_path), Moves()
    for step in range(1, 2 * NEWEST_STAYS):
        behind = 3600.0 * (step > NEWEST_STAYS)
        moves = add_stay(moves, HoldPeriod(since=step, step=step, seq=step, began=9000.0 + step - behind))
        file.keep(moves)
    lines = (tmp_path / NAME).read_text().splitlines()
    assert len(lines) == len(set(lines)) == 2 * NEWEST_STAYS - 2


def test_the_account_tells_of_stretches_between_the_moves() -> None:
    before = HoldPeriod(since=1, step=2, reason=f"{BETTER} would save 0.10 s", began=101.0, time=102.0)
    before = add_taken(add_taken(before.model_copy(update={"expected_s": 4.0}), 5.0), 5.0)
    before = add_taken(before.model_copy(update={"step": 3, "expected_s": 6.0}), 5.0).model_copy(update={"step": 2})
    after = HoldPeriod(since=4, step=4, reason="[red] all\nis well", began=104.0, time=104.0)
    told = placement_story("j", None, [moved(3)], 0, [before, after])
    assert (
        told[2] == f"00:01:41 UTC, after steps 1 to 2: nothing moved, the last time because {BETTER} would save 0.10 s."
    )
    assert (
        told[3]
        == "  Measured: the 2 steps that followed took 10.0 s where 10.0 s were expected, each off by 20% on average."
    )
    assert told[5].startswith("00:01:43 UTC, after step 3: went from")
    assert told[-1] == r"00:01:44 UTC, after step 4: nothing moved, because [red] all\nis well."
    assert [one["kind"] for one in history_tree([moved(3)], [before, after])] == ["stay", "split", "stay"]
    assert placement_story("j", None, [], 0, [before])[1] == "There were no moves."
