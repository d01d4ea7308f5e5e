"""The records of a job whose loss from the store the audit must report."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_job import KEYS, RecordedJob, a_finished_job, a_job_under_way

from gcore.ledger.records.job import JobPhase

NEEDED = {
    "job": KEYS.job,
    "state": KEYS.state,
    "head": KEYS.head,
    "checkpoints": KEYS.checkpoints,
    "plan": KEYS.plan,
    "the base entry": KEYS.log(0),
}


def test_nothing_is_lost_of_a_job_that_is_whole(tmp_path: Path) -> None:
    job = a_job_under_way(tmp_path)
    assert job.mirror.lost_keys() == ()
    head = job.head
    assert job.mirror.lost_keys(claimed=False) == (KEYS.active,)
    job.corrupt({KEYS.log(head.seq): None})
    assert job.mirror.lost_keys() == (KEYS.log(head.seq),)


@pytest.mark.parametrize("key", NEEDED.values(), ids=NEEDED.keys())
def test_each_central_record_that_is_gone_is_named(key: str, tmp_path: Path) -> None:
    job = a_job_under_way(tmp_path)
    job.corrupt({key: None})
    assert job.mirror.lost_keys() == (key,)


def test_a_claim_without_any_record_is_a_job_that_is_lost_and_neither_is_one_that_was_deleted(tmp_path: Path) -> None:
    job = RecordedJob(tmp_path)
    job.corrupt({kv.key: None for kv in job.listing.kvs})
    assert job.mirror.lost_keys() == (KEYS.job, KEYS.state)
    assert job.mirror.lost_keys(claimed=False) == ()


def test_lost_records_of_an_ended_job_are_left_to_the_audit(tmp_path: Path) -> None:
    job = a_finished_job(tmp_path)
    job.corrupt({KEYS.head: None})
    assert job.mirror.status is not None
    assert job.mirror.status.record.phase is JobPhase.SUCCEEDED
    assert job.mirror.lost_keys(claimed=False) == ()
