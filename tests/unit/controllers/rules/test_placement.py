"""The planner of a job's placement, its records, and the train world that a policy requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import ME, PEER, running_job, stored

from controllers.job.executor import _move_transaction
from controllers.rules.actions import ReportMoves, Rollback, TakeLead, WriteMove
from controllers.rules.decide import decide
from controllers.rules.placement import is_leader, take_lead, write_moves
from controllers.rules.view import JobView
from controllers.rules.world import awaits_world, growth_delay_s, growth_reason, wanted_world
from controllers.telemetry.gauges import count_moves
from gcore.config import parse_spec
from gcore.ledger.records.chain import Seal, SealState
from gcore.ledger.records.job import EnginePlace, Leader, Move, MoveKind, Moves, NodeRecord, Pin
from gcore.ledger.transactions import Versioned
from gcore.observability.metrics import Metrics
from gcore.store.types import Compare
from placement.assign import split_of
from placement.moves import MoveProposal, MoveReport, split_part
from placement.slots import Split

TREE = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d", "shards": 4, "window": 8},
    "flow": {"steps": 3, "groups_per_step": 4, "samples_per_prompt": 2},
    "rollout": {"max_new_tokens": 4},
    "placement": {"policy": "dynamic"},
}


def moving(leader: str | None = ME, **more: Any) -> JobView:
    """A job whose policy moves slots; who leads it."""
    view = running_job()
    assert view.mirror.plan is not None
    engines = tuple(EnginePlace(node=f"node-{i}", slot="cpu:1") for i in range(2))
    plan = view.mirror.plan.record.model_copy(update={"engines": engines})
    leaders = {} if leader is None else {"": stored(Leader(node=leader.split(".")[0], incarnation=leader))}
    nodes = {
        name: NodeRecord(name=name, incarnation=f"{name}.x", address="h:1", slots=("cpu:0", "cpu:1"), pid=1)
        for name in ("node-0", "node-1")
    }
    mirror = replace(view.mirror, plan=stored(plan), leaders=leaders)
    return replace(view, spec=parse_spec(TREE), mirror=mirror, nodes=nodes, **more)


def move(view: JobView, kind: MoveKind = MoveKind.SPLIT, **more: Any) -> Move:
    assert view.mirror.plan is not None
    now = split_part(split_of(view.mirror.plan.record))
    fields = {"generation": 2, "step": view.head.step, "seq": view.head.seq, "before": now, "after": now}
    return Move.model_validate({"kind": kind, "reason": "why"} | fields | more)


@pytest.mark.parametrize(
    ("leader", "wanted"),
    [
        pytest.param(None, True, id="nobody leads"),
        pytest.param(ME, False, id="I do"),
        pytest.param(PEER, False, id="a member does"),
        pytest.param("node-7.gone", True, id="who leads works on the job no more"),
    ],
)
def test_the_leadership_is_taken_when_nobody_has_it_who_works_on_the_job(leader: str | None, wanted: bool) -> None:
    assert [intent.action for intent in take_lead(moving(leader))] == [TakeLead()] * wanted


def test_draining_member_neither_takes_nor_keeps_the_leadership() -> None:
    assert list(take_lead(replace(moving(None), leaving=True))) == []
    assert not is_leader(replace(moving(ME), leaving=True))
    view = moving(PEER)
    going = {
        name: stored(s.record.model_copy(update={"leaving": name == PEER})) for name, s in view.mirror.members.items()
    }
    left = replace(view, mirror=replace(view.mirror, members=going))
    assert [intent.action for intent in take_lead(left)] == [TakeLead()]


def test_jobs_without_moving_slots_have_no_leader() -> None:
    assert list(take_lead(replace(moving(None), spec=running_job().spec))) == []


def test_a_proposal_is_written_by_who_leads_while_it_is_about_the_plan_and_the_step_there_are() -> None:
    view = moving()
    assert view.mirror.plan is not None
    proposal = MoveProposal(move(view), view.mirror.plan.record.model_copy(update={"generation": 2}))
    assert [i.action for i in write_moves(replace(view, proposal=proposal))] == [WriteMove(proposal)]
    assert list(write_moves(replace(moving(PEER), proposal=proposal))) == []
    written = replace(view, mirror=replace(view.mirror, movings={"": stored(Moves().plus(proposal.move))}))
    assert list(write_moves(replace(written, proposal=proposal))) == []
    late = MoveProposal(move(view, step=7), proposal.plan)
    other = MoveProposal(move(view, generation=3), proposal.plan)
    assert list(write_moves(replace(view, proposal=late))) == []
    assert list(write_moves(replace(view, proposal=other))) == []


@pytest.mark.parametrize(
    ("pin", "kind", "is_written"),
    [
        pytest.param(Pin(frozen=True), MoveKind.SPLIT, False, id="frozen since"),
        pytest.param(Pin(frozen=True), MoveKind.RETURN, True, id="reassigned slots return"),
        pytest.param(Pin(reward=9), MoveKind.SPLIT, False, id="another size"),
        pytest.param(Pin(rollout=2), MoveKind.SPLIT, True, id="the size that it has"),
        pytest.param(Pin(), MoveKind.SPLIT, True, id="nothing"),
    ],
)
def test_move_that_contradicts_a_newer_pin_is_not_written(pin: Pin, kind: MoveKind, is_written: bool) -> None:
    view = moving()
    assert view.mirror.plan is not None
    proposal = MoveProposal(move(view, kind), view.mirror.plan.record.model_copy(update={"generation": 2}))
    assert proposal.move.after.rollout == 2
    pinned = replace(view, proposal=proposal, mirror=replace(view.mirror, pins={"": stored(pin)}))
    assert [i.action for i in write_moves(pinned)] == ([WriteMove(proposal)] if is_written else [])


def test_outcomes_of_moves_are_written_once() -> None:
    view = moving()
    account = MoveReport(Moves(moves=(move(view),), total=1), 0)
    assert [i.action for i in write_moves(replace(view, move_report=account))] == [ReportMoves(account)]
    told = replace(view, mirror=replace(view.mirror, movings={"": stored(account.moves)}), move_report=account)
    assert list(write_moves(told)) == []


def test_an_account_that_knows_nothing_of_a_move_that_was_written_since_does_not_take_it_away() -> None:
    view = moving()
    first = Moves().plus(move(view, generation=1))
    more = MoveReport(first.model_copy(update={"moves": (move(view, generation=1, outcome={"took_s": 2.0}),)}), 3)
    known = replace(view, mirror=replace(view.mirror, movings={"": Versioned(first, 3)}), move_report=more)
    (tells,) = [i.action for i in write_moves(known)]
    later = replace(known, mirror=replace(known.mirror, movings={"": Versioned(first.plus(move(view)), 9)}))
    assert list(write_moves(later)) == [], "it is made anew from what is there by now"
    txn = _move_transaction(tells, later)
    assert Compare(view.mirror.keys.moves, 3) in txn.compares, "what was decided on an older look loses its compare"


def wanting(view: JobView, **more: Any) -> JobView:
    after = split_part(Split("coexisting", 1, 0, 1))
    wish = move(view, MoveKind.WORLD, state="wanted", after=after, **more)
    return replace(view, mirror=replace(view.mirror, movings={"": stored(Moves().plus(wish))}))


def test_a_world_that_a_policy_wants_is_formed_by_anybody_between_steps() -> None:
    view = wanting(moving(PEER))
    assert wanted_world(view) is not None
    assert growth_reason(view) == "placement: why"
    assert growth_delay_s(view) > 0
    (rollback,) = [i.action for i in decide(view) if isinstance(i.action, Rollback)]
    assert rollback.split is not None
    assert (rollback.split.train, rollback.between_steps, rollback.slots_as_seen) == (1, True, True)


def test_another_plan_is_not_written_while_a_world_may_be_formed() -> None:
    view = wanting(moving())
    assert view.mirror.plan is not None
    lent = MoveProposal(
        move(view, MoveKind.LEND, time=9.0), view.mirror.plan.record.model_copy(update={"generation": 2})
    )
    assert awaits_world(view)
    assert list(write_moves(replace(view, proposal=lent))) == []
    ready = Seal.model_construct(step=view.head.step + 1, state=SealState.READY, lineage=0, groups=())
    begun = replace(view, mirror=replace(view.mirror, seals={ready.step: stored(ready)}))
    assert not awaits_world(begun), "the next step is trained before it"
    assert [i.action for i in write_moves(replace(begun, proposal=lent))] == [WriteMove(lent)]


@pytest.mark.parametrize(
    "more",
    [pytest.param({"seq": 5}, id="of another head"), pytest.param({"generation": 4}, id="of another plan")],
)
def test_a_world_that_was_wanted_of_another_head_or_plan_is_not_formed(more: dict[str, Any]) -> None:
    view = wanting(moving(PEER), **more)
    assert growth_reason(view) == ""
    assert not [i for i in decide(view) if isinstance(i.action, Rollback)]


def test_a_larger_world_is_no_gain_of_its_own_where_a_policy_decides() -> None:
    assert growth_reason(moving()) == ""


def test_moves_are_counted_by_kind_and_state() -> None:
    metrics, view = Metrics(), moving()
    assert view.mirror.plan is not None
    count_moves(metrics, WriteMove(MoveProposal(move(view), view.mirror.plan.record)))
    count_moves(metrics, ReportMoves(MoveReport(Moves(), 0)))
    assert metrics.moves.labels("split", "done")._value.get() == 1
