"""A restart's cause, from the rule that decides on it to the event, the terminal, the page and `gcore describe`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import KEYS, running_job, stored

from controllers.api.job_messages import add_news
from controllers.cli.output import job_rows, job_snapshot
from controllers.cli.view.state import ViewState
from controllers.rules.actions import Rollback
from controllers.rules.decide import decide
from controllers.rules.view import JobView, RankView
from controllers.telemetry.events import EventLog
from controllers.web.content import _event
from gcore.api.v1 import jobs_pb2 as pb
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import LogEntry, RaisedGoal
from gcore.ledger.records.cluster import Claim, KnownShare, QueuePosition, Share, Shares
from gcore.ledger.records.job import EnginePlace, NodeRecord, Plan
from gcore.ledger.records.restart_reasons import (
    GAVE_BACK,
    SMALLER,
    engines_removed,
    slots_gone,
    slots_taken,
    slots_unusable,
)
from gcore.observability.events import JobEvent
from gcore.store.types import KeyValue, WatchBatch, WatchEvent
from gcore.types import Token

NODES = {
    name: NodeRecord(name=name, incarnation=f"{name}.x", address="a:1", slots=("cpu:0",), pid=1)
    for name in ("node-0", "node-1")
}
VIEW = replace(running_job(), nodes=NODES)
DEAD = VIEW.workers["t1"].model_copy(update={"state": "failed", "reason": "killed by SIGKILL"})
GONE = {"t0": VIEW.workers["t0"]}
SHARE = KnownShare("u", Shares(jobs={"u": Share(held={"node-0": ("cpu:0",), "node-1": ("cpu:0",)})}), 7)
TAKEN = ("2 slots go to job 7f3a",)

VIEWS = {
    "node node-1 was lost with train rank 1": replace(VIEW, workers=GONE, nodes={"node-0": NODES["node-0"]}),
    "the worker of train rank 1 on node node-1 disappeared without a report": replace(VIEW, workers=GONE),
    "train rank 1 on node node-1 failed: killed by SIGKILL": replace(VIEW, workers={**GONE, "t1": DEAD}),
    "etcd was restored from an older backup, of step 0: rank 0 has trained step 2": replace(
        VIEW, ranks={0: RankView(0, applied=Token(0, 2, 1)), 1: RankView(1)}
    ),
    "preempted, 2 slots went to job 7f3a": replace(
        VIEW, share=SHARE, queued=QueuePosition(1, "it needs 1 slot"), surplus_reasons=TAKEN
    ),
    "1 slot is on a draining node: node-1": replace(
        VIEW,
        share=replace(SHARE, shares=Shares(jobs={"u": SHARE.share.model_copy(update={"granted": {"node-0": ("cpu:0",)}})})),
        surplus_reasons=("1 slot is on a draining node: node-1",),
    ),
    "paused by `gcore pause`, or because `gcore run` was interrupted": replace(VIEW, share=SHARE, claim=Claim(paused=True)),
    "cancelled on request": replace(VIEW, share=SHARE, claim=Claim(ends="cancelled on request")),
}  # fmt: skip


def decided(view: JobView) -> str:
    """The stored reason of the rollback that the rules decide on."""
    (reason,) = {intent.action.reason for intent in decide(view) if isinstance(intent.action, Rollback)}
    return reason


def rollback(reason: str, raised: RaisedGoal | None = None) -> tuple[JobMirror, chain.Advance]:
    """The records before, and the entry."""
    base = chain.base_entry(2, "w", ChainWriter("node-0.a", "n"))
    advance = chain.rollback_entry(base.head, base.entry, "w2", ChainWriter("node-0.a", "m"), reason, raised=raised)
    return replace(VIEW.mirror, head=stored(base.head), log={0: stored(base.entry)}), advance


def written(before: JobMirror, advance: chain.Advance) -> tuple[EventLog, JobMirror]:
    entry, head = LogEntry.decode(advance.entry.encode()), advance.head
    puts = [(KEYS.log(entry.seq), entry.encode()), (KEYS.head, head.encode())]
    batch = WatchBatch(tuple(WatchEvent("put", KeyValue(key, value, 9, 9)) for key, value in puts), 9)
    log, after = EventLog(KEYS), before.fold(batch)
    log.note(before, batch, after, 0.0)
    return log, after


@pytest.mark.parametrize(("cause", "view"), VIEWS.items(), ids=VIEWS)
def test_each_view_of_a_restart_names_its_cause(cause: str, view: JobView) -> None:
    reason = decided(view)
    log, after = written(*rollback(reason))
    (event,) = log.events
    assert event.kind == "rollback"
    assert cause in event.message
    assert "(attempt 2)" in event.message
    assert event.data == {"from_step": 0, "to_step": 0, "lineage": 1, "reason": reason}, "programs read these"
    told = JobEvent(event.sequence, event.time, event.kind, event.message, json.loads(event.data_json))
    assert ViewState().apply(told).log[-1].text == event.message
    assert _event(event)["message"] == event.message
    job = add_news(pb.Job(uid="u", name="u", state=pb.JOB_STATE_RUNNING), after)
    assert job.rollback.reason == reason
    assert cause in job_rows(job_snapshot(job), 0.0)["last rollback"]


def test_a_raised_goal_is_no_restart() -> None:
    raised = RaisedGoal(what="steps", before=4, after=8)
    log, _ = written(*rollback(f"continued after its end: {raised}", raised))
    assert log.events[0].message == (
        "continued from the initial model (attempt 2): the goal was raised from 4 to 8 steps"
    )


ENGINES = tuple(EnginePlace(node=f"node-{n}", slot="cpu:0") for n in range(3))
PLAN = Plan(generation=1, world="w", ranks=(), engines=ENGINES, reason="static placement")


@pytest.mark.parametrize(
    ("why", "said"),
    [
        pytest.param(
            f"{SMALLER}; {slots_taken(1, 'job 7f3a')}",
            "1 engine removed, 2 remain: preempted, 1 slot went to job 7f3a",
            id="preempted",
        ),
        pytest.param(
            f"{SMALLER}; {slots_unusable(1, 'node-2', draining=True)}",
            "1 engine removed, 2 remain: 1 slot is on a draining node: node-2",
            id="drained",
        ),
        pytest.param(
            f"{SMALLER}; {slots_gone(1, 'node-2')}",
            "1 engine removed, 2 remain: 1 slot is on a node that is gone: node-2",
            id="node lost",
        ),
        pytest.param(
            GAVE_BACK, "1 engine removed, 2 remain: preempted, its slots went to other jobs", id="an older version's"
        ),
    ],
)
def test_engines_that_a_job_loses_without_a_restart_have_an_event_with_the_cause(why: str, said: str) -> None:
    smaller = PLAN.model_copy(
        update={"generation": 2, "engines": ENGINES[:2], "reason": engines_removed(PLAN.reason, 1, why)}
    )
    assert events_of(PLAN, smaller) == [("engines", said)]
    again = smaller.model_copy(
        update={"generation": 3, "engines": ENGINES[:1], "reason": engines_removed(smaller.reason, 1, why)}
    )
    assert again.reason == engines_removed(PLAN.reason, 1, why), "reasons of many removals do not pile up"
    assert events_of(smaller, again) == [("engines", said.replace("2 remain", "1 remains"))]


def test_other_changes_of_a_plan_have_no_event_of_engines() -> None:
    moved = PLAN.model_copy(update={"generation": 2, "engines": ENGINES[:2], "reason": "the policy moved slots"})
    removed = moved.model_copy(update={"reason": engines_removed("static", 1, SMALLER)})
    assert events_of(PLAN, moved) == events_of(removed, removed) == []
    assert events_of(PLAN, removed.model_copy(update={"world": "w2"})) == []


def events_of(old: Plan, new: Plan) -> list[tuple[str, str]]:
    before = replace(VIEW.mirror, plan=stored(old))
    batch = WatchBatch((WatchEvent("put", KeyValue(KEYS.plan, new.encode(), 9, 9)),), 9)
    log = EventLog(KEYS)
    log.note(before, batch, before.fold(batch), 0.0)
    return [(event.kind, event.message) for event in log.events]
