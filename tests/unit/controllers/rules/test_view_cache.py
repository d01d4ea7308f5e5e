"""A cached value is recomputed exactly when one of its input records is a different object."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controllers.rules.view import Memo


def test_the_same_records_are_worked_on_once() -> None:
    one, other = object(), object()
    remembered, worked = Memo(), []

    def work() -> int:
        worked.append(len(worked))
        return len(worked)

    assert [remembered.get("a", (one, other), work) for _ in range(3)] == [1, 1, 1]
    assert remembered.get("b", (one, other), work) == 2
    assert remembered.get("a", (other, one), work) == 3
    assert remembered.get("a", (one,), work) == 4
    assert remembered.get("a", (one, other), work) == 5  # only the newest is kept


def test_an_equal_record_is_another_one() -> None:
    remembered = Memo()
    first, equal = [1], [1]
    assert remembered.get("a", (first,), lambda: "first") == remembered.get("a", (first,), lambda: "again") == "first"
    assert remembered.get("a", (equal,), lambda: "equal") == "equal"


def test_nothing_is_a_record_too() -> None:
    remembered = Memo()
    assert remembered.get("a", (None,), lambda: 1) == 1
    assert remembered.get("a", (None,), lambda: 2) == 1
    assert remembered.get("a", (object(),), lambda: 3) == 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.tuples(st.integers(0, 2), st.integers(0, 2))), max_size=60))
def test_cached_value_always_equals_the_recomputed_one(asked: list[tuple[str, tuple[int, int]]]) -> None:
    records = [object() for _ in range(3)]
    remembered = Memo()
    for name, (first, second) in asked:
        sources = (records[first], records[second])
        assert remembered.get(name, sources, lambda name=name, s=sources: (name, s)) == (name, sources)  # type: ignore[misc]
