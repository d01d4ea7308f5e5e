"""Pinned placements: valid and invalid pins, and the API's report of a placement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import KEYS, running_job, stored

from controllers.api.jobs import describe_placement, parse_pin, write_pin
from controllers.cli.view.placement import (
    history_table,
    move_tree,
    placement_rows,
    placement_story,
    placement_tree,
    plan_of,
    slot_roles,
    split_in_words,
)
from gcore.api.v1 import jobs_pb2 as pb
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus, Leader, Move, MoveKind, MoveOutcome, Moves, Pin
from gcore.ledger.transactions import Transaction, TxnOutcome, TxnReport
from placement.assign import assign_split
from placement.moves import split_part
from placement.slots import NodeSlots, Snapshot, Split

FIRST, SECOND = Split("coexisting", 2, 1, 1), Split("coexisting", 1, 2, 1)
SPEC: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "data": {"path": "d"},
    "flow": {"steps": 3},
    "rollout": {"max_new_tokens": 4},
    "judges": [
        {
            "name": "tutor",
            "model": {"path": "m"},
            "template": "{{ prompt }}{{ response }}",
            "max_new_tokens": 8,
            "verdict": {"parser": "number"},
        }
    ],
    "reward": {"judge": "tutor"},
    "placement": {"policy": "dynamic"},
}


def job(**placement: Any) -> JobRecord:
    spec = {**SPEC, "placement": placement} if placement else SPEC
    return JobRecord(uid="u", name="j", spec=spec, run_dir="/r", created=0.0, prompts=40)


def asked(**more: Any) -> pb.PinPlacementRequest:
    return pb.PinPlacementRequest(job="j", **more)


def mirror(**more: Any) -> JobMirror:
    plan = assign_split(
        FIRST,
        None,
        Snapshot((NodeSlots("a", ("cpu:0", "cpu:1")), NodeSlots("b", ("cpu:0", "cpu:1")))),
        ("tutor",),
        world="w",
        generation=3,
    )
    move = Move(
        generation=3,
        step=2,
        kind=MoveKind.SPLIT,
        before=split_part(SECOND),
        after=split_part(FIRST),
        slots=("a/cpu:1 reward -> rollout",),
        reason="the judges were idle",
        idle={"reward": 0.6},
        expected_s=2.0,
        before_s=3.0,
        cost_s=1.0,
        time=1000.0,
        outcome=MoveOutcome(took_s=1.2, steps=2, step_s=2.1, before_s=3.1),
    )
    leaders = {"": stored(Leader(node="a", incarnation="a.x"))}
    found = replace(
        running_job().mirror,
        job=stored(job()),
        plan=stored(plan),
        leaders=leaders,
        movings={"": stored(Moves().plus(move))},
    )
    return replace(found, **more)


def test_pins_accumulate_and_a_release_clears_all() -> None:
    first = parse_pin(asked(reward=2), Pin(), job(), 8, "a", 5.0)
    assert (first.reward, first.by, first.time) == (2, "a", 5.0)
    both = parse_pin(asked(freeze=True, train=1), first, job(), 8, "a", 6.0)
    assert (both.frozen, both.reward, both.train) == (True, 2, 1)
    assert str(both) == "nothing moves, reward has 2, train has 1"
    assert not parse_pin(asked(release=True), both, job(), 8, "a", 7.0).fixes


@pytest.mark.parametrize(
    ("request_", "record", "said"),
    [
        pytest.param(asked(), job(), "the request pins nothing", id="nothing"),
        pytest.param(
            asked(release=True, freeze=True), job(), "cannot be combined with other options", id="release and more"
        ),
        pytest.param(asked(rollout=0), job(), "cannot have 0 slots", id="no slots"),
        pytest.param(
            asked(rollout=6, reward=3), job(), "rollout 6, reward 3 need more than the 8 slots", id="too many"
        ),
        pytest.param(asked(rollout=6, reward=3), job(), "Lower one of them", id="too many, of several"),
        pytest.param(asked(reward=9), job(), "Lower reward, or release", id="too many, of one"),
        pytest.param(
            asked(freeze=True), job(policy="colocated"), "never moves slots", id="a policy that moves nothing"
        ),
    ],
)
def test_impossible_pins_are_refused_in_a_sentence(request_: Any, record: JobRecord, said: str) -> None:
    with pytest.raises(GcoreError, match=said):
        parse_pin(request_, Pin(), record, 8, "a", 5.0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        pytest.param(asked(rollout=3), "rollout 3 is not a whole number of engines of 4 slots each", id="rollout"),
        pytest.param(asked(reward=3), "reward 3 is not a whole number .* 2 slots each", id="reward"),
        pytest.param(asked(rollout=4, train=3), "train 3, with 2 for reward, need more than the 8 slots", id="others"),
    ],
)
def test_engines_that_span_several_slots_are_fixed_whole(request_: Any, said: str) -> None:
    """What is fixed and cannot be had would move nothing from then on, and be told of at each step."""
    wide = {"engine": "sglang", "slots_per_engine": 2}
    (judge,) = SPEC["judges"]
    rollout = SPEC["rollout"] | wide | {"slots_per_engine": 4}
    record = job().model_copy(update={"spec": SPEC | {"rollout": rollout, "judges": [judge | {"serving": wide}]}})
    with pytest.raises(GcoreError, match=said):
        parse_pin(request_, Pin(), record, 8, "a", 5.0)
    assert parse_pin(asked(reward=2, rollout=4), Pin(), record, 8, "a", 5.0).sizes == {"rollout": 4, "reward": 2}


def test_a_pool_that_has_nothing_to_do_gets_no_slots() -> None:
    spec = {key: value for key, value in SPEC.items() if key not in ("judges", "reward")}
    record = JobRecord(uid="u", name="j", spec=spec, run_dir="/r", created=0.0, prompts=40)
    with pytest.raises(GcoreError, match="serves no judge"):
        parse_pin(asked(reward=1), Pin(), record, 8, "a", 5.0)


class Writes:
    """A ledger whose answers are given."""

    def __init__(self, *outcomes: TxnOutcome) -> None:
        self.outcomes, self.made = list(outcomes), list[Transaction]()

    async def run(self, txn: Transaction) -> TxnReport:
        self.made.append(txn)
        return TxnReport(self.outcomes.pop(0), 1)


async def test_pin_write_retries_after_a_lost_compare_and_reports_unknown_outcomes() -> None:
    looked = 0

    async def look() -> JobMirror:
        nonlocal looked
        looked += 1
        return mirror()

    ledger = Writes(TxnOutcome.STALE, TxnOutcome.WON)
    await write_pin(ledger, look, asked(freeze=True), 8, "a", 5.0)  # type: ignore[arg-type]
    assert (looked, [txn.writes[0].key for txn in ledger.made]) == (2, [KEYS.pin] * 2)
    with pytest.raises(StoreUnavailable, match="unknown whether"):
        await write_pin(Writes(TxnOutcome.UNKNOWN), look, asked(freeze=True), 8, "a", 5.0)  # type: ignore[arg-type]
    ended = stored(JobStatus(phase=JobPhase.SUCCEEDED))

    async def over() -> JobMirror:
        return mirror(status=ended)

    with pytest.raises(GcoreError, match="has ended"):
        await write_pin(Writes(), over, asked(freeze=True), 8, "a", 5.0)  # type: ignore[arg-type]


def test_displayed_placement_names_each_slot_and_its_sleeping_engines() -> None:
    reply = describe_placement(mirror(), frozenset({"a", "b"}))
    rows = placement_rows(reply)
    assert rows["slots"] == "2 rollout, 1 reward, 1 train"
    assert rows["planned by"] == "a"
    assert "away" not in rows
    tree = placement_tree(reply)
    assert tree["split"] == {"mode": "coexisting", "rollout": 2, "reward": 1, "train": 1}
    assert len(tree["slots"]) == 4
    assert any("judge tutor (asleep)" in what for what in tree["slots"].values())
    plan = mirror().plan
    assert plan is not None
    assert sum(what == ["train rank 0"] for what in slot_roles(plan.record).values()) == 1


def test_while_something_is_fixed_it_is_not_said_that_slots_are_lent() -> None:
    reply = describe_placement(mirror(), frozenset({"a", "b"}))
    reply.lends, reply.pin = True, Pin().encode()
    assert placement_rows(reply)["elastic reassignment"] == "yes"
    for pin in (Pin(frozen=True), Pin(reward=1)):
        reply.pin = pin.encode()
        assert placement_rows(reply)["elastic reassignment"] == "not while pinned"
    reply.lends = False
    assert placement_rows(reply)["elastic reassignment"] == "no"


def test_the_account_says_of_a_move_why_what_was_expected_and_what_came_of_it() -> None:
    reply = describe_placement(mirror(), frozenset({"a", "b"}))
    told = "\n".join(placement_story("j", reply, mirror().moves.moves, 0))
    for said in (
        "placed by policy dynamic on a;",
        "after step 2: went from 1 rollout, 2 reward, 1 train to 2 rollout, 1 reward, 1 train, because the judges were idle.",
        "Idle before: reward 60%.",
        "a step was to take 2.0 s instead of 3.0 s, and the change was to cost 1.0 s once",
        "Slots: reward -> rollout: 1 on a.",
        "it took 1.2 s; the 2 steps after it took 2.1 s each, before it 3.1 s",
    ):
        assert said in told
    assert placement_story("j", None, (), 0)[-1] == "There were no moves."
    still = describe_placement(mirror(job=stored(job(policy="static", train=1, reward=1))), frozenset({"a", "b"}))
    assert placement_story("j", still, (), 0)[-1] == "There were no moves: policy static never moves slots."
    (move,) = mirror().moves.moves
    assert move_tree(move)["sentence"].startswith("went from")
    assert len(history_table([move]).rows) == 1


def test_slots_of_nodes_that_are_away_are_told_apart_from_those_that_serve() -> None:
    reply = describe_placement(mirror(), frozenset({"a"}))
    assert list(reply.away) == ["b"]
    whole, plan = mirror().plan.record, plan_of(reply)
    assert plan == whole
    here = {slot for slot in slot_roles(whole) if slot.node == "a"}
    told = split_in_words(whole, reply.away)
    assert told == "1 rollout, 0 reward, 1 train; 2 slots of b, planned for 1 rollout, 1 reward, are absent"
    assert f"Now: {told} (plan 3)." in placement_story("j", reply, (), 0)
    assert (placement_rows(reply)["slots"], placement_rows(reply)["absent nodes"]) == (told, "b")
    tree = placement_tree(reply)
    assert sum(tree["split"][pool] for pool in ("rollout", "reward", "train")) == len(here)
    assert tree["split_away"] == {"rollout": 1, "reward": 1, "train": 0}
    assert placement_tree(describe_placement(mirror(), frozenset({"a", "b"})))["split_away"] is None


def test_a_job_that_has_not_started_is_shown_without_a_plan() -> None:
    reply = describe_placement(replace(mirror(), plan=None, leaders={}, head=None), frozenset())
    assert "has not started" in placement_rows(reply)["plan"]
    assert placement_tree(reply)["split"] is None
