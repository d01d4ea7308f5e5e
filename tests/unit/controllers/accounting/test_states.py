"""Slot accounting: times sum exactly, no time is negative, and the order of the workers' reports does not matter."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.accounting.states import (
    FAILED,
    MOST_SPANS,
    NOBODY,
    SYNCING,
    UNALLOCATED,
    IdleCause,
    SlotAccount,
    Timeline,
    TimeReport,
    busy,
    idle,
    precedence,
    settle_claims,
    switching,
)
from gcore.types import Pool

POOLS: tuple[Pool, ...] = ("rollout", "reward", "train")
STATES = [
    *(busy(pool) for pool in POOLS),
    *(idle(pool, cause) for pool in POOLS for cause in get_args(IdleCause)),
    *(switching(*pair) for pair in ((NOBODY, "rollout"), ("rollout", "reward"))),
    *(SYNCING, FAILED, UNALLOCATED),
]
CLAIM = st.dictionaries(st.sampled_from(STATES), st.floats(0, 5), max_size=4)


@st.composite
def tellings(draw: st.DrawFn, least: float = 0.0, most: float = 20.0) -> list[TimeReport]:
    """Of several workers, each from one edge to the next, with gaps."""
    found = []
    for number in range(draw(st.integers(0, 3))):
        edges = sorted(draw(st.lists(st.floats(least, most), min_size=2, max_size=6, unique=True)))
        for begin, end in pairwise(edges):
            if draw(st.booleans()):
                found.append(TimeReport(f"worker-{number}", begin, end, draw(CLAIM)))
    return found


@given(length=st.floats(0, 20), claims=st.lists(CLAIM, max_size=4))
def test_booked_time_exceeds_neither_the_period_nor_the_claims(length: float, claims: list[dict[str, float]]) -> None:
    booked = settle_claims(length, claims)
    assert sum(booked.values()) <= length + 1e-9
    assert sum(booked.values()) == pytest.approx(min(length, sum(sum(claim.values()) for claim in claims)))
    for state, seconds in booked.items():
        assert 0 <= seconds <= sum(claim.get(state, 0.0) for claim in claims) + 1e-9


@given(told=tellings(), until=st.floats(0.1, 25))
def test_booked_and_unbooked_are_exactly_the_time_that_passed(told: list[TimeReport], until: float) -> None:
    book = SlotAccount(0.0)
    for one in told:
        book.add(one)
    book.settle(until)
    times = book.close()
    assert sum(times.booked.values()) + times.unbooked == pytest.approx(until)
    assert min([*times.booked.values(), times.unbooked, times.overbooked]) >= 0
    assert times.spans[0].begin == 0.0
    assert times.spans[-1].end == until
    assert all(one.end == other.begin for one, other in pairwise(times.spans))


@given(told=tellings(), until=st.floats(0.1, 25), seed=st.integers(0, 99))
def test_the_order_in_which_workers_tell_is_of_no_matter(told: list[TimeReport], until: float, seed: int) -> None:
    mixed = told[:]
    random.Random(seed).shuffle(mixed)
    books = SlotAccount(0.0), SlotAccount(0.0)
    for book, order in zip(books, (told, mixed), strict=True):
        for one in order:
            book.add(one)
        book.settle(until)
    one, other = (book.close() for book in books)
    assert one.booked == pytest.approx(other.booked)
    assert one.unbooked == pytest.approx(other.unbooked)
    assert one.overbooked == pytest.approx(other.overbooked)


@given(told=tellings(), cuts=st.lists(st.floats(0, 20), max_size=5))
def test_cutting_the_time_into_steps_changes_no_sum(told: list[TimeReport], cuts: list[float]) -> None:
    whole, cut = SlotAccount(0.0), SlotAccount(0.0)
    for one in told:
        whole.add(one)
        cut.add(one)
    whole.settle(21.0)
    total: dict[str, float] = {}
    unbooked = 0.0
    for at in [*sorted(cuts), 21.0]:
        cut.settle(at)
        part = cut.close()
        unbooked += part.unbooked
        for state, seconds in part.booked.items():
            total[state] = total.get(state, 0.0) + seconds
    expected = whole.close()
    # Two tellings of one stretch may have had their turns within it anywhere; what is cut there is told of each side alone.
    assert sum(total.values()) + unbooked == pytest.approx(21.0)
    assert sum(total.values()) == pytest.approx(sum(expected.booked.values()))


def book_of(*told: TimeReport, until: float = 10.0) -> SlotAccount:
    book = SlotAccount(0.0)
    for one in told:
        book.add(one)
    book.settle(until)
    return book


def test_a_rank_that_computes_has_the_slot_whatever_engines_on_it_do() -> None:
    rank = TimeReport("rank", 0, 10, {busy("train"): 4.0, idle("train", "no_work"): 6.0})
    engine = TimeReport("engine", 0, 10, {busy("rollout"): 5.0, idle("rollout", "tail"): 5.0})
    judge = TimeReport("judge", 0, 10, {busy("reward"): 3.0, idle("reward", "no_work"): 7.0})
    times = book_of(rank, engine, judge).close()
    assert times.booked == pytest.approx({busy("train"): 4.0, busy("rollout"): 5.0, busy("reward"): 1.0})


def test_a_slot_is_idle_only_as_far_as_nobody_on_it_was_at_anything() -> None:
    rank = TimeReport("rank", 0, 10, {busy("train"): 4.0, idle("train", "no_work"): 6.0})
    engine = TimeReport("engine", 0, 10, {busy("rollout"): 3.0, idle("rollout", "barrier"): 7.0})
    assert book_of(rank, engine).close().booked == pytest.approx(
        {busy("train"): 4.0, busy("rollout"): 3.0, idle("rollout", "barrier"): 3.0}
    )


def test_sleeping_engine_claims_no_slot_time() -> None:
    times = book_of(TimeReport("engine", 0, 10, {}), TimeReport("judge", 0, 10, {busy("reward"): 10.0})).close()
    assert times.booked == {busy("reward"): 10.0}
    assert times.unbooked == 0


def test_unreported_time_stays_unbooked() -> None:
    times = book_of(TimeReport("engine", 2, 6, {busy("rollout"): 4.0})).close()
    assert (times.booked, times.unbooked) == ({busy("rollout"): 4.0}, 6.0)
    assert [(span.begin, span.end, span.longest(precedence)) for span in times.spans] == [
        (0, 2, ""),
        (2, 6, busy("rollout")),
        (6, 10, ""),
    ]


def test_reports_beyond_a_workers_own_time_are_scaled_down_and_counted() -> None:
    times = book_of(TimeReport("engine", 0, 10, {busy("rollout"): 15.0, SYNCING: 5.0})).close()
    assert times.booked == pytest.approx({busy("rollout"): 7.5, SYNCING: 2.5})
    assert times.overbooked == pytest.approx(10.0)


def test_reports_for_settled_time_are_ignored() -> None:
    book = book_of()
    book.close()
    book.add(TimeReport("engine", 5, 10, {busy("rollout"): 5.0}))
    book.add(TimeReport("engine", 8, 12, {busy("rollout"): 4.0}))
    book.settle(12.0)
    assert book.close().booked == pytest.approx({busy("rollout"): 2.0})


def test_how_long_a_change_of_role_took_is_known_when_it_is_over_also_over_the_end_of_a_step() -> None:
    change = switching("rollout", "reward")
    book = book_of(TimeReport("judge", 6, 10, {change: 4.0}), TimeReport("engine", 0, 6, {busy("rollout"): 6.0}))
    assert book.close().switches == {}
    book.add(TimeReport("judge", 10, 11, {change: 1.0}))
    book.add(TimeReport("judge", 11, 20, {busy("reward"): 9.0}))
    book.settle(20.0)
    assert book.close().switches == {"rollout>reward": (5.0,)}


def test_a_slot_that_flickers_is_told_in_spans_that_are_bounded_and_leave_nothing_out() -> None:
    told = [
        TimeReport("engine", at, at + 1, {busy("rollout") if at % 2 else idle("rollout", "tail"): 1.0})
        for at in range(1000)
    ]
    spans = book_of(*told, until=1000.0).close().spans
    assert len(spans) <= MOST_SPANS
    assert sum(sum(span.seconds.values()) for span in spans) == pytest.approx(1000.0)


def test_every_state_has_a_place_in_the_order() -> None:
    assert sorted(STATES, key=precedence)[0] == busy("train")
    assert max(STATES, key=precedence) == UNALLOCATED
    with pytest.raises(ValueError, match="not in"):
        precedence("busy with other things")


@given(
    marks=st.lists(st.tuples(st.floats(0, 50), st.integers(0, 3)), max_size=8),
    begin=st.floats(0, 60),
    length=st.floats(0.01, 30),
)
def test_a_line_says_what_was_so_at_every_moment(marks: list[tuple[float, int]], begin: float, length: float) -> None:
    line = Timeline(0, 0.0)
    for at, value in sorted(marks):
        line.set(value, at)
    assert sum(seconds for _, seconds in line.between(begin, begin + length)) == pytest.approx(length)
    before = list(line.between(begin, begin + length))
    line.forget(begin)
    assert list(line.between(begin, begin + length)) == before
