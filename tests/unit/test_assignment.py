"""Who works on which shard: sticky, balanced, few moves."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from controllers.assignment import assign_shards

names = st.lists(st.sampled_from([f"n{i}.x" for i in range(8)]), min_size=1, max_size=8, unique=True)


def loads(assignment, members) -> list[int]:
    return [len(assignment.shards_of(m)) for m in members]


@given(names, st.integers(1, 80))
def test_every_shard_has_an_owner_and_loads_differ_by_one(members: list[str], shards: int) -> None:
    assignment = assign_shards(members, shards, None)
    assert None not in assignment.owners
    assert max(loads(assignment, members)) - min(loads(assignment, members)) <= 1


@given(names, names, st.integers(1, 80))
def test_it_stays_balanced_through_any_change(first: list[str], second: list[str], shards: int) -> None:
    assignment = assign_shards(second, shards, assign_shards(first, shards, None))
    assert None not in assignment.owners
    assert max(loads(assignment, second)) - min(loads(assignment, second)) <= 1


@given(st.integers(1, 7), st.integers(1, 80))
def test_on_a_join_few_shards_move(count: int, shards: int) -> None:
    members = [f"n{i}.x" for i in range(count)]
    old = assign_shards(members, shards, None)
    new = assign_shards([*members, "new.y"], shards, old)
    moved = sum(old.owner(s) != new.owner(s) for s in range(shards))
    assert moved <= math.ceil(shards / (count + 1)) + count


@given(names, st.integers(1, 80))
def test_nothing_moves_when_nothing_changed(members: list[str], shards: int) -> None:
    old = assign_shards(members, shards, None)
    assert assign_shards(list(reversed(members)), shards, old) == old


def test_at_first_shards_are_dealt_out_in_turn() -> None:
    assignment = assign_shards(["a.1", "b.1"], 8, None)
    assert assignment.shards_of("a.1") == (0, 2, 4, 6)


def test_without_members_shards_are_nobodys() -> None:
    assert assign_shards([], 3, None).owners == (None, None, None)
