"""The cursor is a set of positions, kept small."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import Cursors, ShardCursor, StreamShape, shard_lengths
from gcore.types import PromptRef

positions = st.sets(st.integers(0, 60))


def marked(done: list[int]) -> ShardCursor:
    cursor = ShardCursor()
    for position in done:
        cursor = cursor.mark(position)
    return cursor


@given(positions.flatmap(lambda chosen: st.permutations(sorted(chosen))))
def test_a_cursor_is_the_set_of_what_was_marked_in_whatever_order(done: list[int]) -> None:
    cursor = marked(done)
    assert {position for position in range(100) if cursor.is_terminal(position)} == set(done)
    assert cursor == marked(sorted(done))
    assert cursor.terminal_count == len(done)


@given(positions)
def test_the_low_water_mark_is_the_first_position_without_an_outcome(done: set[int]) -> None:
    cursor = marked(sorted(done))
    assert cursor.low_water == next(position for position in range(100) if position not in done)
    assert not cursor.beyond & 1


@given(positions.filter(bool), st.data())
def test_no_position_ends_twice(done: set[int], data: st.DataObject) -> None:
    with pytest.raises(ValueError, match="already terminal"):
        marked(sorted(done)).mark(data.draw(st.sampled_from(sorted(done))))


@given(st.lists(positions, min_size=1, max_size=6))
def test_cursors_come_back_from_their_text(shards: list[set[int]]) -> None:
    cursors = Cursors(tuple(marked(sorted(done)) for done in shards))
    assert Cursors.decode(cursors.encode()) == cursors


@pytest.mark.parametrize("damaged", [[1], [None, "4"], [["4"]], ["x"], ["4+x"]], ids=str)
def test_what_is_no_cursor_is_refused(damaged: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"cursor|invalid literal"):
        Cursors.decode(damaged)


def test_a_shard_consumed_in_order_takes_a_number_however_far_it_is() -> None:
    assert Cursors((ShardCursor(10**12),)).encode() == ["1000000000000"]
    assert marked(list(range(1000))) == ShardCursor(1000)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple), st.data())
def test_positions_and_refs_are_each_others_inverse(lengths: tuple[int, ...], data: st.DataObject) -> None:
    shape = StreamShape(lengths)
    shard = data.draw(st.integers(0, len(lengths) - 1))
    position = data.draw(st.integers(0, 500))
    ref = shape.ref(shard, position)
    assert 0 <= ref.seq < lengths[shard]
    assert shape.position(ref) == position


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_shards_cover_the_dataset_and_differ_by_at_most_one(prompts: int, shards: int) -> None:
    lengths = shard_lengths(prompts, shards).lengths
    assert sum(lengths) == prompts
    assert len(lengths) == shards
    assert max(lengths) - min(lengths) <= 1


def test_a_union_marks_refs_of_several_shards_and_epochs() -> None:
    shape = StreamShape((2, 3))
    refs = [PromptRef(0, 0, 0), PromptRef(1, 0, 1), PromptRef(0, 1, 2)]
    cursors = Cursors.start(2).union(shape, refs)
    assert cursors.terminal_count == 3
    assert [ref for ref in [*refs, PromptRef(0, 0, 1)] if cursors.is_terminal(shape, ref)] == refs
    assert cursors.shards[0].low_water == 1


@pytest.mark.parametrize(
    "refs",
    [[PromptRef(0, 0, 0)], [PromptRef(0, 1, 0), PromptRef(0, 1, 0)]],
    ids=["terminal before", "twice at once"],
)
def test_a_union_refuses_a_ref_that_would_end_twice(refs: list[PromptRef]) -> None:
    shape = StreamShape((2, 3))
    with pytest.raises(ValueError, match="already terminal"):
        Cursors.start(2).union(shape, [PromptRef(0, 0, 0)]).union(shape, refs)
