"""The assignment of shards to controllers: sticky, balanced, few moves."""

from __future__ import annotations

import math

import pytest
from builders import ME, PEER, SPEC, running_job, stored, with_mirror
from hypothesis import given
from hypothesis import strategies as st

from controllers.rules.actions import AssignShards
from controllers.rules.decide import MEMBERS_PATIENCE_S, assign_shards, shard_assignment
from gcore.ledger.records.chain import Assignment
from gcore.ledger.transactions import Versioned

names = st.lists(st.sampled_from([f"n{i}.x" for i in range(8)]), min_size=1, max_size=8, unique=True)


def loads(assignment, members) -> list[int]:
    return [len(assignment.shards_of(m)) for m in members]


@given(names, st.integers(1, 80))
def test_every_shard_has_an_owner_and_loads_differ_by_one(members: list[str], shards: int) -> None:
    assignment = shard_assignment(members, shards, None)
    assert None not in assignment.owners
    assert max(loads(assignment, members)) - min(loads(assignment, members)) <= 1


@given(names, names, st.integers(1, 80))
def test_it_stays_balanced_through_any_change(first: list[str], second: list[str], shards: int) -> None:
    assignment = shard_assignment(second, shards, shard_assignment(first, shards, None))
    assert None not in assignment.owners
    assert max(loads(assignment, second)) - min(loads(assignment, second)) <= 1


@given(st.integers(1, 7), st.integers(1, 80))
def test_on_a_join_few_shards_move(count: int, shards: int) -> None:
    members = [f"n{i}.x" for i in range(count)]
    old = shard_assignment(members, shards, None)
    new = shard_assignment([*members, "new.y"], shards, old)
    moved = sum(old.owner(s) != new.owner(s) for s in range(shards))
    assert moved <= math.ceil(shards / (count + 1)) + count


histories = st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=30)


@given(histories, st.integers(1, 200))
def test_through_any_history_of_joins_and_leaves_loads_differ_by_one_and_few_shards_move(
    history: list[tuple[bool, int]], shards: int
) -> None:
    members: list[str] = ["first.0"]
    assignment = shard_assignment(members, shards, None)
    for number, (joins, which) in enumerate(history):
        before = list(members)
        if joins or len(members) == 1:
            members.append(f"n{which}.{number}")
        else:
            members.pop(which % len(members))
        old, assignment = assignment, shard_assignment(members, shards, assignment)
        moved = [s for s in range(shards) if old.owner(s) != assignment.owner(s)]
        assert None not in assignment.owners
        assert max(loads(assignment, members)) - min(loads(assignment, members)) <= 1
        if len(members) > len(before):
            count = len(before)
            assert len(moved) <= math.ceil(shards / (count + 1)) + count
            assert {assignment.owner(s) for s in moved} <= {members[-1]}  # to who has come, and to nobody else
        else:
            gone = set(before) - set(members)
            assert {old.owner(s) for s in moved} == gone & {old.owner(s) for s in range(shards)}  # of who has gone only


@given(names, st.integers(1, 80))
def test_a_restart_of_one_moves_its_shards_only(members: list[str], shards: int) -> None:
    """It comes back under another name: that is a leave and a join in one."""
    old = shard_assignment(members, shards, None)
    after = [*members[1:], f"{members[0]}.again"]
    new = shard_assignment(after, shards, old)
    moved = {old.owner(s) for s in range(shards) if old.owner(s) != new.owner(s)}
    assert moved <= {members[0]}


@given(names, st.integers(1, 80))
def test_nothing_moves_when_nothing_changed(members: list[str], shards: int) -> None:
    old = shard_assignment(members, shards, None)
    assert shard_assignment(list(reversed(members)), shards, old) == old


def test_at_first_shards_are_dealt_out_in_turn() -> None:
    assignment = shard_assignment(["a.1", "b.1"], 8, None)
    assert assignment.shards_of("a.1") == (0, 2, 4, 6)


def test_without_members_shards_are_nobodys() -> None:
    assert shard_assignment([], 3, None).owners == (None, None, None)


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("first", [None, stored(shard_assignment([], 4, None))], ids=["none", "without members"])
def test_the_first_member_of_a_job_with_pictures_waits_a_little_for_the_other_nodes(
    pictures: bool, first: Versioned[Assignment] | None
) -> None:
    data = SPEC.data.model_copy(update={"images": "images"} if pictures else {})
    view = running_job(SPEC.model_copy(update={"data": data}), engines=True)
    alone = with_mirror(view, assign=first, members={ME: view.mirror.members[ME]})
    together = with_mirror(view, assign=first)
    waits = MEMBERS_PATIENCE_S if pictures else 0.1
    for seen, members, after in ((alone, (ME,), waits), (together, (ME, PEER), 0.1)):
        (intent,) = assign_shards(seen)
        assert isinstance(intent.action, AssignShards)
        assert (intent.action.assignment.members, intent.after) == (members, after)
    left = with_mirror(view, members={ME: view.mirror.members[ME]})
    assert [intent.after for intent in assign_shards(left)] == [0.1], "a lost member's prompts are assigned at once"
