"""Moves: decisions between steps, their outcomes, and their reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcore.ledger.records.job import MOST_MOVE_BYTES, NEWEST_MOVES, Move, MoveKind, MoveOutcome, Moves, Plan, SplitPart
from placement.assign import assign_split, split_of
from placement.moves import (
    MOVE_PRIOR_S,
    WORLD_PRIOR_S,
    CommittedStep,
    DecisionContext,
    add_outcomes,
    add_unrequested,
    base_split,
    is_repeated,
    move_in_words,
    numbers_in_words,
    outcome_in_words,
    propose_move,
    split_part,
    switch_costs,
)
from placement.policies.base import Decision
from placement.slots import NodeSlots, Snapshot, Split

SNAPSHOT = Snapshot((NodeSlots("a", ("cpu:0", "cpu:1", "cpu:2")), NodeSlots("b", ("cpu:0", "cpu:1", "cpu:2"))))
FIRST, SECOND = Split("coexisting", 4, 1, 1), Split("coexisting", 3, 2, 1)
AT = DecisionContext(step=3, seq=7, by="a", time=100.0)


def plan_of(split: Split, current: Plan | None = None, world: str = "w") -> Plan:
    generation = 1 if current is None else current.generation + 1
    plan = assign_split(split, current, SNAPSHOT, ("j",), world=world, generation=generation)
    assert plan is not None
    return plan


def decided(split: Split, **more: float) -> Decision:
    return Decision(split, "rollout was idle", expected_s=2.0, before_s=3.0, idle={"rollout": 0.4}, **more)


def move(kind: MoveKind = MoveKind.SPLIT, step: int = 3, **more: object) -> Move:
    fields: dict[str, object] = {"generation": 2, "seq": step, "before": split_part(FIRST), "after": split_part(SECOND)}
    return Move.model_validate({"kind": kind, "step": step} | fields | more)


def in_order(seconds: Mapping[int, float]) -> list[CommittedStep]:
    """Steps of a run that nothing was cut off of."""
    return [CommittedStep(step, step, took) for step, took in sorted(seconds.items())]


def test_a_decision_for_the_split_there_is_moves_nothing() -> None:
    plan = plan_of(FIRST)
    assert propose_move(decided(FIRST), plan, plan_of(FIRST, plan), FIRST, AT) is None


def test_a_move_carries_its_reason_in_numbers_and_the_slots_that_change() -> None:
    plan = plan_of(FIRST)
    found = propose_move(decided(SECOND, gain_s=50.0, cost_s=4.0), plan, plan_of(SECOND, plan), FIRST, AT)
    assert found is not None
    assert found.plan is not None
    assert (found.move.kind, found.move.generation, found.move.state) == (MoveKind.SPLIT, 2, "done")
    assert (found.move.gain_s, found.move.cost_s, found.move.expected_s) == (50.0, 4.0, 2.0)
    assert found.move.idle == {"rollout": 0.4}
    assert [line.partition(" ")[2] for line in found.move.slots] == ["rollout -> reward"]
    assert "because rollout was idle" in move_in_words(found.move)
    assert (
        numbers_in_words(found.move)
        == "a step was to take 2.0 s instead of 3.0 s, and the change was to cost 4.0 s once"
    )


def test_another_train_world_is_only_wanted_until_it_is_formed() -> None:
    plan = plan_of(FIRST)
    found = propose_move(decided(Split("coexisting", 3, 1, 2)), plan, None, FIRST, AT)
    assert found is not None
    assert found.plan is None
    assert (found.move.kind, found.move.state) == (MoveKind.WORLD, "wanted")
    moves = Moves().plus(found.move)
    assert add_outcomes(moves, (), {}, 7, plan).newest == found.move
    bigger = plan_of(Split("coexisting", 3, 1, 2), plan, "x")
    formed = add_outcomes(moves, (), {}, 8, bigger).newest
    assert formed is not None
    assert formed.state == "done"
    late = add_outcomes(moves, (), {}, 8, plan).newest
    assert late is not None
    assert late.state == "lapsed"
    assert move_in_words(late).endswith("because rollout was idle; it was not formed before the next step")


def test_dry_run_move_is_reported_once() -> None:
    plan, dry = plan_of(FIRST), DecisionContext(3, 7, "a", 100.0, dry=True)
    found = propose_move(decided(SECOND), plan, plan_of(SECOND, plan), FIRST, dry)
    assert found is not None
    assert found.plan is None
    assert found.move.state == "would"
    assert is_repeated(Moves().plus(found.move), found.move)
    assert not is_repeated(Moves(), found.move)


def test_base_split_ignores_slots_lent_within_the_step() -> None:
    plan = plan_of(FIRST)
    lent = plan_of(SECOND, plan).model_copy(update={"lent_from": split_part(FIRST)})
    assert split_of(lent) == SECOND
    assert base_split(lent) == FIRST
    assert base_split(lent, Snapshot(())) == split_of(lent, Snapshot(())), "there are not so many slots any more"
    back = propose_move(decided(FIRST), lent, plan_of(FIRST, lent), FIRST, AT)
    assert back is not None
    assert back.plan is not None
    assert back.move.kind is MoveKind.RETURN
    assert base_split(back.plan) == FIRST


def test_adopting_a_loan_changes_the_base_split() -> None:
    lent = plan_of(SECOND, plan_of(FIRST)).model_copy(update={"lent_from": split_part(FIRST)})
    found = propose_move(decided(SECOND), lent, plan_of(SECOND, lent), FIRST, AT)
    assert found is not None
    assert found.plan is not None
    assert (found.move.kind, base_split(found.plan)) == (MoveKind.SPLIT, SECOND)


def test_places_of_a_node_that_is_away_may_stand_elsewhere_in_the_plan_and_nothing_moves() -> None:
    plan = plan_of(FIRST)
    without = Snapshot(SNAPSHOT.nodes[:1])
    after = assign_split(split_of(plan, without), plan, without, ("j",), world=plan.world, generation=2)
    assert after is not None
    assert after.engines != plan.engines
    assert propose_move(decided(split_of(plan, without)), plan, after, split_of(plan, without), AT) is None


def test_a_world_that_is_there_is_not_formed_again() -> None:
    assert propose_move(decided(FIRST), plan_of(FIRST), None, FIRST, AT) is None


def test_a_world_that_was_wanted_was_formed_though_fewer_ranks_could_be_placed() -> None:
    wanted = move(MoveKind.WORLD, state="wanted", generation=2, seq=3)
    formed = plan_of(FIRST, world="x").model_copy(update={"generation": 2})
    assert [one.state for one in add_outcomes(Moves().plus(wanted), (), {}, 4, formed).moves] == ["done"]
    assert [one.state for one in add_outcomes(Moves().plus(wanted), (), {}, 4, plan_of(FIRST)).moves] == ["lapsed"]
    lent = Moves().plus(wanted).plus(move(MoveKind.LEND, generation=2, time=1.0))
    assert add_outcomes(lent, (), {}, 4, formed).moves[0].state == "lapsed", "it was another plan"


def test_nodes_that_take_the_place_of_a_world_that_was_wanted_are_told_of_and_it_has_lapsed() -> None:
    wanted = Moves().plus(move(MoveKind.WORLD, state="wanted", generation=2, seq=7, time=1.0))
    before = plan_of(FIRST)
    joined = plan_of(SECOND, before).model_copy(update={"reason": "a; then engines on 1 slot of b"})
    told = add_unrequested(wanted, before, joined, AT)
    assert [(one.kind, one.reason) for one in told.moves[1:]] == [(MoveKind.MEND, "engines on 1 slot of b")]
    assert add_outcomes(told, (), {}, 8, joined).moves[0].state == "lapsed"
    formed = plan_of(SECOND, before, "x")
    assert add_unrequested(wanted, before, formed, AT) == wanted
    assert add_outcomes(wanted, (), {}, 8, formed).moves[0].state == "done"


def test_outcome_of_a_move_is_the_mean_of_the_steps_after_it() -> None:
    plan = plan_of(FIRST)
    steps = in_order({1: 3.0, 2: 3.2, 3: 3.4, 4: 9.0, 5: 2.0, 6: 2.2})
    found = add_outcomes(Moves().plus(move()), steps, {2: 1.25}, 9, plan).newest
    assert found is not None
    assert found.outcome == MoveOutcome(took_s=1.25, steps=2, step_s=2.1, before_s=3.3)
    assert outcome_in_words(found) == "it took 1.2 s; the 2 steps after it took 2.1 s each, before it 3.3 s"


def test_the_steps_after_the_next_move_are_the_next_moves() -> None:
    moves = Moves().plus(move(step=3)).plus(move(step=5, generation=3, time=1.0))
    found = add_outcomes(moves, in_order({4: 9.0, 5: 2.0, 6: 7.0, 7: 1.0}), {}, 9, plan_of(FIRST))
    assert [one.outcome.step_s for one in found.moves if one.outcome is not None] == [2.0, 1.0]


def test_after_a_rollback_what_came_of_a_move_is_measured_over_steps_that_were_made_since() -> None:
    """Those that were cut off have the same numbers, and were made before it."""
    cut_off = in_order(dict.fromkeys(range(1, 17), 10.0))
    moves = Moves().plus(move(step=8, seq=17))
    assert add_outcomes(moves, cut_off, {}, 17, plan_of(FIRST)) == moves
    again = [*cut_off, *(CommittedStep(step, step + 9, 5.0) for step in range(9, 15))]
    found = add_outcomes(moves, again, {}, 23, plan_of(FIRST)).newest
    assert found is not None
    assert found.outcome == MoveOutcome(steps=5, step_s=5.0, before_s=10.0)


def test_a_move_that_was_made_before_a_rollback_has_no_part_in_what_came_after_the_next_one() -> None:
    made = [
        *in_order(dict.fromkeys(range(1, 17), 10.0)),
        *(CommittedStep(step, step + 9, 5.0) for step in range(9, 15)),
    ]
    moves = Moves().plus(move(step=14)).plus(move(step=8, seq=17, generation=3, time=1.0))
    found = add_outcomes(moves, made, {}, 23, plan_of(FIRST))
    assert [one.outcome.step_s for one in found.moves if one.outcome is not None] == [10.0, 5.0]


def test_wrong_outcome_is_corrected_and_an_unmeasurable_one_is_kept() -> None:
    told = move(step=3, outcome={"steps": 2, "step_s": 9.0, "before_s": 3.0})
    right = add_outcomes(Moves().plus(told), in_order({4: 9.0, 5: 2.0, 6: 2.2}), {}, 9, plan_of(FIRST)).newest
    assert right is not None
    assert right.outcome == MoveOutcome(steps=2, step_s=2.1, before_s=3.0)
    assert add_outcomes(Moves().plus(right), in_order({6: 2.2}), {}, 9, plan_of(FIRST)).newest == right


def test_steps_that_had_more_to_do_than_those_before_a_move_are_said_to_have() -> None:
    steps = [CommittedStep(step, step, 3.0, tokens=30.0, question_s=0.5) for step in range(1, 5)]
    steps += [CommittedStep(step, step, 6.0, tokens=61.0, question_s=None) for step in range(5, 7)]
    early = add_outcomes(Moves().plus(move()), steps, {}, 9, plan_of(FIRST))
    assert early.newest is not None
    assert outcome_in_words(early.newest) == (
        "the 2 steps after it took 6.0 s each, before it 3.0 s, with responses of 61 tokens instead of 30"
    )
    booked = [replace(one, question_s=one.question_s or 2.1) for one in steps]
    found = add_outcomes(early, booked, {}, 9, plan_of(FIRST)).newest
    assert found is not None
    assert outcome_in_words(found).endswith(
        "tokens instead of 30 and 2.1 s of a judge for each question instead of 0.5 s"
    ), "the books came late"
    alike = [replace(one, tokens=30.0 + one.step / 10, question_s=0.5) for one in steps]
    same = add_outcomes(Moves().plus(move()), alike, {}, 9, plan_of(FIRST)).newest
    assert same is not None
    assert "instead" not in outcome_in_words(same)


@given(st.lists(st.sampled_from(list(MoveKind)), max_size=90))
def test_the_record_of_moves_is_bounded_and_counts_all(kinds: list[MoveKind]) -> None:
    moves = Moves()
    for number, kind in enumerate(kinds):
        slots = tuple(f"{'n' * 40}/cuda:{i} rollout -> reward" for i in range(16))
        moves = moves.plus(move(kind, step=number, slots=slots, reason="r" * 5000, by="n" * 63))
    assert moves.total == len(kinds)
    assert len(moves.moves) == min(len(kinds), NEWEST_MOVES)
    assert len(moves.encode()) <= 512 + NEWEST_MOVES * MOST_MOVE_BYTES
    assert Moves.decode(moves.encode()) == moves


def test_changes_cost_what_the_newest_cost_and_before_that_a_prior() -> None:
    assert (switch_costs(Moves(), None).move_s, switch_costs(Moves(), None).world_s) == (MOVE_PRIOR_S, WORLD_PRIOR_S)
    moves = Moves().plus(move(outcome={"took_s": 9.0})).plus(move(outcome={"took_s": 2.0}))
    assert switch_costs(moves, None).move_s == 2.0
    assert switch_costs(moves, 7.0).world_s == 7.0
    assert switch_costs(moves.plus(move(MoveKind.WORLD, outcome={"took_s": 5.0})), 7.0).world_s == 7.0


@pytest.mark.parametrize(
    ("kind", "state", "begins"),
    [
        pytest.param(MoveKind.LEND, "done", "lent 1 slot from rollout to the judges", id="lend"),
        pytest.param(MoveKind.SPLIT, "would", "would have gone from 4 rollout", id="would"),
        pytest.param(MoveKind.RETURN, "would", "would have given 1 slot back to the judges", id="would give back"),
        pytest.param(MoveKind.WORLD, "wanted", "wants to form a train world", id="wanted"),
        pytest.param(MoveKind.WORLD, "lapsed", "wanted to form a train world of 1 rank", id="lapsed"),
        pytest.param(
            MoveKind.MEND, "done", "nodes or workers came or went, and 4 rollout, 1 reward, 1 train became", id="mend"
        ),
    ],
)
def test_each_move_is_one_sentence(kind: MoveKind, state: str, begins: str) -> None:
    assert move_in_words(move(kind, state=state)).startswith(begins)


def test_a_split_is_stored_as_it_is() -> None:
    assert split_part(FIRST) == SplitPart(mode="coexisting", rollout=4, reward=1, train=1)
