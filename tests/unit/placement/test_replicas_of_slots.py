"""Engines that span several slots: on one node each, complete or absent, and on the same slots in every pool."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gcore.errors import SpecError
from gcore.ledger.records.job import EnginePlace, Plan
from placement.assign import assign_split, plan_roles, role_changes, split_of
from placement.placer import fill_plan, first_plan, mend_plan, move_judges, place_split
from placement.request import PlacementRequest
from placement.slots import (
    NodeSlots,
    ReplicaSizes,
    Snapshot,
    Split,
    SplitBounds,
    feasible,
    plan_sizes,
    replica_groups,
    trim_to_replicas,
)

SIZES = st.sampled_from(
    [
        ReplicaSizes(2, 1),
        ReplicaSizes(1, 2),
        ReplicaSizes(2, 2),
        ReplicaSizes(4, 2),
        ReplicaSizes(2, 4),
        ReplicaSizes(4, 4),
    ]
)
JUDGES = ("j", "k")
WANTED = dict.fromkeys(JUDGES)


def cluster(*counts: int) -> Snapshot:
    return Snapshot(
        tuple(NodeSlots(f"n{i}", tuple(f"cuda:{s}" for s in range(count))) for i, count in enumerate(counts))
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Snapshot, ReplicaSizes, Split, Split]:
    """Two splits of a cluster whose nodes' slots can be divided."""
    sizes = draw(SIZES)
    blocks = draw(st.lists(st.integers(1, 8 // sizes.widest), min_size=1, max_size=3))
    snapshot = cluster(*(count * sizes.widest for count in blocks))
    trains = tuple(range(1, snapshot.slots + 1))
    splits = list(feasible(SplitBounds(snapshot.slots, sizes.rollout, sizes.reward, trains)))
    assume(splits)
    return snapshot, sizes, draw(st.sampled_from(splits)), draw(st.sampled_from(splits))


def check(plan: Plan, snapshot: Snapshot, sizes: ReplicaSizes) -> None:
    whole = {(n.node, group) for n in snapshot.nodes for size in (1, 2, 4) for group in replica_groups(n.slots, size)}
    assert all((place.node, place.slots) in whole for place in plan.engines), "on one node, side by side"
    assert all(len(place.slots) == sizes.of(place.pool) for place in plan.engines)
    for judge in ("", *JUDGES):
        on = [slot for place in plan.engines if place.judge == judge for slot in place.on]
        assert len(set(on)) == len(on), "a slot has one engine of a model"
        assert any(place.judge == judge and not place.asleep for place in plan.engines)
    if split_of(plan).mode == "coexisting":
        awake = [slot for replicas in plan_roles(plan).values() for replica in replicas for slot in replica]
        assert len(set(awake)) == len(awake), "a slot serves one pool"
        training = {(rank.node, rank.slot) for rank in plan.ranks}
        assert all((one.node, one.slot) not in training for place in plan.engines for one in place.on)


def planned(
    split: Split, current: Plan | None, snapshot: Snapshot, sizes: ReplicaSizes, world: str = "w"
) -> Plan | None:
    number = 1 if current is None else current.generation + 1
    return assign_split(split, current, snapshot, JUDGES, world=world, generation=number, sizes=sizes)


@given(situations())
def test_every_split_can_be_had_on_nodes_whose_slots_can_be_divided_and_whatever_was_before_in_a_new_world(
    given_: tuple[Snapshot, ReplicaSizes, Split, Split],
) -> None:
    snapshot, sizes, first, second = given_
    plan = planned(first, None, snapshot, sizes)
    after = planned(second, plan, snapshot, sizes, "x")
    assert plan is not None
    assert after is not None
    for found, split in ((plan, first), (after, second)):
        check(found, snapshot, sizes)
        assert split_of(found) == split
        assert plan_sizes(found) == sizes
        again = planned(split, found, snapshot, sizes, found.world)
        assert again is not None
        assert (again.engines, again.ranks, role_changes(found, again)) == (found.engines, found.ranks, [])


@given(situations())
def test_within_a_world_its_ranks_stay_and_whole_engines_change_over(
    given_: tuple[Snapshot, ReplicaSizes, Split, Split],
) -> None:
    snapshot, sizes, first, second = given_
    assume(first.train == second.train)
    plan = planned(first, None, snapshot, sizes)
    assert plan is not None
    after = planned(second, plan, snapshot, sizes)
    if after is None:  # as the ranks lie, no node has whole engines' slots for that
        assert sizes.rollout != sizes.reward
        return
    check(after, snapshot, sizes)
    assert after.ranks == plan.ranks
    assert split_of(after) == second


@given(situations())
def test_a_policy_that_moves_slots_begins_and_goes_on_with_whole_engines(
    given_: tuple[Snapshot, ReplicaSizes, Split, Split],
) -> None:
    snapshot, sizes, wanted, _ = given_
    job = PlacementRequest(judges=WANTED, sizes=sizes, moves=True, most_ranks=64)
    plan = place_split(snapshot, job, world="w", generation=1, wanted=wanted)
    assert plan is not None
    check(plan, snapshot, sizes)
    left = Snapshot(snapshot.nodes[1:])
    found = mend_plan(plan, left, job) if left.slots else None
    if found is not None:
        assert found.ranks == plan.ranks
        assert all(len(place.slots) == sizes.of(place.pool) for place in found.engines)


@given(SIZES, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 2))
def test_a_static_placement_gives_each_pool_whole_engines(
    sizes: ReplicaSizes, blocks: list[int], train: int, judging: int
) -> None:
    snapshot = cluster(*(count * sizes.widest for count in blocks))
    reward = judging * sizes.reward
    wanted = PlacementRequest(train, WANTED if judging else {}, train, reward, sizes)
    try:
        plan = first_plan(snapshot, wanted, world="w", generation=1)
    except SpecError:
        assert train + reward + sizes.rollout > snapshot.slots
        return
    pools = plan_roles(plan)
    assert {pool: sum(map(len, pools[pool])) for pool in ("train", "reward")} == {"train": train, "reward": reward}
    assert pools["rollout"], "the policy has an engine"
    slots = [slot for replicas in pools.values() for replica in replicas for slot in replica]
    assert len(set(slots)) == len(slots)
    assert all(len({slot.node for slot in replica}) == 1 for replicas in pools.values() for replica in replicas)


def test_colocated_engines_fill_every_node_and_a_node_that_comes_gets_whole_ones() -> None:
    wanted = PlacementRequest(2, WANTED, sizes=ReplicaSizes(2, 4))
    plan = first_plan(cluster(4, 4), wanted, world="w", generation=1)
    assert [place.slots for place in plan.engines if place.node == "n0"] == [
        ("cuda:0", "cuda:1"),
        ("cuda:2", "cuda:3"),
        ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
        ("cuda:0", "cuda:1", "cuda:2", "cuda:3"),
    ]
    grown = fill_plan(plan, trim_to_replicas(cluster(4, 4, 7), wanted.sizes), wanted)
    assert grown is not None
    there = [place for place in grown.engines if place.node == "n2"]
    assert sorted(place.judge for place in there) == ["", "", "j", "k"]
    assert "n2" in grown.reason
    assert "engines on 4 slots" in grown.reason
    assert fill_plan(grown, trim_to_replicas(cluster(4, 4, 7), wanted.sizes), wanted) is None


@pytest.mark.parametrize(
    ("sizes", "left", "given"),
    [
        pytest.param(ReplicaSizes(1, 2), 2, ("cuda:2", "cuda:3"), id="two of the policy's make room for one judge"),
        pytest.param(ReplicaSizes(2, 1), 1, ("cuda:2",), id="one of the policy's makes room on its first slot"),
        pytest.param(ReplicaSizes(2, 2), 1, ("cuda:2", "cuda:3"), id="one for one"),
    ],
)
def test_a_judge_whose_node_stays_away_gets_whole_engines_of_the_policys_slots(
    sizes: ReplicaSizes, left: int, given: tuple[str, ...]
) -> None:
    judge = EnginePlace(node="gone", slot="cuda:0", judge="j", further=("cuda:1",) * (sizes.reward == 2))
    here = cluster(4)
    engines = [
        EnginePlace(node="n0", slot=g[0], further=g[1:]) for g in replica_groups(here.nodes[0].slots, sizes.rollout)
    ]
    plan = Plan(generation=1, world="w", ranks=(), engines=(*engines, judge))
    after = move_judges(plan, here, PlacementRequest(1, {"j": None}, 1, sizes.reward, sizes))
    assert after is not None
    assert [place.slots for place in after.engines if place.judge] == [given]
    assert sum(not place.judge for place in after.engines) == left


def test_slots_that_fill_no_replica_are_unused() -> None:
    assert [len(node.slots) for node in trim_to_replicas(cluster(5, 1, 4), ReplicaSizes(4, 2)).nodes] == [4, 0, 4]
    assert trim_to_replicas(cluster(5, 1), ReplicaSizes()) == cluster(5, 1)


def of_a(split: Split, sizes: ReplicaSizes, *counts: int) -> Plan:
    plan = assign_split(split, None, cluster(*counts), ("j",), world="w", generation=1, sizes=sizes)
    assert plan is not None
    return plan


def without(slot: str, *counts: int) -> Snapshot:
    """The first node came back without this slot."""
    first, *others = cluster(*counts).nodes
    return Snapshot((NodeSlots(first.node, tuple(one for one in first.slots if one != slot)), *others))


def test_a_node_that_came_back_with_fewer_slots_has_no_two_engines_on_any_of_them() -> None:
    sizes = ReplicaSizes(2, 2)
    before = of_a(Split("coexisting", 4, 2, 2), sizes, 4, 4)
    assert {rank.node for rank in before.ranks} == {"n1"}
    left = trim_to_replicas(without("cuda:0", 4, 4), sizes)
    after = assign_split(Split("coexisting", 2, 2, 2), before, left, ("j",), world="w", generation=2, sizes=sizes)
    assert after is not None
    for judge in ("", "j"):
        on = [slot for place in after.engines if place.judge == judge for slot in place.on]
        assert len(set(on)) == len(on)
    assert split_of(after, left) == split_of(after) == Split("coexisting", 2, 2, 2)


def test_a_judge_whose_engine_lost_its_second_slot_gets_another() -> None:
    before = of_a(Split("coexisting", 6, 2, 2), ReplicaSizes(2, 2), 6, 4)
    (judge,) = (place for place in before.engines if place.judge and not place.asleep)
    lost = judge.further[0]
    left = trim_to_replicas(without(lost, 6, 4), ReplicaSizes(2, 2))
    job = PlacementRequest(judges={"j": None}, sizes=ReplicaSizes(2, 2), moves=True, most_ranks=64)
    after = mend_plan(before, left, job)
    assert after is not None
    (judges,) = [place for place in after.engines if place.judge and not place.asleep]
    assert lost not in judges.slots
    wanted = PlacementRequest(2, {"j": None}, 2, 2, ReplicaSizes(2, 2))
    static = first_plan(cluster(4, 4), wanted, world="w", generation=1)
    (judge,) = (place for place in static.engines if place.judge)
    assert (judge.node, judge.slots) == ("n0", ("cuda:2", "cuda:3"))
    moved_so = move_judges(static, trim_to_replicas(without("cuda:3", 4, 4), wanted.sizes), wanted)
    assert moved_so is not None
    assert [place.node for place in moved_so.engines if place.judge] == ["n1"]


def test_a_judge_is_not_moved_onto_slots_of_which_it_has_one_already() -> None:
    """The slots that are left of a node are other replicas than they were."""
    wanted = PlacementRequest(1, {"j": None}, sizes=ReplicaSizes(1, 2))
    plan = first_plan(cluster(6), wanted, world="w", generation=1)
    left = Snapshot((NodeSlots("n0", ("cuda:1", "cuda:2", "cuda:3", "cuda:5")),))
    after = move_judges(plan, left, wanted)
    assert after is None, "two of its engines would lie on slots of the one that is left"


def test_nodes_with_too_few_slots_for_an_engine_mend_nothing() -> None:
    before = of_a(Split("colocated", 4, 4, 4), ReplicaSizes(4, 4), 4)
    job = PlacementRequest(judges={"j": None}, sizes=ReplicaSizes(4, 4), moves=True, most_ranks=64)
    assert (
        mend_plan(before, trim_to_replicas(Snapshot((NodeSlots("late", ("cuda:0", "cuda:1")),)), job.sizes), job)
        is None
    )
