"""The problems in `gcore describe` and `gcore audit`: the newest warnings, the last rollback, the first violations."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from stored_job import StoredJob

from controllers.api.job_messages import MOST_SAID, MOST_WARNINGS, add_news, describe_job
from controllers.api.jobs import JobsService
from controllers.api.store_reader import StoreReader
from controllers.cli.output import audit_rows, job_rows, job_snapshot, job_tree
from controllers.telemetry.notices import WarningLog
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import parse_spec
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.job import Trouble
from gcore.store.keys import name as names
from gcore.store.keys import request
from gcore.store.types import Delete, Put
from gcore.testing import FakeClock, MemoryCluster, MemoryStore


async def told(job: StoredJob, *troubles: Trouble) -> pb.Job:
    puts = [Put(job.keys.trouble(one.topic), one.encode()) for one in troubles]
    await job.store.transact((), puts)
    mirror = await job.look()
    return add_news(describe_job(mirror), mirror)


async def a_job() -> StoredJob:
    job = StoredJob(MemoryStore(MemoryCluster(FakeClock())), "u", "n0.me")
    await job.create()
    assert job.mirror.job is not None
    spec = parse_spec(
        {
            "name": "u",
            "model": {"path": "m"},
            "data": {"path": "d"},
            "flow": {"steps": 9},
            "rollout": {"max_new_tokens": 4},
        }
    )
    record = job.mirror.job.record.model_copy(update={"spec": spec.model_dump(mode="json")})
    await job.store.transact((), (Put(job.keys.job, record.encode()), Put(names("u"), b"u"), Put(request("u"), b"u")))
    await job.look()
    return job


async def test_the_newest_warnings_are_told_with_who_and_when_and_each_is_bounded() -> None:
    job = await a_job()
    troubles = [Trouble(topic=f"t{n}", node="n0", sentence="s" * 5000, time=float(n)) for n in range(MOST_WARNINGS + 3)]
    warnings = (await told(job, *troubles)).warnings
    assert [one.topic for one in warnings] == [f"t{n}" for n in range(MOST_WARNINGS + 2, 2, -1)]
    assert all(len(one.sentence) == MOST_SAID for one in warnings)
    assert (warnings[0].node, warnings[0].time) == ("n0", MOST_WARNINGS + 2)


async def test_warnings_of_a_version_that_did_not_say_when_stand_in_the_order_in_which_they_came() -> None:
    job = await a_job()
    for topic in ("b", "a", "c"):
        reply = await told(job, Trouble(topic=topic, node="n0", sentence="it fails"))
    assert [(one.topic, one.time) for one in reply.warnings] == [("c", 0.0), ("a", 0.0), ("b", 0.0)]


async def test_warning_record_has_its_time() -> None:
    job, clock = await a_job(), FakeClock()
    book = WarningLog(job.store, job.keys, "n0", clock)
    book.note("folder", "no room is left")
    work = asyncio.create_task(book.run())
    mirror: JobMirror = job.mirror
    while not mirror.troubles:
        await asyncio.sleep(0)
        mirror = await job.look()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    assert mirror.troubles["folder"].record.time == clock.wall()


async def test_the_last_rollback_is_told_and_a_list_of_all_jobs_stays_short() -> None:
    job = await a_job()
    assert not (await told(job)).HasField("rollback")
    for _ in range(2):
        await job.won(job.rolling_back())
    service: Any = JobsService(StoreReader(job.store), None, lambda uid: None, FakeClock())  # type: ignore[arg-type]
    found = await service.GetJob(pb.GetJobRequest(job="u"), None)
    assert found.rollback == pb.LastRollback(step=0, lineage=2, reason="why")
    listed = await service.ListJobs(pb.ListJobsRequest(), None)
    assert not any(one.HasField("rollback") for one in listed.jobs)


def test_a_described_job_tells_what_went_wrong_to_who_followed_no_event() -> None:
    job = pb.Job(uid="u1", name="sums", state=pb.JOB_STATE_RUNNING)
    assert not {"last rollback", "warning (1)"} & job_rows(job_snapshot(job), 100.0).keys()
    job.warnings.add(topic="folder", node="node-0", sentence="no room is left", time=88.0)
    job.warnings.add(topic="samples", node="node-1", sentence="of an older version")
    job.rollback.CopyFrom(pb.LastRollback(step=3, lineage=2, reason="rank 1 is gone"))
    shown = job_rows(job_snapshot(job), 100.0)
    assert shown["last rollback"] == "restarted from checkpoint 3 (attempt 3): rank 1 is gone"
    assert shown["warning (1)"] == "node-0: no room is left (folder, 12s ago)"
    assert shown["warning (2)"] == "node-1: of an older version (samples)"
    tree = json.loads(json.dumps(job_tree(job_snapshot(job))))
    assert tree["rollback"] == {"step": 3, "lineage": 2, "reason": "rank 1 is gone"}
    assert tree["warnings"][0] == {"topic": "folder", "node": "node-0", "sentence": "no room is left", "time": 88.0}


def test_an_audit_of_many_violations_shows_the_first_and_says_how_many_there_are() -> None:
    def shown(count: int, *more: str) -> dict[str, str]:
        said = [f"wrong {number}" for number in range(count)]
        findings = [pb.AuditFinding(kind="receipt", sentence=one) for one in said]
        return audit_rows(pb.AuditReport(clean=False, violations=[*said, *more], findings=findings))

    assert shown(1)["verdict"] == "1 violation"
    assert "not shown" not in shown(20)
    assert shown(65)["verdict"] == "65 violations"
    assert shown(65)["not shown"] == "and 45 more (-o json has all)"
    assert "violation 21" not in shown(65)
    full = shown(500, "and 7 more violations")
    assert full["verdict"] == "500 violations, and 7 more violations"
    assert full["not shown"] == "and 480 more (-o json has these)"


async def test_a_job_whose_spec_or_state_this_version_does_not_know_hides_no_other() -> None:
    job = await a_job()
    assert job.mirror.job is not None
    record = job.mirror.job.record
    service = JobsService(StoreReader(job.store), None, lambda uid: None, FakeClock())  # type: ignore[arg-type]

    async def listed() -> pb.Job:
        (one,) = (await service.ListJobs(pb.ListJobsRequest(), None)).jobs  # type: ignore[arg-type]
        return one

    assert (await listed()).state == pb.JOB_STATE_RUNNING
    newer = record.model_copy(update={"spec": {**record.spec, "new_section": 1}})
    await job.store.transact((), (Put(job.keys.job, newer.encode()),))
    one = await listed()
    assert (one.uid, one.name, one.state) == ("u", "u", pb.JOB_STATE_UNSPECIFIED)
    assert "new_section" in one.reason
    await job.store.transact((), (Put(job.keys.job, record.encode()), Delete(job.keys.state)))
    one = await listed()
    assert (one.uid, one.name, one.state) == ("u", "u", pb.JOB_STATE_UNSPECIFIED)
    assert "/state: the store has lost a record of the job" in one.reason
