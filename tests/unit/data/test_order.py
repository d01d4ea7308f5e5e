"""The cursor is a set of positions, kept small.

The order of a shard: a permutation that depends on its key, on nothing else, and looks random.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.data.order import Cursors, ShardCursor, ShardOrder, StreamShape, entry_index, ref_of_entry, shard_lengths
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
    with pytest.raises(ValueError, match="already has its outcome"):
        marked(sorted(done)).mark(data.draw(st.sampled_from(sorted(done))))


@given(st.lists(positions, min_size=1, max_size=6))
def test_cursors_come_back_from_their_text(shards: list[set[int]]) -> None:
    cursors = Cursors(tuple(marked(sorted(done)) for done in shards))
    assert Cursors.decode(cursors.encode()) == cursors


@pytest.mark.parametrize("damaged", [[1], [None, "4"], [["4"]], ["x"], ["4+x"]], ids=str)
def test_invalid_cursors_are_refused(damaged: list[Any]) -> None:
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
    with pytest.raises(ValueError, match="already has its outcome"):
        Cursors.start(2).union(shape, [PromptRef(0, 0, 0)]).union(shape, refs)


seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 1000)


@given(seeds, epochs, st.integers(0, 1000), st.integers(1, 300))
def test_every_place_comes_exactly_once(seed: int, epoch: int, shard: int, length: int) -> None:
    order = ShardOrder(seed, epoch, shard, length)
    assert sorted(order.index(seq) for seq in range(length)) == list(range(length))


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 4097])
def test_every_place_comes_exactly_once_at_every_short_length_and_around_powers_of_two(length: int) -> None:
    order = ShardOrder(7, 0, 3, length)
    assert sorted(order.index(seq) for seq in range(length)) == list(range(length))


@given(seeds, epochs, st.integers(1, 2**40), st.data())
def test_seq_is_the_inverse_of_index_at_any_size(seed: int, epoch: int, length: int, data: st.DataObject) -> None:
    order = ShardOrder(seed, epoch, 0, length)
    seq = data.draw(st.integers(0, length - 1))
    assert 0 <= order.index(seq) < length
    assert order.seq(order.index(seq)) == seq
    assert order.index(order.seq(seq)) == seq


@pytest.mark.parametrize("place", [-1, 5, 10**12])
def test_a_place_outside_the_shard_is_refused(place: int) -> None:
    order = ShardOrder(0, 0, 0, 5)
    with pytest.raises(IndexError, match="shard has 5 prompts"):
        order.index(place)
    with pytest.raises(IndexError, match="shard has 5 prompts"):
        order.seq(place)


def test_an_empty_shard_has_no_first_place() -> None:
    with pytest.raises(IndexError):
        ShardOrder(0, 0, 0, 0).index(0)


@pytest.mark.parametrize(
    "other",
    [ShardOrder(2, 0, 0, 200), ShardOrder(1, 1, 0, 200), ShardOrder(1, 0, 1, 200)],
    ids=["seed", "epoch", "shard"],
)
def test_another_key_gives_another_order(other: ShardOrder) -> None:
    first = ShardOrder(1, 0, 0, 200)
    same = sum(first.index(seq) == other.index(seq) for seq in range(200))
    assert same < 10, "two random orders of 200 agree in about one place"


@pytest.mark.parametrize("length", [2, 3, 5, 6], ids=str)
def test_every_order_of_a_short_shard_comes_about_equally_often(length: int) -> None:
    # The orders of keys 0..n are a fixed list, so this holds always or never. At least ten of each permutation are
    # expected; the bound is four standard deviations above the mean of chi-square.
    permutations = 1
    for factor in range(2, length + 1):
        permutations *= factor
    keys = max(600, permutations * 10)
    counts = Counter(tuple(map(ShardOrder(key, 0, 0, length).index, range(length))) for key in range(keys))
    expected = keys / permutations
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    chi_square += expected * (permutations - len(counts))
    freedom = permutations - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_neighbours_are_scattered() -> None:
    order = ShardOrder(11, 0, 0, 10_000)
    places = [order.index(seq) for seq in range(10_000)]
    ascents = sum(a < b for a, b in itertools.pairwise(places))
    assert abs(ascents - 5000) < 4 * 29, "a random order of n has n/2 ascents, with a standard deviation of √(n/12)"
    distance = sum(abs(a - b) for a, b in itertools.pairwise(places)) / 9999
    assert abs(distance - 10_000 / 3) < 100


def test_an_order_never_changes_between_versions_and_processes() -> None:
    # Jobs that run across an upgrade, and audits of old ones, rely on these numbers.
    program = (
        "from gcore.data.order import ShardOrder;"
        "print([ShardOrder(42, 1, 3, 10).index(s) for s in range(10)], ShardOrder(0, 0, 0, 10**6).index(123456))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert out == "[1, 0, 9, 5, 3, 8, 2, 6, 4, 7] 481852"


@given(st.integers(1, 400), st.integers(1, 40), seeds, st.integers(0, 3))
def test_an_epoch_goes_through_the_whole_dataset_once(prompts: int, shards: int, seed: int, epoch: int) -> None:
    shape = shard_lengths(prompts, shards)
    refs = [PromptRef(epoch, shard, seq) for shard in range(shards) for seq in range(shape.lengths[shard])]
    entries = [entry_index(shape, seed, ref) for ref in refs]
    assert sorted(entries) == list(range(prompts))
    assert [ref_of_entry(shape, seed, epoch, entry) for entry in entries] == refs
    assert all(entry % shards == ref.shard for entry, ref in zip(entries, refs, strict=True))


@pytest.mark.parametrize(
    "ref", [PromptRef(0, 2, 0), PromptRef(0, -1, 0), PromptRef(0, 0, 5), PromptRef(0, 0, -1)], ids=str
)
def test_a_ref_outside_the_stream_is_refused(ref: PromptRef) -> None:
    with pytest.raises(IndexError):
        entry_index(shard_lengths(9, 2), 0, ref)


@pytest.mark.parametrize("entry", [-1, 9, 100])
def test_an_entry_outside_the_dataset_is_refused(entry: int) -> None:
    with pytest.raises(IndexError):
        ref_of_entry(shard_lengths(9, 2), 0, 0, entry)
