"""Limits for streams: in total, and for one user."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from controllers.api.edge.access import NOBODY_IS_TOLD_APART, Caller, Role, acting_as
from controllers.api.edge.errors import Exhausted
from controllers.api.edge.server import StreamLimiter

ANN, BOB = (Caller(name, Role.VIEWER, frozenset({"a"})) for name in ("ann", "bob"))


def take(room: StreamLimiter, one: Caller, stack: ExitStack) -> None:
    with acting_as(one):
        stack.enter_context(room.place())


def test_user_gets_at_most_half_of_the_streams_and_closed_streams_are_free_again() -> None:
    room = StreamLimiter(4)
    with ExitStack() as held:
        with ExitStack() as of_ann:
            take(room, ANN, of_ann)
            take(room, ANN, of_ann)
            with pytest.raises(Exhausted, match="ann already has 2 streams here"):
                take(room, ANN, of_ann)
            take(room, BOB, held)
            take(room, BOB, held)
            with pytest.raises(Exhausted, match="already serves its maximum of 4 streams"):
                take(room, Caller("eve", Role.ADMIN), held)
        take(room, ANN, held)
    assert room.taken == 0


@pytest.mark.parametrize("one", [NOBODY_IS_TOLD_APART, Caller("node-1", Role.NODE)])
def test_where_nobody_is_told_apart_and_for_daemons_all_places_count(one: Caller) -> None:
    room = StreamLimiter(3)
    with ExitStack() as held:
        for _ in range(3):
            take(room, one, held)
        with pytest.raises(Exhausted, match="already serves its maximum of 3 streams"):
            take(room, one, held)


def test_where_there_is_one_place_it_is_anybodys() -> None:
    room = StreamLimiter(1)
    with ExitStack() as held:
        take(room, ANN, held)
    with ExitStack() as held:
        take(room, BOB, held)
