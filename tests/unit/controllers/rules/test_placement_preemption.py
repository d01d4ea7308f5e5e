"""A job and its share of the slots: released slots, preemption and resumption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import ME, running_job, sealed_job, stored

from controllers.rules.actions import ChangePlan, Intent, MakeSeal, ReturnSlots, Rollback, SetPhase, StartJob
from controllers.rules.decide import decide
from controllers.rules.placement import is_suspended, remove_slots, wants_checkpoint
from controllers.rules.view import CheckpointProgress, JobView, RankView, SavedCheckpoint, Timers
from controllers.rules.waits import current_waits, overdue_waits
from controllers.rules.workers import Launches, StartEngine, StopWorker, schedule_workers
from controllers.rules.world import fruitless_rollbacks, placement_snapshot
from gcore.ledger.records.chain import Checkpoint, Checkpoints, LogEntry
from gcore.ledger.records.cluster import Claim, KnownShare, QueuePosition, Share, Shares, group_by_node
from gcore.ledger.records.job import EnginePlace, JobPhase, JobStatus, NodeRecord
from gcore.ledger.records.restart_reasons import GAVE_BACK, HAS_AGAIN, LEFT, cause_in_words, removal_cause
from gcore.ledger.selection import SealStep
from gcore.types import Token, Version
from gcore.worker.records import WorkerRecord

BOTH = frozenset({("node-0", "cpu:0"), ("node-1", "cpu:0")})
FIRST = frozenset({("node-0", "cpu:0")})
NONE: frozenset[tuple[str, str]] = frozenset()


def share(granted: frozenset[tuple[str, str]], held: frozenset[tuple[str, str]] = BOTH) -> KnownShare:
    one = Share(granted=group_by_node(granted), held=group_by_node(held))
    return KnownShare("u", Shares(jobs={"u": one}), 7)


def job(granted: frozenset[tuple[str, str]], *, step: int = 0, saved: int = 0, **more: Any) -> JobView:
    """At `step`, with a checkpoint of step `saved`; engines and a rank on each of two nodes, of which these slots are granted."""
    view = running_job()
    assert view.mirror.plan is not None
    nodes = {
        n: NodeRecord(name=n, incarnation=f"{n}.x", address="a:1", slots=("cpu:0",), pid=1)
        for n in ("node-0", "node-1")
    }
    engines = tuple(EnginePlace(node=name, slot="cpu:0") for name in nodes)
    head = view.head.model_copy(update={"step": step, "seq": step})
    saves = (Checkpoint(lineage=0, step=0, seq=0, file=""),)
    if saved:
        saves += (Checkpoint(lineage=0, step=saved, seq=saved, file=f"checkpoints/0-{saved}", digest="d"),)
    entries = {
        seq: stored(
            LogEntry(
                seq=seq, parent=seq - 1, kind="train", lineage=0, step=seq, world="w", nonce="n", token=Token(0, seq, 1)
            )
        )
        for seq in range(1, step + 1)
    }
    mirror = replace(
        view.mirror,
        plan=stored(view.mirror.plan.record.model_copy(update={"engines": engines})),
        head=stored(head),
        log={**view.mirror.log, **entries},
        checkpoints=stored(Checkpoints(entries=saves)),
    )
    spec = view.spec.model_copy(update={"train": view.spec.train.model_copy(update={"copies_gb": 0})})
    return replace(view, mirror=mirror, nodes=nodes, spec=spec, share=share(granted), **more)


def intents(view: JobView, kind: type) -> list[Any]:
    return [intent.action for intent in decide(view) if isinstance(intent.action, kind)]


def suspended(view: JobView) -> JobView:
    assert view.mirror.plan is not None
    plan = view.mirror.plan.record.model_copy(
        update={"ranks": (), "engines": (), "generation": 2, "stands_still": True}
    )
    return replace(view, mirror=replace(view.mirror, plan=stored(plan)), workers={})


def test_a_job_that_has_all_that_it_uses_leaves_nothing() -> None:
    view = job(BOTH)
    assert not intents(view, Rollback)
    assert not intents(view, ReturnSlots)
    assert not wants_checkpoint(view)


def test_without_shares_a_job_uses_what_is_there() -> None:
    view = replace(job(BOTH), share=None)
    assert placement_snapshot(view).slots == 2
    assert not intents(view, ReturnSlots)


def test_only_granted_slots_are_planned_with() -> None:
    assert [node.node for node in placement_snapshot(job(FIRST)).nodes] == ["node-0"]
    assert placement_snapshot(job(NONE)).slots == 0


def test_a_smaller_world_is_formed_between_two_steps_from_heads_own_state() -> None:
    (action,) = intents(job(FIRST, step=1, saved=1), Rollback)
    assert (action.between_steps, action.slots_as_seen, action.stands_still) == (True, True, False)
    assert action.reason == f"{LEFT}: its share is smaller now"
    assert intents(job(FIRST, step=2, saved=1), Rollback) == [], "head has no checkpoint yet"


def test_the_reason_names_who_gets_the_slots_after_the_words_by_which_programs_know_it() -> None:
    taken = ("1 slot goes to job 7f3a",)
    (smaller,) = intents(job(FIRST, step=1, saved=1, surplus_reasons=taken), Rollback)
    assert smaller.reason == f"{LEFT}: its share is smaller now; 1 slot goes to job 7f3a"
    queued = QueuePosition(1, "it needs 1 slot")
    (preempted,) = intents(job(NONE, step=1, saved=1, queued=queued, surplus_reasons=taken), Rollback)
    assert preempted.reason == f"{GAVE_BACK}: it needs 1 slot; 1 slot goes to job 7f3a"
    assert cause_in_words(smaller.reason) == cause_in_words(preempted.reason) == "preempted, 1 slot went to job 7f3a"


def test_while_a_step_is_trained_nothing_is_left() -> None:
    ready = sealed_job(ready=True, fed=(0, 1))
    view = replace(job(FIRST), mirror=replace(job(FIRST).mirror, seals=ready.mirror.seals), ranks=ready.ranks)
    assert intents(view, Rollback) == []


def test_a_job_without_slots_stands_still_as_soon_as_head_has_a_checkpoint() -> None:
    (action,) = intents(job(NONE, step=1, saved=1), Rollback)
    assert (action.between_steps, action.slots_as_seen, action.stands_still) == (True, True, True)
    assert intents(job(NONE, step=2, saved=1), Rollback) == []
    (action,) = intents(job(NONE), Rollback)
    assert action.stands_still, "before the first step there is nothing to save"


@pytest.mark.parametrize(
    ("granted", "asked"), [(BOTH, False), (FIRST, True), (NONE, True)], ids=["all", "fewer", "none"]
)
def test_the_next_step_has_a_checkpoint_if_slots_are_given_back_after_it(
    granted: frozenset[tuple[str, str]], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = job(granted, step=2, saved=1)
    monkeypatch.setattr(JobView, "chosen", SealStep((), ()))
    monkeypatch.setattr(
        "controllers.rules.step.refuse_seal", lambda *_: None
    )  # whether a batch may be sealed is tested elsewhere
    (action,) = intents(view, MakeSeal)
    assert action.checkpoint is asked


def test_nothing_is_sealed_while_heads_checkpoint_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    view = job(NONE, step=2, saved=1)
    monkeypatch.setattr(JobView, "chosen", SealStep((), ()))
    monkeypatch.setattr(
        "controllers.rules.step.refuse_seal", lambda *_: None
    )  # whether a batch may be sealed is tested elsewhere
    writing = CheckpointProgress(Version(0, 2), 10, 5, "", over=False)
    for more, sealed in ((writing, 0), (replace(writing, over=True), 1), (replace(writing, version=Version(0, 1)), 1)):
        busy = replace(view, ranks={0: RankView(0, writing=more), 1: RankView(1)})
        assert len(intents(busy, MakeSeal)) == sealed
    assert intents(replace(view, saved={Version(0, 2): SavedCheckpoint(Version(0, 2), "f", "d")}), MakeSeal) == []


def test_a_job_whose_last_step_is_trained_ends_and_leaves_nothing_before() -> None:
    assert intents(job(NONE, step=3, saved=3), Rollback) == []
    assert not wants_checkpoint(job(NONE, step=3, saved=1))
    lost = replace(job(NONE, step=3, saved=1), workers={})
    assert [action.stands_still for action in intents(lost, Rollback) if action.stands_still] == [True]


def test_a_lost_world_that_has_no_slots_stands_still_without_a_checkpoint_of_head() -> None:
    view = replace(job(NONE, step=2, saved=1), workers={})
    stands = [action for action in intents(view, Rollback) if action.stands_still]
    assert [(action.between_steps, action.slots_as_seen) for action in stands] == [(False, True)]


def test_suspended_job_resumes_only_with_slots() -> None:
    view = suspended(job(NONE, step=1, saved=1))
    assert is_suspended(view)
    assert intents(view, Rollback) == []
    (action,) = intents(replace(view, share=share(BOTH)), Rollback)
    assert (action.reason, action.slots_as_seen, action.stands_still) == (HAS_AGAIN, True, False)
    assert {type(one.action) for one in decide(view)} <= {ReturnSlots}


def test_slots_are_given_back_when_nothing_of_the_job_is_on_them() -> None:
    view = suspended(job(NONE, step=1, saved=1))
    assert intents(view, ReturnSlots) == [ReturnSlots(BOTH)]
    busy = replace(view, workers={"t0": running_job().workers["t0"]})
    assert intents(busy, ReturnSlots) == [ReturnSlots(BOTH - FIRST)]
    assert intents(job(FIRST, step=2, saved=1), ReturnSlots) == [], "the plan uses them still"
    assert intents(replace(job(FIRST, step=2, saved=1), workers={}), ReturnSlots) == [], (
        "also before anything runs there"
    )


def test_engines_leave_at_once_where_the_world_stays() -> None:
    view = job(FIRST, step=2, saved=1)
    assert view.mirror.plan is not None
    plan = view.mirror.plan.record.model_copy(update={"ranks": view.mirror.plan.record.ranks[:1]})
    (action,) = intents(replace(view, mirror=replace(view.mirror, plan=stored(plan))), ChangePlan)
    assert [place.node for place in action.plan.engines] == ["node-0"]
    assert action.plan.generation == plan.generation + 1
    assert action.plan.reason.endswith(
        "; then 1 engine was removed: its slots are given back: its share is smaller now"
    )
    assert removal_cause(action.plan.reason) == "its share of the slots became smaller"
    judged = plan.model_copy(update={"engines": (*plan.engines, EnginePlace(node="node-1", slot="cpu:0", judge="j"))})
    assert remove_slots(judged, BOTH - FIRST) is None, "the judge would have no engine"


def test_a_job_that_waits_for_its_first_slots_says_so_and_is_not_started() -> None:
    view = job(NONE)
    pending = replace(
        view,
        share=share(NONE, NONE),
        queued=QueuePosition(1, "it needs 1 slot, and other jobs use 2 of 2 slots"),
        mirror=replace(view.mirror, status=stored(JobStatus(phase=JobPhase.PENDING)), head=None, plan=None),
    )
    assert decide(pending) == ()
    assert [wait.what for wait in current_waits(pending)] == [
        "the job waits for slots: it needs 1 slot, and other jobs use 2 of 2 slots"
    ]
    assert intents(replace(pending, share=share(BOTH)), StartJob) == [StartJob()]


def test_a_paused_job_says_how_it_goes_on() -> None:
    view = replace(suspended(job(NONE, step=1, saved=1)), claim=Claim(paused=True))
    assert [wait.what for wait in current_waits(view)] == [
        "the job is suspended: the job is paused; `gcore resume` continues it"
    ]
    (action,) = intents(replace(job(NONE, step=1, saved=1), claim=Claim(paused=True)), Rollback)
    assert action.reason == f"{LEFT}: the job is paused"


def test_a_job_that_somebody_has_paused_stalls_for_nobody() -> None:
    still = suspended(job(NONE, step=1, saved=1))
    pending = replace(
        job(NONE),
        mirror=replace(job(NONE).mirror, status=stored(JobStatus(phase=JobPhase.PENDING)), head=None, plan=None),
    )
    for view in (still, replace(pending, share=share(NONE, NONE))):
        for claim, cause, told in (
            (Claim(), "slots", 1),
            (Claim(paused=True), "paused", 0),
            (Claim(paused=True, ends="cancelled"), "slots", 1),
        ):
            waiting = [*current_waits(replace(view, claim=claim))]
            assert [wait.cause for wait in waiting] == [cause]
            held = Timers({}).note([wait.stall for wait in waiting], 0.0)
            peers = [replace(view, claim=claim, me=me) for me in view.mirror.members]
            assert len([wait for peer in peers for wait in overdue_waits(peer, waiting, held, 1e6)]) == told


def test_a_job_that_is_to_end_does_so_when_it_stands_still_and_not_before() -> None:
    ends = Claim(ends="cancelled, after its step")
    assert intents(replace(job(BOTH, step=1, saved=1), claim=ends), SetPhase) == []
    view = replace(suspended(job(NONE, step=1, saved=1)), claim=ends)
    assert intents(view, SetPhase) == [SetPhase(JobPhase.CANCELLED, "cancelled, after its step", at_head=True)]
    assert intents(replace(view, share=share(BOTH)), Rollback) == [], "it does not go on"
    pending = replace(view.mirror, status=stored(JobStatus(phase=JobPhase.PENDING)), head=None, plan=None)
    assert intents(replace(view, mirror=pending), SetPhase) == [
        SetPhase(JobPhase.CANCELLED, "cancelled, after its step")
    ]


def test_rollbacks_that_nothing_was_wrong_with_are_no_sign_of_a_world_that_cannot_live() -> None:
    view = job(BOTH)
    reasons = [f"{LEFT}: the job is paused", HAS_AGAIN, "rank 0 on node-0 is gone", HAS_AGAIN]
    entries = {
        seq: LogEntry(
            seq=seq, parent=seq - 1, kind="rollback", lineage=seq, step=0, world="w", nonce="n", reason=reason
        )
        for seq, reason in enumerate(reasons, 1)
    }
    mirror = replace(view.mirror, log={**view.mirror.log, **{seq: stored(entry) for seq, entry in entries.items()}})
    assert fruitless_rollbacks(replace(view, mirror=mirror)) == 1


def test_slot_with_another_jobs_worker_is_awaited() -> None:
    view = job(FIRST, step=1, saved=1)
    (start,) = (one for one in schedule_workers(view, Launches(), 0.0) if isinstance(one, StartEngine))
    assert start.place.node == "node-0"
    other = WorkerRecord(
        instance="e9",
        node="node-0",
        role="rollout",
        job_uid="other",
        slot="cpu:0",
        pid=1,
        pid_started=1,
        state="stopping",
    )
    taken = replace(view, workers={**view.workers, "e9": other})
    assert not [one for one in schedule_workers(taken, Launches(), 0.0) if isinstance(one, StartEngine | StopWorker)]
    assert view.me == ME


def test_every_intent_names_a_condition_of_its_own() -> None:
    for view in (job(FIRST, step=1, saved=1), job(NONE, step=1, saved=1), suspended(job(BOTH, step=1, saved=1))):
        found: list[Intent] = list(decide(view))
        assert len({one.condition for one in found}) == len(found)
