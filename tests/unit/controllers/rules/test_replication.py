"""Nodes without a shared folder: durable data is on enough nodes before the store names or deletes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from builders import KEYS, ME, PEER, SPEC, running_job, sealed_job, stored

from controllers.rules import replication as spreading
from controllers.rules.actions import (
    ArchiveRecords,
    CommitStep,
    DiscardCheckpoints,
    FetchCheckpoint,
    FetchStart,
    FetchWeights,
    GatherReceipts,
    PruneLog,
    PublishWeights,
    RegisterCheckpoint,
    ReportFolder,
    Rollback,
)
from controllers.rules.decide import decide
from controllers.rules.retention import PRUNE_AT, prune_log, register_and_forget_checkpoints
from controllers.rules.step import publish_weights, train_step
from controllers.rules.view import EngineView, JobView, RankView, SavedCheckpoint
from controllers.rules.waits import current_waits
from controllers.rules.workers import Launches, StartRank, schedule_workers
from controllers.rules.world import recover_world, world_loss
from gcore.ledger import chain
from gcore.ledger.records.chain import Checkpoint, Checkpoints, HeldCheckpoint, LogEntry, Member, NodeFolder
from gcore.ledger.records.job import EnginePlace, NodeRecord, RankClaim
from gcore.types import Version
from gcore.worker.records import WorkerRecord

THIRD = "node-2.cccc"
APART = SPEC.model_copy(update={"storage": SPEC.storage.model_copy(update={"copies": 2})})
THREE = SPEC.model_copy(update={"storage": SPEC.storage.model_copy(update={"copies": 3})})
SAVED = SavedCheckpoint(Version(0, 2), "checkpoints/0-2", "d" * 64)
HELD = HeldCheckpoint(lineage=0, step=2, digest="d" * 64)


def node(name: str) -> NodeRecord:
    return NodeRecord(name=name, incarnation=f"{name}.x", address=f"{name}:1", slots=("cpu:0",), pid=1)


def apart(view: JobView, said: Mapping[str, Any], spec: Any = APART, **mirrored: Any) -> JobView:
    """The view on node-0 of a job whose nodes share no folder; `said`: what each incarnation said of its folder."""
    folders = {
        by.split(".")[0]: stored(NodeFolder.model_validate({"node": by.split(".")[0], "by": by} | fields))
        for by, fields in said.items()
    }
    nodes = {m.record.node: node(m.record.node) for m in view.mirror.members.values()}
    mirror = replace(view.mirror, folders=folders, **mirrored)
    return replace(view, spec=spec, mirror=mirror, nodes=nodes)


def of(view: JobView, me: str) -> JobView:
    """The same job, seen by another."""
    return replace(view, me=me, node=view.mirror.members[me].record.node)


def stepped(view: JobView) -> JobView:
    """Head is at step 2, whose entry may be named by a checkpoint."""
    head = view.head.model_copy(update={"step": 2, "seq": 2})
    entry = LogEntry(
        seq=2, kind="train", parent=1, lineage=0, step=2, world="w", cursors=head.cursors, nonce="n", delta=()
    )
    mirror = replace(view.mirror, head=stored(head), log={**view.mirror.log, 2: stored(entry)})
    return replace(view, mirror=mirror, saved={SAVED.version: SAVED})


def deeds(view: JobView, kind: type) -> list[Any]:
    return [intent.action for intent in decide(view) if isinstance(intent.action, kind)]


def trained() -> JobView:
    """Every rank has trained the READY step."""
    view = sealed_job(ready=True)
    assert view.seal is not None
    return replace(view, ranks={rank: RankView(rank, applied=view.seal.token) for rank in view.ranks})


def test_where_nodes_share_a_folder_nothing_is_said_fetched_or_waited_for() -> None:
    view = trained()
    kinds = (
        ReportFolder
        | FetchCheckpoint
        | FetchWeights
        | GatherReceipts
        | ArchiveRecords
        | DiscardCheckpoints
        | FetchStart
    )
    assert not deeds(view, kinds)  # type: ignore[arg-type]
    assert deeds(view, CommitStep)


def test_each_says_what_lies_in_its_folder_and_again_in_another_lineage() -> None:
    view = running_job()
    assert deeds(apart(view, {}), ReportFolder)
    assert deeds(apart(view, {"node-0.0000": {}}), ReportFolder), "what an earlier life said is its own"
    said = apart(view, {ME: {}})
    assert not deeds(said, ReportFolder)
    later = replace(said.mirror, head=stored(said.head.model_copy(update={"lineage": 1})))
    assert deeds(replace(said, mirror=later), ReportFolder)


def test_only_the_node_whose_rank_wrote_a_checkpoint_looks_for_it() -> None:
    view = apart(stepped(running_job()), {ME: {}, PEER: {}})
    assert deeds(view, ReportFolder)
    assert not deeds(of(view, PEER), ReportFolder)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({ME: {}, PEER: {}}, False),
        ({ME: {"checkpoints": [HELD]}, PEER: {}}, False),
        ({ME: {"checkpoints": [HELD]}, PEER: {"checkpoints": [HELD]}}, True),
        ({ME: {"checkpoints": [HELD]}, PEER: {"checkpoints": [HELD.model_copy(update={"digest": "e" * 64})]}}, False),
        ({ME: {"checkpoints": [HELD]}, "node-1.0000": {"checkpoints": [HELD]}}, False),
    ],
    ids=["nobody has it", "its writer alone", "two nodes", "the other's is another", "the other was an earlier life"],
)
def test_a_checkpoint_is_named_when_enough_nodes_have_it(said: Mapping[str, Any], named: bool) -> None:
    view = apart(stepped(running_job()), said)
    assert (
        any(isinstance(intent.action, RegisterCheckpoint) for intent in register_and_forget_checkpoints(view)) == named
    )


def test_one_node_alone_names_what_it_has() -> None:
    view = stepped(running_job())
    alone = replace(view, mirror=replace(view.mirror, members={ME: view.mirror.members[ME]}))
    assert deeds(apart(alone, {ME: {"checkpoints": [HELD]}}), RegisterCheckpoint)


def test_a_copy_is_fetched_by_a_node_that_has_none_and_by_no_more_than_are_wanted() -> None:
    view = stepped(running_job())
    members = {**view.mirror.members, THIRD: stored(Member(incarnation=THIRD, node="node-2", address="a:1"))}
    view = replace(view, mirror=replace(view.mirror, members=members))
    said = {ME: {"checkpoints": [HELD]}, PEER: {}, THIRD: {}}
    for spec, eager in ((APART, 1), (THREE, 2)):
        seen = apart(view, said, spec)
        assert not deeds(seen, FetchCheckpoint), "who has it needs none"
        after = [
            intent.after
            for one in (PEER, THIRD)
            for intent in decide(of(seen, one))
            if isinstance(intent.action, FetchCheckpoint)
        ]
        assert len(after) == 2
        assert after.count(0.0) == eager, "the others only if those do not get it"
    both = apart(view, said | {THIRD: {"checkpoints": [HELD]}})
    assert not deeds(of(both, PEER), FetchCheckpoint)


def test_checkpoint_that_no_node_reports_is_not_fetched() -> None:
    assert not deeds(of(apart(stepped(running_job()), {ME: {}, PEER: {}}), PEER), FetchCheckpoint)


def test_a_registered_checkpoint_that_lost_a_copy_gets_another() -> None:
    entries = (Checkpoint(lineage=0, step=0, seq=0, file=""), registered())
    view = apart(
        replace(stepped(running_job()), saved={}),
        {ME: {"checkpoints": [HELD]}, PEER: {}},
        checkpoints=stored(Checkpoints(entries=entries)),
    )
    (intent,) = (one for one in decide(of(view, PEER)) if isinstance(one.action, FetchCheckpoint))
    assert intent.action == FetchCheckpoint(SAVED)
    assert intent.after >= spreading.REPAIR_PATIENCE_S, "not for a controller that is started again"


def registered() -> Checkpoint:
    return Checkpoint(lineage=0, step=2, seq=2, file=SAVED.file, digest=SAVED.digest)


def test_a_step_is_committed_when_its_receipts_lie_on_enough_nodes() -> None:
    view = trained()
    assert view.seal is not None
    token = str(view.seal.token)
    one = apart(view, {ME: {"receipts": token}, PEER: {"receipts": "0.0.1"}})
    assert [type(intent.action) for intent in train_step(one)] == []
    assert [type(intent.action) for intent in train_step(of(one, PEER))] == [GatherReceipts]
    assert any("step 1 commits when 2 nodes have its receipts" in wait.what for wait in current_waits(one))
    both = apart(view, {ME: {"receipts": token}, PEER: {"receipts": token}})
    assert [type(intent.action) for intent in train_step(both)] == [CommitStep]


def test_old_entries_leave_the_store_when_enough_nodes_have_written_them_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = tuple(range(1, PRUNE_AT + 5))
    monkeypatch.setattr(chain, "prunable_entries", lambda *args, **more: old)
    first = old[:PRUNE_AT]
    said: dict[str, Any] = {ME: {}, PEER: {"log": first}}
    assert [intent.action for intent in prune_log(apart(running_job(), said))] == [ArchiveRecords(first, ())]
    assert not list(prune_log(of(apart(running_job(), said), PEER))), "it has"
    said[ME] = {"log": first}
    assert [intent.action for intent in prune_log(apart(running_job(), said))] == [PruneLog(first)]
    assert [intent.action for intent in prune_log(running_job())] == [PruneLog(old)], (
        "where a folder is shared, at once"
    )


def test_engines_get_weights_from_their_own_node_alone_and_these_are_fetched_from_where_they_were_staged() -> None:
    view = apart(stepped(running_job()), {ME: {}, PEER: {}})
    plan = view.mirror.plan
    assert plan is not None
    engines = tuple(EnginePlace(node=f"node-{i}", slot="cpu:1") for i in range(2))
    more = {"slot": "cpu:1", "pid": 1, "pid_started": 1, "state": "serving", "address": "h:1", "job_uid": "u"}
    workers = dict(view.workers) | {
        f"e{i}": WorkerRecord.model_validate({"instance": f"e{i}", "role": "rollout", "node": f"node-{i}"} | more)
        for i in range(2)
    }
    mirror = replace(view.mirror, plan=stored(plan.record.model_copy(update={"engines": engines})))
    views = {f"e{i}": EngineView(f"e{i}", "h:1", Version(0, 1)) for i in range(2)}
    view = replace(view, mirror=mirror, workers=workers, engines=views)
    assert not deeds(view, FetchWeights), "they are staged here"
    assert deeds(of(view, PEER), FetchWeights) == [FetchWeights(Version(0, 2), "node-0")]
    there = replace(view, staged=frozenset({Version(0, 0), Version(0, 2)}))
    assert [intent.action for intent in publish_weights(there)] == [PublishWeights("e0", Version(0, 2))]
    shared = replace(there, spec=SPEC)
    assert len(list(publish_weights(shared))) == 2


def going_on(said: Mapping[str, Any], **more: Any) -> JobView:
    """A second world, that starts from a checkpoint; its ranks are not there yet."""
    view = stepped(running_job())
    head = view.head.model_copy(update={"seq": 3, "lineage": 1, "world": "w2"})
    entry = LogEntry(
        seq=3,
        kind="rollback",
        parent=2,
        lineage=1,
        step=2,
        world="w2",
        cursors=head.cursors,
        nonce="n",
        delta=(),
    )
    assert view.mirror.plan is not None
    mirror = replace(
        view.mirror,
        head=stored(head),
        log={**view.mirror.log, 3: stored(entry)},
        plan=stored(view.mirror.plan.record.model_copy(update={"world": "w2", "generation": 2})),
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""), registered()))),
        claims={},
    )
    said = {by: {"lineage": 1} | fields for by, fields in said.items()}
    return replace(apart(replace(view, mirror=mirror, workers={}, saved={}), said), **more)


def test_a_rank_starts_when_what_it_starts_from_lies_proved_on_its_node() -> None:
    view = going_on({ME: {"checkpoints": [HELD]}, PEER: {}})
    assert deeds(view, FetchStart) == [FetchStart(SAVED, "w2")]
    assert deeds(of(view, PEER), FetchStart) == [FetchStart(SAVED, "w2")]
    assert not [one for one in schedule_workers(view, Launches(), 0.0) if isinstance(one, StartRank)]
    ready = replace(view, fetched_starts=frozenset({"w2"}))
    assert not deeds(ready, FetchStart)
    early = [one for one in schedule_workers(ready, Launches(), 0.0) if isinstance(one, StartRank)]
    assert not early, "it would wait for the other rank, whose node still fetches"
    both = going_on({ME: {"checkpoints": [HELD]}, PEER: {"checkpoints": [HELD]}}, fetched_starts=frozenset({"w2"}))
    assert [one for one in schedule_workers(both, Launches(), 0.0) if isinstance(one, StartRank)]
    claimed = replace(view.mirror, claims={KEYS.world_rank("w2", 0): stored(RankClaim(instance="t"))})
    assert not deeds(replace(view, mirror=claimed), FetchStart), "it has started"


def test_a_world_whose_start_no_node_has_any_more_is_lost_and_a_node_that_has_it_is_waited_for() -> None:
    assert world_loss(going_on({ME: {}, PEER: {"checkpoints": [HELD]}})) is None
    view = going_on({ME: {}, PEER: {}})
    lost = world_loss(view)
    assert lost is not None
    assert "no registered node has checkpoints/0-2" in lost.why
    (intent,) = (one for one in recover_world(view) if isinstance(one.action, Rollback))
    assert intent.after >= spreading.HOLDERS_GRACE_S
    assert any("waiting for a node that has it" in wait.what for wait in current_waits(view))


def test_each_deletes_its_own_copies_of_what_no_record_names() -> None:
    old = HeldCheckpoint(lineage=0, step=1, digest="a" * 64)
    coming = HeldCheckpoint(lineage=0, step=3, digest="b" * 64)
    view = apart(
        stepped(running_job()),
        {ME: {"checkpoints": [old, HELD, coming]}, PEER: {"checkpoints": [old]}},
        checkpoints=stored(Checkpoints(entries=(Checkpoint(lineage=0, step=0, seq=0, file=""), registered()))),
    )
    assert deeds(view, DiscardCheckpoints) == [DiscardCheckpoints((Version(0, 1),))]
    assert deeds(of(view, PEER), DiscardCheckpoints) == [DiscardCheckpoints((Version(0, 1),))]
