"""A succeeded job that is submitted again with a higher goal continues from its last checkpoint, and an unfinished one with another
backend; no other job does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_job import KEYS, SPEC, UID, RecordedJob, a_finished_job

from controllers.api.edge.errors import Conflict
from controllers.api.jobs import delete_job
from controllers.api.run_reader import audit_of_records
from controllers.api.store_reader import StoreReader
from controllers.api.submission.spec_changes import (
    change_settings,
    changed_settings,
    extend_job,
    fixed_changes,
    raised_goal,
)
from gcore.config.load import stored_spec
from gcore.config.spec import JobSpec
from gcore.ledger.chain import BINDING_VERSION, job_digest
from gcore.ledger.records.chain import Checkpoint, LogEntry, RaisedGoal
from gcore.ledger.records.job import JobPhase, JobRecord
from gcore.models.layout import manifest_digest
from gcore.schema import NEWEST_VERSION, set_written_version
from gcore.store import keys as store_keys
from gcore.store.types import Delete, Put, WatchBatch, WatchEvent
from gcore.testing import FakeClock

TO_TWO = RaisedGoal(what="epochs", before=1, after=2)


def of(tree: dict[str, Any], **flow: Any) -> dict[str, Any]:
    return tree | {"flow": {**tree["flow"], **flow}}


BY_STEPS = of(SPEC, epochs=None, steps=40)


@pytest.mark.parametrize(
    ("old", "new", "goal"),
    [
        pytest.param(BY_STEPS, of(BY_STEPS, steps=60), RaisedGoal(what="steps", before=40, after=60), id="more steps"),
        pytest.param(SPEC, of(SPEC, epochs=2), TO_TWO, id="more epochs"),
        pytest.param(BY_STEPS, BY_STEPS, None, id="the same"),
        pytest.param(BY_STEPS, of(BY_STEPS, steps=30), None, id="fewer steps"),
        pytest.param(BY_STEPS, of(BY_STEPS, steps=60, groups_per_step=8), None, id="another change beside it"),
        pytest.param(BY_STEPS, of(BY_STEPS, steps=None, epochs=9), None, id="epochs in place of steps"),
    ],
)
def test_a_goal_is_raised_if_nothing_else_differs(
    old: dict[str, Any], new: dict[str, Any], goal: RaisedGoal | None
) -> None:
    record = JobRecord(uid=UID, name="sums", spec=old, run_dir="/r", created=0.0, prompts=40)
    assert raised_goal(record, stored_spec(new)) == goal


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedJob:
    """Its checkpoints are manifests only; what is looked at of them is the registered digest."""

    def find_damage(run_dir: Path, checkpoint: Checkpoint) -> str:
        return "" if manifest_digest(run_dir / checkpoint.file) == checkpoint.digest else "it is another one"

    set_written_version(NEWEST_VERSION)
    monkeypatch.setattr("controllers.api.submission.spec_changes.find_damage", find_damage)
    return a_finished_job(tmp_path / f"sums-{UID}")


def go_on(job: RecordedJob) -> None:
    asyncio.run(extend_job(StoreReader(job.store), UID, TO_TWO, FakeClock()))


def audited(job: RecordedJob) -> tuple[str, ...]:
    listing = job.listing
    batch = WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)
    return audit_of_records(UID, batch, job.run_dir).violations


def test_it_waits_for_slots_at_its_last_checkpoint_with_nothing_open_and_nobody_in_it(finished: RecordedJob) -> None:
    target = finished.mirror.checkpoints.record.entries[-1]  # type: ignore[union-attr]
    before = finished.head
    go_on(finished)
    mirror = finished.mirror
    assert mirror.status is not None
    assert mirror.plan is not None
    assert mirror.status.record.phase is JobPhase.RUNNING
    assert mirror.plan.record.stands_still
    assert not mirror.plan.record.ranks
    assert mirror.job_record.spec["flow"]["epochs"] == 2
    assert (finished.head.step, finished.head.lineage) == (target.step, before.lineage + 1)
    assert mirror.log[finished.head.seq].record.raised == TO_TWO
    assert not mirror.offers
    assert not mirror.members
    assert not mirror.seals
    assert asyncio.run(finished.store.get(KEYS.active)) is not None
    assert audited(finished) == ()


def test_audit_covers_the_steps_before_and_after_an_extension(finished: RecordedJob) -> None:
    for epochs in (2, 3):
        finished.extend(epochs)
        finished.finish()
    assert audited(finished) == ()


def without_name(job: RecordedJob) -> None:
    job.corrupt({store_keys.name("sums"): b"another"})


def marked(job: RecordedJob) -> None:
    head = job.head.model_copy(update={"deleted": True})
    job.corrupt({KEYS.head: head.encode()})


def without_checkpoint_entry(job: RecordedJob) -> None:
    target = job.mirror.checkpoints.record.entries[-1]  # type: ignore[union-attr]
    job.corrupt({KEYS.log(target.seq): None})


def damaged(job: RecordedJob) -> None:
    target = job.mirror.checkpoints.record.entries[-1]  # type: ignore[union-attr]
    (job.run_dir / target.file / "manifest.json").write_text("{")


def with_older_nodes(job: RecordedJob) -> None:
    set_written_version(BINDING_VERSION - 1)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(without_name, "now belongs to another job", id="another job has its name"),
        pytest.param(marked, "another request changed job 'sums'", id="it is being deleted"),
        pytest.param(
            without_checkpoint_entry, "the store has lost the last checkpoint", id="the checkpoint's entry is lost"
        ),
        pytest.param(damaged, "the last checkpoint of job 'sums' cannot be used", id="the checkpoint is damaged"),
        pytest.param(with_older_nodes, "nodes of an earlier version", id="older nodes are there"),
    ],
)
def test_job_that_cannot_be_extended_gives_a_reason_and_stays_unchanged(
    finished: RecordedJob, harm: Callable[[RecordedJob], None], said: str
) -> None:
    harm(finished)
    before = finished.cluster.listing("").kvs
    try:
        with pytest.raises(Conflict, match=said):
            go_on(finished)
    finally:
        set_written_version(NEWEST_VERSION)
    assert finished.cluster.listing("").kvs == before


def test_of_two_who_ask_at_once_one_has_it_go_on_and_the_other_is_told(finished: RecordedJob) -> None:
    async def both() -> list[Any]:
        reader = StoreReader(finished.store)
        asking = (extend_job(reader, UID, TO_TWO, FakeClock()) for _ in range(2))
        return await asyncio.gather(*asking, return_exceptions=True)

    told = asyncio.run(both())
    assert sorted(type(one).__name__ for one in told) == ["Conflict", "NoneType"]
    assert audited(finished) == ()


def test_a_job_that_goes_on_is_not_deleted_by_who_saw_it_ended(finished: RecordedJob) -> None:
    seen = finished.mirror
    go_on(finished)
    with pytest.raises(Conflict, match="has not ended"):
        asyncio.run(delete_job(StoreReader(finished.store), seen, files=True))
    assert finished.run_dir.is_dir()
    assert not finished.head.deleted


def edited(job: RecordedJob, change: Callable[[LogEntry], LogEntry]) -> None:
    entry = next(stored.record for stored in job.mirror.log.values() if stored.record.raised is not None)
    job.cluster.transact((), [Put(KEYS.log(entry.seq), change(entry).encode())])


def test_a_goal_that_was_raised_by_hand_is_found(finished: RecordedJob) -> None:
    job = finished.mirror.job_record
    finished.corrupt({KEYS.job: job.with_goal("epochs", 2).encode()})
    assert "the job's record was changed after log entry 0 was written" in audited(finished)


def test_the_entry_that_raises_a_goal_agrees_with_the_job_s_record_and_with_the_one_before(
    finished: RecordedJob,
) -> None:
    finished.extend(2)
    seq = next(seq for seq, stored in finished.mirror.log.items() if stored.record.raised is not None)
    raised = RaisedGoal(what="epochs", before=3, after=3)
    edited(finished, lambda entry: entry.model_copy(update={"raised": raised}))
    found = "\n".join(audited(finished))
    assert f"log entry {seq} (rollback) cannot raise the job's goal to 3 epochs in place of 3" in found
    assert f"the job's record has flow.epochs 2, but log entry {seq} raised it to 3 epochs" in found


def test_without_the_entry_the_goal_is_one_that_nobody_raised(finished: RecordedJob) -> None:
    finished.extend(2)
    seq = next(seq for seq, stored in finished.mirror.log.items() if stored.record.raised is not None)
    finished.cluster.transact((), [Delete(KEYS.log(seq))])
    assert f"log entry {seq} is missing" in audited(finished)
    edited_all = finished.mirror.job_record.with_goal("epochs", 1)
    finished.corrupt({KEYS.job: edited_all.encode()})
    assert any("the job's record was changed" in one for one in audited(finished))


def trained_with(tree: dict[str, Any], **train: Any) -> JobSpec:
    return stored_spec(tree | {"train": train})


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedJob:
    """An unfinished job at step 3, whose last checkpoint is that of step 2."""
    set_written_version(NEWEST_VERSION)
    monkeypatch.setattr("controllers.api.submission.spec_changes.find_damage", lambda *_: "")
    job = RecordedJob(tmp_path / f"sums-{UID}")
    for _ in range(3):
        job.step()
    return job


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        pytest.param({"backend": "fsdp2"}, True, id="another backend"),
        pytest.param({"backend": "fsdp2", "offload_state": True}, True, id="another backend, and offload"),
        pytest.param({}, False, id="the same"),
        pytest.param({"backend": "fsdp2", "learning_rate": 0.5}, False, id="another rate beside it"),
    ],
)
def test_only_execution_settings_of_an_unfinished_job_can_change(train: dict[str, Any], changes: bool) -> None:
    record = JobRecord(uid=UID, name="sums", spec=SPEC, run_dir="/r", created=0.0, prompts=40)
    changed = changed_settings(record, trained_with(SPEC, **train))
    assert (changed is not None) is changes
    if changed is not None:
        assert stored_spec(changed.spec).train.backend == "fsdp2"
        assert job_digest(changed) == job_digest(record)


@pytest.mark.parametrize(
    ("sections", "keys", "raised"),
    [
        pytest.param({"train": {"backend": "fsdp2"}}, [], False, id="settings alone"),
        pytest.param({"train": {"backend": "fsdp2"}, "flow": {"epochs": 99}}, ["flow.epochs"], True, id="and the goal"),
        pytest.param(
            {"train": {"backend": "fsdp2", "learning_rate": 0.5}, "flow": {"epochs": 99}},
            ["flow.epochs", "train.learning_rate"],
            False,
            id="and the goal and a rate",
        ),
    ],
)
def test_execution_settings_are_not_named_among_the_obstacles(
    sections: dict[str, Any], keys: list[str], raised: bool
) -> None:
    record = JobRecord(uid=UID, name="sums", spec=SPEC, run_dir="/r", created=0.0, prompts=40)
    tree = SPEC | sections | {"flow": SPEC["flow"] | sections.get("flow", {})}
    changes, only_goal = fixed_changes(record, stored_spec(tree))
    assert (sorted(changes), only_goal) == (keys, raised)


def test_unfinished_job_is_suspended_at_its_last_checkpoint_and_gets_the_settings_at_once(begun: RecordedJob) -> None:
    before, members = begun.head, begun.mirror.members
    target = begun.mirror.checkpoints.record.entries[-1]  # type: ignore[union-attr]
    asyncio.run(change_settings(StoreReader(begun.store), UID, trained_with(SPEC, backend="fsdp2")))
    mirror = begun.mirror
    assert mirror.plan is not None
    assert mirror.plan.record.stands_still
    assert mirror.plan.record.world == mirror.head.record.world  # type: ignore[union-attr]
    assert stored_spec(mirror.job_record.spec).train.backend == "fsdp2"
    assert (begun.head.step, begun.head.lineage) == (target.step, before.lineage + 1)
    assert "train.backend: fsdp2 in place of deepspeed" in mirror.log[begun.head.seq].record.reason
    assert mirror.members == members
    assert not mirror.seals
    assert audited(begun) == ()


def test_the_same_change_asked_for_twice_is_made_once(begun: RecordedJob) -> None:
    for _ in range(2):
        asyncio.run(change_settings(StoreReader(begun.store), UID, trained_with(SPEC, backend="fsdp2")))
    assert begun.head.lineage == 1


def test_job_that_ended_meanwhile_keeps_its_settings(finished: RecordedJob) -> None:
    before = finished.cluster.listing("").kvs
    with pytest.raises(Conflict, match="another request changed job 'sums'"):
        asyncio.run(change_settings(StoreReader(finished.store), UID, trained_with(SPEC, backend="fsdp2")))
    assert finished.cluster.listing("").kvs == before
