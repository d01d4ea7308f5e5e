"""Unreferenced records leave the store: past worlds, parts of evaluations, old evaluations; and the run's folder."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_job import KEYS, SPEC, RecordedJob, a_job_under_way, hands_of
from store_bounds import NODE_TOPICS, archived_evaluations

from controllers.job.executor import apply_action
from controllers.rules.actions import ForgetEvaluations, Intent, SweepKeys
from controllers.rules.retention import FORGET_AT, archive_evaluations, sweep_old_worlds
from controllers.rules.view import JobView
from controllers.rules.waits import LOCAL
from controllers.telemetry.notices import MOST_OF_JOB, PluginErrorLog
from gcore.config import stored_spec
from gcore.ledger.evaluation import best_evaluation
from gcore.ledger.records.chain import Checkpoint, Head
from gcore.ledger.records.job import MOST_SAID, EvalPart, Evaluation, NodeRecord, RankClaim, Trouble
from gcore.ledger.retention import (
    NEWEST_EVALUATIONS,
    NEWEST_TROUBLES,
    SweptKeys,
    superfluous_evaluations,
    sweep,
)
from gcore.ledger.transactions import TxnOutcome, Versioned
from gcore.store.types import Put
from gcore.types import Version


@pytest.fixture
def job(tmp_path: Path) -> RecordedJob:
    return a_job_under_way(tmp_path)


def view_of(job: RecordedJob) -> JobView:
    return JobView(
        spec=stored_spec(SPEC), rules=job.rules, mirror=job.mirror, me="node-0.a", node="node-0", nodes={}, workers={}
    )


def carried_out(job: RecordedJob, intent: Intent) -> TxnOutcome:
    effects = hands_of(job.store, job.run_dir)
    return asyncio.run(apply_action(intent.action, view_of(job), effects)).outcome


def world_keys(job: RecordedJob) -> set[str]:
    return {kv.key.removeprefix(KEYS.world_prefix) for kv in job.listing.kvs if kv.key.startswith(KEYS.world_prefix)}


def claim(job: RecordedJob, world: str) -> None:
    for rank in range(2):
        job.corrupt({KEYS.world_rank(world, rank): RankClaim(instance=f"{world}-{rank}").encode()})
    job.corrupt({KEYS.rendezvous(world): b"127.0.0.1:5"})


def trouble(job: RecordedJob, node: str, topic: str) -> None:
    job.corrupt({KEYS.trouble(topic): Trouble(topic=topic, node=node, sentence="something").encode()})


def test_warnings_of_departed_nodes_leave_the_store_except_the_newest(job: RecordedJob) -> None:
    """Nodes may come and go under ever new names; warnings about the job or about a present node stay."""
    topics = [f"engine-pod-{number}" for number in range(NEWEST_TROUBLES + 3)]
    for number, topic in enumerate(topics):
        trouble(job, f"pod-{number}", topic)
    trouble(job, "node-0", "StartEngine-node-0-cpu:0")
    trouble(job, "pod-0", "wait-train")
    view = view_of(job)
    record = NodeRecord(name="node-0", incarnation="node-0.a", address="h:1", slots=("cpu:0",), pid=1)
    view = replace(view, nodes={"node-0": record})
    (intent,) = sweep_old_worlds(view)
    assert isinstance(intent.action, SweepKeys)
    assert set(intent.action.swept.troubles) == set(topics[:3])
    assert carried_out(job, intent) is TxnOutcome.WON
    left = {kv.key.removeprefix(KEYS.trouble_prefix) for kv in job.listing.kvs if "/trouble/" in kv.key}
    assert left >= {*topics[3:], "StartEngine-node-0-cpu:0", "wait-train"}
    assert not left & set(topics[:3])
    assert not [*sweep_old_worlds(replace(view, mirror=job.mirror))]


def test_the_bound_counts_what_a_node_may_tell() -> None:
    assert len(LOCAL) + len(("engine", "reward")) == NODE_TOPICS


def part(job: RecordedJob, version: Version, number: int) -> None:
    record = EvalPart(version=version, number=number, parts=2, source="s", first=0, samples=1, correct=(1,), reward=1.0)
    job.corrupt({KEYS.eval_part(str(version), number): record.encode()})


def test_keys_of_past_worlds_and_parts_of_cut_off_evaluations_are_swept_and_no_others(job: RecordedJob) -> None:
    world, version = job.head.world, job.head.version
    claim(job, "world-0")
    claim(job, world)
    part(job, Version(0, 3), 0)
    part(job, version, 1)
    (intent,) = sweep_old_worlds(view_of(job))
    assert intent.action == SweepKeys(SweptKeys(("world-0",), ("0.3/000000",)))
    assert carried_out(job, intent) is TxnOutcome.WON
    assert world_keys(job) == {f"{world}/rank/000000", f"{world}/rank/000001", f"{world}/rendezvous"}
    assert set(job.mirror.eval_parts) == {f"{version}/000001"}
    assert list(sweep_old_worlds(view_of(job))) == []


def test_where_only_a_rendezvous_is_left_of_a_world_it_is_swept_too(job: RecordedJob) -> None:
    job.corrupt({KEYS.rendezvous("world-0"): b"127.0.0.1:5"})
    (intent,) = sweep_old_worlds(view_of(job))
    assert carried_out(job, intent) is TxnOutcome.WON
    assert world_keys(job) == set()


def test_a_sweep_that_comes_after_a_rollback_is_lost(job: RecordedJob) -> None:
    claim(job, "world-0")
    (intent,) = sweep_old_worlds(view_of(job))
    old = view_of(job)
    job.roll_back()
    effects = hands_of(job.store, job.run_dir)
    assert asyncio.run(apply_action(intent.action, old, effects)).outcome is TxnOutcome.STALE
    assert world_keys(job) == {"world-0/rank/000000", "world-0/rank/000001", "world-0/rendezvous"}


def test_heads_own_world_is_never_swept(job: RecordedJob) -> None:
    mirror = job.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    with pytest.raises(ValueError, match="is head's world"):
        sweep(KEYS, mirror.head, mirror.checkpoints, SweptKeys((job.head.world,)))


def test_checkpoints_that_a_rollback_cut_off_are_deleted_with_their_world(job: RecordedJob) -> None:
    named = {one.file for one in job.mirror.checkpoints.record.entries if one.file}
    for name in ("checkpoints/0-3", "checkpoints/1-7", "checkpoints/1-1"):
        (job.run_dir / name).mkdir(parents=True)
    claim(job, "world-0")
    (intent,) = sweep_old_worlds(view_of(job))
    assert carried_out(job, intent) is TxnOutcome.WON
    left = {f"checkpoints/{path.name}" for path in (job.run_dir / "checkpoints").iterdir()}
    assert left == named | {"checkpoints/1-7"}, "what may still be registered stays"


def evaluation(version: Version, accuracy: float = 0.5) -> Evaluation:
    return Evaluation(version=version, accuracy=accuracy, count=4)


def test_old_evaluations_stand_in_the_folder_before_they_leave_the_store(job: RecordedJob) -> None:
    versions = [Version(0, 0), Version(0, 1), Version(0, 2), Version(1, 3), Version(1, 4), Version(1, 5)]
    cut_off = [Version(0, step) for step in range(3, 3 + FORGET_AT + NEWEST_EVALUATIONS)]
    for version in (*cut_off, *versions):
        accuracy = 0.9 if version == Version(0, 1) else 0.5
        job.corrupt({KEYS.evaluation(str(version)): evaluation(version, accuracy).encode()})
    (intent,) = archive_evaluations(view_of(job))
    assert isinstance(intent.action, ForgetEvaluations)
    assert carried_out(job, intent) is TxnOutcome.WON
    left = job.mirror.evaluations
    assert len(left) < len(cut_off) + len(versions)
    assert {"0.0", "1.5"} <= set(left)
    archived = archived_evaluations(job.run_dir)
    assert set(archived) == set(intent.action.versions)
    assert set(archived) | set(left) == {str(version) for version in (*cut_off, *versions)}
    assert list(archive_evaluations(view_of(job))) == []


@dataclass(frozen=True)
class History:
    head: Head
    checkpoints: tuple[Checkpoint, ...]
    evaluations: dict[str, Versioned[Evaluation]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """One lineage: evaluations of some steps, with values that are often equal; checkpoints of some of them."""
    steps = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=40)))
    values = {step: draw(st.sampled_from((0.1, 0.4, 0.5, 0.9))) for step in steps}
    saved = sorted(draw(st.sets(st.sampled_from(steps), max_size=4)))
    job = Head.model_validate(
        {"seq": 60, "parent": 59, "lineage": 0, "step": 60, "cursors": ["0"], "lineages": [{"number": 0, "base_step": 0}],
         "world": "w", "nonce": "n"}
    )  # fmt: skip
    found = {str(Version(0, s)): Versioned(evaluation(Version(0, s), values[s]), s + 1) for s in steps}
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    known = (base, *(Checkpoint(lineage=0, step=step, seq=step, file=f"c{step}") for step in saved if step))
    return History(job, known, found)


@given(histories())
def test_the_best_stays_known_for_head_and_for_whatever_is_gone_back_to(history: History) -> None:
    head, all_ = history.head, history.evaluations
    gone = superfluous_evaluations(head, history.checkpoints, all_, "accuracy")
    left = {name: one for name, one in all_.items() if name not in gone}
    assert len(left) <= NEWEST_EVALUATIONS + len(history.checkpoints) + 2
    for step in {head.step, *(one.step for one in history.checkpoints)}:
        back = head.model_copy(update={"step": step})
        before = best_evaluation(back, (one.record for one in all_.values()), "accuracy")
        assert best_evaluation(back, (one.record for one in left.values()), "accuracy") == before


def test_a_put_of_a_past_world_that_comes_late_is_swept_once_more(job: RecordedJob) -> None:
    claim(job, "world-0")
    (intent,) = sweep_old_worlds(view_of(job))
    carried_out(job, intent)
    job.cluster.transact((), (Put(KEYS.world_rank("world-0", 0), RankClaim(instance="late").encode()),))
    (again,) = sweep_old_worlds(view_of(job))
    assert carried_out(job, again) is TxnOutcome.WON
    assert world_keys(job) == set()


def test_faults_of_one_job_are_bounded_whatever_controllers_it_had_and_cut_to_size(job: RecordedJob) -> None:
    for life in range(8):
        book = PluginErrorLog(job.store, KEYS, f"node-{life}")
        for number in range(20):
            book.note(f"fault {life}-{number}", "x" * 50_000)
            book.note(f"fault {life}-{number}", f"{number}" + "y" * 50_000)
        asyncio.run(book.finish())
    faults = [kv for kv in job.listing.kvs if kv.key.startswith(KEYS.fault_prefix)]
    assert 2 <= len(faults) <= MOST_OF_JOB
    assert max(len(kv.value) for kv in faults) < 2 * MOST_SAID + 500
    for life in range(8, 16):
        book = PluginErrorLog(job.store, KEYS, f"node-{life}")
        for number in range(20):
            book.note(f"another {life}-{number}")
        asyncio.run(book.finish())
    assert sum(kv.key.startswith(KEYS.fault_prefix) for kv in job.listing.kvs) == MOST_OF_JOB
