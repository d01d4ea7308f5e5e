"""From a split to slots: no slot twice, work for every pool, whole nodes for a group, and no needless move."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gcore.ledger.records.cluster import Slot
from gcore.ledger.records.job import Plan
from placement.assign import (
    POOLS,
    Dealt,
    assign_split,
    deal_replicas,
    plan_roles,
    role_changes,
    sort_by_unlikeness,
    split_of,
)
from placement.slots import NodeSlots, ReplicaSizes, Snapshot, Split, SplitBounds, feasible

JUDGES = ("j", "k")


def cluster(*sizes: int) -> Snapshot:
    return Snapshot(tuple(NodeSlots(f"n{i}", tuple(f"cpu:{s}" for s in range(size))) for i, size in enumerate(sizes)))


CLUSTERS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(lambda sizes: cluster(*sizes))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Snapshot, Split, Split]:
    snapshot = draw(CLUSTERS)
    bounds = SplitBounds(snapshot.slots, train_sizes=tuple(range(1, snapshot.slots + 1)))
    splits = list(feasible(bounds))
    assume(splits)
    return snapshot, draw(st.sampled_from(splits)), draw(st.sampled_from(splits))


def plan_of(split: Split, snapshot: Snapshot, current: Plan | None = None, world: str = "w") -> Plan:
    generation = 1 if current is None else current.generation + 1
    plan = assign_split(split, current, snapshot, JUDGES, world=world, generation=generation)
    assert plan is not None
    return plan


def check(plan: Plan, split: Split) -> None:
    places = [(p.node, p.slot, p.judge) for p in plan.engines]
    ranks = [(p.node, p.slot) for p in plan.ranks]
    assert len(set(places)) == len(places)
    assert len(set(ranks)) == len(ranks) == split.train
    assert split_of(plan) == split
    if split.mode == "coexisting":
        of_slot: dict[tuple[str, str], set[str]] = {(p.node, p.slot): {"train"} for p in plan.ranks}
        for place in plan.engines:
            if not place.asleep:
                of_slot.setdefault((place.node, place.slot), set()).add(place.pool)
        assert all(len(pools) == 1 for pools in of_slot.values()), "a slot serves one pool at a time"
    for judge in ("", *JUDGES):
        assert any(p.judge == judge and not p.asleep for p in plan.engines), "every pool with work has a replica"


@given(situations())
def test_a_slot_serves_one_pool_and_every_pool_with_work_has_a_replica(given_: tuple[Snapshot, Split, Split]) -> None:
    snapshot, first, second = given_
    plan = plan_of(first, snapshot)
    check(plan, first)
    check(plan_of(second, snapshot, plan, "w" if second.train == first.train else "x"), second)


@given(situations())
def test_nothing_moves_when_nothing_changed(given_: tuple[Snapshot, Split, Split]) -> None:
    snapshot, first, second = given_
    plan = plan_of(second, snapshot, plan_of(first, snapshot), "x")
    again = plan_of(second, snapshot, plan, "x")
    assert again.engines == plan.engines
    assert again.ranks == plan.ranks
    assert role_changes(plan, again) == []


@given(situations())
def test_as_few_slots_as_possible_change_their_role(given_: tuple[Snapshot, Split, Split]) -> None:
    snapshot, first, second = given_
    assume(first.mode == second.mode == "coexisting")
    plan = plan_of(first, snapshot)
    moved = plan_of(second, snapshot, plan, "x")
    grown = sum(max(0, getattr(second, pool) - getattr(first, pool)) for pool in POOLS)
    changed = [line for line in role_changes(plan, moved) if not line.endswith("nothing")]
    assert len(changed) == grown


@given(situations())
def test_the_ranks_of_a_world_stay_while_their_number_does(given_: tuple[Snapshot, Split, Split]) -> None:
    snapshot, first, second = given_
    plan = plan_of(first, snapshot)
    moved = assign_split(second, plan, snapshot, JUDGES, world="w", generation=2)
    if second.train != first.train:
        assert moved is None
    else:
        assert moved is not None
        assert moved.ranks == plan.ranks


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_a_tensor_parallel_group_lies_on_one_node(
    nodes: list[int], rollout: int, reward: int, train: int, seed: int
) -> None:
    snapshot, sizes = cluster(*nodes), ReplicaSizes(rollout, reward)
    bounds = SplitBounds(snapshot.slots, rollout, reward, (train,), colocated=False)
    splits = list(feasible(bounds))
    assume(splits)
    now: Dealt = {}
    for turn in range(2):
        split = splits[(seed + turn * 7) % len(splits)]
        found = deal_replicas(split, now, snapshot, sizes)
        if found is None:
            return
        slots = [slot for replicas in found.values() for replica in replicas for slot in replica]
        assert len(set(slots)) == len(slots)
        for pool in POOLS:
            assert all(len(replica) == sizes.of(pool) for replica in found[pool])
            assert all(len({slot.node for slot in replica}) == 1 for replica in found[pool])
            assert sum(map(len, found[pool])) == getattr(split, pool)
        assert deal_replicas(split, found, snapshot, sizes) == found
        now = found


def test_groups_that_no_node_holds_cannot_be_placed() -> None:
    assert deal_replicas(Split("coexisting", 4, 0, 1), {}, cluster(3, 2), ReplicaSizes(rollout=4)) is None


def test_each_node_keeps_an_engine_of_the_policy_while_there_are_enough() -> None:
    snapshot = cluster(4, 4)
    plan = plan_of(Split("coexisting", 6, 1, 1), snapshot)
    for rollout in (5, 4, 3, 2):
        plan = plan_of(Split("coexisting", rollout, 7 - rollout, 1), snapshot, plan)
        assert plan.rollout_nodes == {"n0", "n1"}


def test_to_change_over_is_to_sleep_and_to_wake() -> None:
    snapshot = cluster(3)
    before = plan_of(Split("coexisting", 1, 1, 1), snapshot)
    resident = {(p.node, p.slot, p.judge) for p in before.engines}
    assert len(resident) == 2 * 3
    assert sum(p.asleep for p in before.engines) == 1 + 2
    bigger = cluster(4)
    after = plan_of(Split("coexisting", 1, 2, 1), bigger, before)
    assert resident < {(p.node, p.slot, p.judge) for p in after.engines}
    assert role_changes(before, after) == ["n0/cpu:3 nothing -> reward"]


def test_engines_of_a_node_that_is_away_keep_their_places_until_there_is_a_new_world() -> None:
    before = plan_of(Split("coexisting", 2, 1, 1), cluster(2, 2))
    left = cluster(2)
    bounds = SplitBounds(2, train_sizes=(1,), colocated=False)
    assert sort_by_unlikeness(split_of(before, left), bounds) == [], (
        "a rank, a judge and an engine do not fit on two slots"
    )
    there = Split("coexisting", 1, 0, 1)
    plan = assign_split(there, before, left, (), world="w", generation=2)
    assert plan is not None
    assert {p.node for p in plan.engines} == {"n0", "n1"}
    anew = assign_split(there, before, left, (), world="x", generation=2)
    assert anew is not None
    assert {p.node for p in anew.engines} == {"n0"}


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(Split("coexisting", 4, 2, 2), Split("coexisting", 3, 1, 2), id="the train world stays"),
        pytest.param(Split("colocated", 8, 8, 2), Split("colocated", 6, 6, 2), id="the mode stays"),
    ],
)
def test_nearest_splits_change_the_train_world_last(now: Split, expected: Split) -> None:
    bounds = SplitBounds(6, train_sizes=(1, 2))
    found, *others = sort_by_unlikeness(now, bounds)
    assert (found.mode, found.train) == (expected.mode, expected.train)
    assert sort_by_unlikeness(found, bounds)[0] == found
    assert {found, *others} == set(feasible(bounds))


def test_a_plan_says_which_slots_have_which_role() -> None:
    plan = plan_of(Split("coexisting", 1, 1, 1), cluster(3))
    assert {pool: len(found) for pool, found in plan_roles(plan).items()} == {"train": 1, "reward": 1, "rollout": 1}
    assert str(Slot("n", "cpu:0")) == "n/cpu:0"
