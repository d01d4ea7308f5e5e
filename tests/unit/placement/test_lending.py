"""Lending within a step: the lent slots, given the engines' outstanding work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.job import MoveKind, Plan
from placement.assign import assign_split, split_of
from placement.lending import (
    EngineLoad,
    EngineRows,
    JobLoads,
    PoolSpeed,
    PoolSpeeds,
    decide_lending,
    doubling_requests,
    follows_plan,
    make_lending_move,
    pool_speed,
    pool_speeds,
    remaining_s,
    response_tail,
    scale_tail,
)
from placement.measurements import EngineSpeed, MeasuredStep
from placement.moves import DecisionContext, base_split, move_in_words, split_part
from placement.slots import NodeSlots, Snapshot, Split

AT = DecisionContext(step=3, seq=7, by="a", time=100.0)
SPLIT = Split("coexisting", 4, 1, 1)
SNAPSHOT = Snapshot((NodeSlots("a", ("cpu:0", "cpu:1", "cpu:2")), NodeSlots("b", ("cpu:0", "cpu:1", "cpu:2"))))
SPEEDS = (
    *(EngineSpeed("rollout", running, seconds) for running, seconds in ((2.0, 0.01), (9.0, 0.02), (16.0, 0.03))),
    EngineSpeed("reward", 8.0, 0.05),
)
STEP = MeasuredStep(3, SPLIT, (100.0,) * 8, (50.0,) * 8, 800.0, 5.0, 1.0, 0.1, SPEEDS, {})
BOTH = frozenset({"a", "b"})
ROWS = EngineRows(16, 16)


def plan_of(split: Split = SPLIT) -> Plan:
    plan = assign_split(split, None, SNAPSHOT, ("j",), world="w", generation=1)
    assert plan is not None
    return plan


def speeds(history: list[MeasuredStep]) -> PoolSpeeds:
    found = pool_speeds(history, ROWS, 0, 0)
    assert found is not None
    return found


def loads_of(plan: Plan, rollout: dict[str, int] | int = 0, reward: int = 0, reward_waits: int = 0) -> JobLoads:
    """All as the plan says; `rollout`: requests on each awake engine, or by node/slot."""
    engines = []
    for place in plan.engines:
        name = f"{place.node}/{place.slot}"
        running = (
            0
            if place.asleep
            else reward
            if place.judge
            else rollout
            if isinstance(rollout, int)
            else rollout.get(name, 0)
        )
        engines.append(EngineLoad(place.node, place.slot, place.judge, running, 0, not place.asleep, place.asleep))
    return JobLoads(tuple(engines), {"reward": reward_waits})


def test_when_rollout_ends_its_slots_are_lent_to_the_judges_that_are_behind() -> None:
    plan = plan_of()
    found = make_lending_move(plan, loads_of(plan, reward=8), speeds([STEP]), 0.1, BOTH, ROWS, AT)
    assert found is not None
    assert found.plan is not None
    assert found.move.kind is MoveKind.LEND
    assert found.plan.generation == plan.generation + 1
    assert split_of(found.plan).reward > 1
    assert found.plan.rollout_nodes == BOTH, "each node keeps an engine of the policy"
    assert "the judges had 8 requests on 1 slot," in found.move.reason


def test_nothing_is_lent_for_less_than_it_costs_nor_before_anything_was_measured() -> None:
    plan = plan_of()
    loads = loads_of(plan, reward=8)
    assert make_lending_move(plan, loads, speeds([STEP]), 1000.0, BOTH, ROWS, AT) is None
    assert pool_speeds([], ROWS, 0, 0) is None
    assert make_lending_move(plan, loads_of(plan), speeds([STEP]), 0.1, BOTH, ROWS, AT) is None


def test_slots_with_the_least_to_do_are_lent_first() -> None:
    plan = plan_of()
    awake = [f"{p.node}/{p.slot}" for p in plan.engines if not p.judge and not p.asleep]
    busy = dict.fromkeys(awake[1:], 1)
    found = make_lending_move(plan, loads_of(plan, rollout=busy, reward=30), speeds([STEP]), 0.01, BOTH, ROWS, AT)
    assert found is not None
    assert any(line.startswith(awake[0]) for line in found.move.slots)


def test_dry_run_reports_a_loan_without_a_plan() -> None:
    plan = plan_of()
    dry = DecisionContext(3, 7, "a", 100.0, dry=True)
    found = make_lending_move(plan, loads_of(plan, reward=8), speeds([STEP]), 0.1, BOTH, ROWS, dry)
    assert found is not None
    assert found.plan is None
    assert found.move.state == "would"


@given(st.integers(1, 4), st.integers(0, 60), st.integers(0, 60), st.integers(0, 40), st.floats(0.0, 20.0))
def test_lending_keeps_an_engine_in_every_pool_and_changes_only_sleepers(
    reward: int, running: int, asked: int, waiting: int, cost: float
) -> None:
    plan = plan_of(Split("coexisting", 5 - reward, reward, 1))
    loads = loads_of(plan, running, asked, reward_waits=waiting)
    found = make_lending_move(plan, loads, speeds([STEP]), cost, BOTH, ROWS, AT)
    if found is None:
        return
    assert found.plan is not None
    after = found.plan
    assert after.ranks == plan.ranks
    assert [p.model_copy(update={"asleep": False}) for p in after.engines] == [
        p.model_copy(update={"asleep": False}) for p in plan.engines
    ]
    split = split_of(after)
    assert split.rollout >= 1
    assert split.reward >= 1
    assert split.rollout + split.reward == 5
    per_slot = {(p.node, p.slot): p.pool for p in after.engines if not p.asleep}
    assert len(per_slot) == 5, "a slot serves one pool at a time"
    assert make_lending_move(plan, loads, speeds([STEP]), cost, BOTH, ROWS, AT) == found


def test_a_plan_is_settled_when_every_engine_is_as_it_says() -> None:
    plan = plan_of()
    assert follows_plan(plan, loads_of(plan), BOTH)
    silent = JobLoads(tuple(one for one in loads_of(plan).engines if one.node == "a"), {})
    assert not follows_plan(plan, silent, BOTH)
    assert follows_plan(plan, silent, {"a"}), "a node that is away holds nothing up"
    other = plan_of(Split("coexisting", 3, 2, 1))
    assert not follows_plan(other, loads_of(plan), BOTH)


def test_speeds_are_fitted_where_loads_differed_and_else_go_by_the_prior() -> None:
    rollout, reward = pool_speed([STEP], "rollout", 8, 0), pool_speed([STEP], "reward", 8, 0)
    assert rollout is not None
    assert reward is not None
    assert abs(rollout.alone_s * (1 + 16 / rollout.saturating) - 0.03) < 1e-9
    assert abs(reward.alone_s * (1 + 8 / reward.saturating) - 0.05) < 1e-9
    assert rollout.left_s(8, 8, 4) < rollout.left_s(80, 80, 4)
    assert pool_speed([], "rollout", 8, 0) is None


def test_a_judge_that_is_asked_often_for_a_response_owes_so_many_requests_of_so_few_tokens() -> None:
    once, often = speeds([STEP]), speeds([replace(STEP, asked_per_response=5.0)])
    assert often.reward.tokens == once.reward.tokens / 5
    plan = plan_of()
    found = [decide_lending(plan, loads_of(plan, rollout=64), one, 0.1, ROWS) for one in (once, often)]
    left = [one.reward_left_s for one in found if one is not None]
    assert left[1] == pytest.approx(left[0], rel=0.05), "the same tokens are to come"
    waiting = [decide_lending(plan, loads_of(plan, reward=16), one, 0.1, ROWS) for one in (once, often)]
    owed = [one.reward_left_s for one in waiting if one is not None]
    assert owed[1] < owed[0] / 4, "what waits is questions, and five of them are one response's"


def test_restoring_a_pool_is_a_return_and_enlarging_it_is_a_loan() -> None:
    own = plan_of(Split("coexisting", 3, 2, 1))
    loads, terse = loads_of(own, rollout=12), speeds([replace(STEP, judged=(1.0,) * 8)])
    lent = make_lending_move(own, loads, terse, 0.01, BOTH, ROWS, AT)
    assert lent is not None
    assert lent.plan is not None
    assert lent.move.kind is MoveKind.LEND
    assert lent.plan.lent_from == split_part(Split("coexisting", 3, 2, 1))
    assert base_split(lent.plan) == Split("coexisting", 3, 2, 1)
    assert move_in_words(lent.move).startswith(
        "lent 1 slot from the judges to rollout, because rollout had 36 requests on 3 slots"
    )
    borrowed = own.model_copy(update={"lent_from": split_part(SPLIT)})
    back = make_lending_move(borrowed, loads, terse, 0.01, BOTH, ROWS, AT)
    assert back is not None
    assert back.plan is not None
    assert (back.move.kind, back.move.after.rollout) == (MoveKind.RETURN, 4)
    assert back.plan.lent_from is None, "nothing is lent any more"


def test_loan_during_a_nodes_absence_is_compared_with_the_present_slots_at_the_start_of_the_step() -> None:
    """Against what all slots began with, a pool that gets more would seem to be on its way back."""
    three = Snapshot((*SNAPSHOT.nodes, NodeSlots("c", ("cpu:0", "cpu:1", "cpu:2"))))
    plan = assign_split(Split("coexisting", 5, 3, 1), None, three, ("j",), world="w", generation=1)
    assert plan is not None
    loads, terse = loads_of(plan, rollout=12), speeds([replace(STEP, judged=(1.0,) * 8)])
    there = JobLoads(tuple(one for one in loads.engines if one.node != "c"), {})
    lent = make_lending_move(plan, there, terse, 0.01, BOTH, ROWS, AT)
    assert lent is not None
    assert lent.plan is not None
    assert (lent.move.kind, lent.move.before.rollout, lent.move.after.rollout) == (MoveKind.LEND, 3, 4)
    assert move_in_words(lent.move).startswith("lent 1 slot from the judges to rollout")
    assert base_split(lent.plan) == Split("coexisting", 5, 3, 1), "with those of the node that is away"


def test_engines_that_nobody_told_of_are_not_counted_on() -> None:
    """A node that went away holds them; the last judge that is there must not be lent."""
    plan = plan_of(Split("coexisting", 3, 2, 1))
    judges = {place.node for place in plan.engines if place.judge and not place.asleep}
    assert judges == {"a", "b"}
    whole = loads_of(plan, rollout=12)
    alone = JobLoads(tuple(one for one in whole.engines if one.node == "a"), {})
    terse = speeds([replace(STEP, judged=(1.0,) * 8)])
    assert make_lending_move(plan, whole, terse, 0.01, BOTH, ROWS, AT) is not None
    assert make_lending_move(plan, alone, terse, 0.01, frozenset({"a"}), ROWS, AT) is None


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 16))
def test_lender_keeps_enough_slots_for_its_outstanding_requests(running: int, asked: int, rows: int) -> None:
    plan = plan_of(Split("coexisting", 3, 2, 1))
    found = make_lending_move(
        plan, loads_of(plan, running, asked), speeds([STEP]), 0.01, BOTH, EngineRows(rows, rows), AT
    )
    if found is None:
        return
    after = found.move.after
    if after.reward > 2:
        assert after.rollout * rows >= 3 * running
    else:
        assert after.reward * rows >= 2 * asked


@given(st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=30), min_size=1, max_size=3))
def test_response_tail_is_the_excess_over_finished_responses(
    steps: list[list[int]],
) -> None:
    fewest = min(len(step) for step in steps)
    found = response_tail([[float(one) for one in step] for step in steps])
    assert len(found) == fewest + 1
    for left in range(1, fewest + 1):
        ordered = [sorted(step) for step in steps]
        made = [step[-left - 1] if left < len(step) else 0 for step in ordered]
        longest = [step[-1] - done for step, done in zip(ordered, made, strict=True)]
        mean = [sum(step[-left:]) / left - done for step, done in zip(ordered, made, strict=True)]
        assert found[left] == pytest.approx((sum(longest) / len(steps), sum(mean) / len(steps)))


def test_responses_of_equal_length_end_in_the_order_in_which_they_start() -> None:
    """Ten pictures of ten steps on one engine with two rows: the running ones have half left, the waiting ones all."""
    equal = replace(STEP, lengths=(10.0,) * len(STEP.lengths))
    speed = pool_speed([equal], "rollout", 2, 0)
    assert speed is not None
    assert speed.tail == ()
    assert speed.to_come(10, 2) == pytest.approx((9.0, 9.0, 9.0))
    assert speed.to_come(2, 2) == pytest.approx((5.0, 5.0, 5.0))
    varied = pool_speed([replace(STEP, lengths=(100.0, 200.0))], "rollout", 2, 0)
    assert varied is not None
    assert varied.tail


def test_a_long_response_keeps_rollout_from_lending_what_would_put_its_end_off() -> None:
    plan = plan_of(Split("coexisting", 3, 2, 1))
    tailed = replace(STEP, lengths=(50.0,) * 22 + (60.0, 3000.0), judged=(150.0,) * 24)
    alike = replace(tailed, lengths=(172.5,) * 24)
    loads = loads_of(plan, rollout=8, reward=12)
    speeds = [pool_speeds([step], ROWS, 0, 0) for step in (tailed, alike)]
    assert None not in speeds
    found = [decide_lending(plan, loads, one, 0.01, ROWS) for one in speeds if one is not None]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].rollout_left_s > 3000 * 0.007
    assert found[0].count <= 0, "all wait for the long one, and it is slower beside more"
    assert found[1].count > 0


@given(st.floats(1.0, 200.0), st.integers(1, 8), st.floats(1.0, 500.0), st.floats(0.0, 500.0), st.floats(1.0, 64.0))
def test_twice_as_late_is_what_doubling_says(
    owed: float, engines: int, residual: float, more: float, saturating: float
) -> None:
    told = owed, engines, 1_000_000, 100.0, residual, residual + more
    twice = doubling_requests(*told, saturating)
    alone = remaining_s(engines * 1e-9, engines, 1_000_000, 100.0, residual, residual + more, 0.01, 1e12)
    many = remaining_s(twice * engines, engines, 1_000_000, 100.0, residual, residual + more, 0.01, saturating)
    assert many == pytest.approx(2 * alone) if twice >= 1 else many >= 2 * alone * 0.99


def test_sibling_responses_scale_the_expected_tail() -> None:
    usual = PoolSpeed(0.02, 20.0, 100.0, 60.0, 8, ((0.0, 0.0), (50.0, 50.0), (120.0, 80.0)))
    engines = (EngineLoad("a", "0", "", 2, 0, ready=True, asleep=False),)

    def tail(tokens: float, told: int) -> tuple[tuple[float, float], ...]:
        return scale_tail(usual, JobLoads(engines, {}, tokens, told)).tail

    assert tail(160.0, 2) == usual.tail, "80 of each is what is left of two in any case"
    assert tail(240.0, 2) == ((0.0, 0.0), (75.0, 75.0), (180.0, 120.0))
    assert tail(9999.0, 2)[2] == (240.0, 160.0), "no more than twice"
    assert tail(1.0, 2)[2] == (60.0, 40.0), "nor less than half"
    assert tail(0.0, 0) == usual.tail, "nobody told"
    assert tail(300.0, 1) == usual.tail, "of half of them only"
    assert scale_tail(usual, JobLoads((), {}, 5.0, 1)) == usual
