"""The assertions about the slot accounting of whole runs detect wrong records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from booked_run import check_sums

from gcore.ledger.records.slot_accounting import AccountLine, Span, StepAccount
from gcore.types import Version

WORK, REST = "busy rollout", "idle rollout tail"
SPANS = {
    "cpu:0": (Span(0.0, 3.0, {WORK: 3.0}), Span(3.0, 4.0, {REST: 0.9})),
    "cpu:1": (Span(0.0, 4.0, {WORK: 1.0, REST: 3.0}),),
}


def line() -> AccountLine:
    """Two slots for four seconds, a tenth of it unbooked."""
    book = StepAccount(
        version=Version(0, 1), began=9.0, seconds=4.0, slots=2, booked={WORK: 4.0, REST: 3.9}, unbooked=0.1
    )
    return AccountLine("n", book, (), SPANS)


def booked(**update: object) -> AccountLine:
    return replace(line(), book=line().book.model_copy(update=update))


def spanned(slot: str, *spans: Span) -> AccountLine:
    return replace(line(), spans={**SPANS, slot: spans})


def test_books_that_sum_are_right() -> None:
    check_sums([line()])


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(lambda: booked(booked={WORK: 4.0, REST: 2.9}, unbooked=1.1), id="a second is not booked"),
        pytest.param(lambda: booked(booked={WORK: 5.0, REST: 2.9}), id="it is booked to another state"),
        pytest.param(lambda: booked(seconds=5.0, unbooked=2.1), id="the step was longer"),
        pytest.param(lambda: booked(slots=3, unbooked=4.1), id="a slot is missing"),
        pytest.param(lambda: spanned("cpu:0", *SPANS["cpu:0"][:1]), id="a span is missing"),
        pytest.param(lambda: spanned("cpu:1", Span(0.0, 4.0, {WORK: 2.0, REST: 3.0})), id="more than there was"),
        pytest.param(
            lambda: spanned("cpu:0", Span(0.0, 2.9, {WORK: 3.0}), SPANS["cpu:0"][1]), id="a gap between spans"
        ),
    ],
)
def test_books_that_do_not_are_noticed(forged: Callable[[], AccountLine]) -> None:
    with pytest.raises(AssertionError):
        check_sums([forged()])
