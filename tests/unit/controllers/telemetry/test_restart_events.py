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
from gcore.ledger.records.job import NodeRecord
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
    "paused on request": replace(VIEW, share=SHARE, claim=Claim(paused=True)),
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
