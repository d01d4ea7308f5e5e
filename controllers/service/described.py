"""A job as the API tells of it: from its records in the store, or from their copy in the folder of a run that has ended."""

from __future__ import annotations

import json
from pathlib import Path

from controllers.identity import node_of
from controllers.service.sources import best_checkpoint, source_reports
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config import stored_spec
from gcore.errors import SpecError
from gcore.ledger import store_copy
from gcore.ledger.ancestry import resumable
from gcore.ledger.job import JobPhase
from gcore.ledger.mirror import DAMAGED, JobMirror
from gcore.ledger.rules import planned_steps, rules_of
from gcore.schema import UnreadableRecord

MOST_WARNINGS = 8
"""Troubles that an answer tells, the newest."""
MOST_SAID = 2000
"""Characters of each."""
STATES = {
    JobPhase.PENDING: pb.JOB_STATE_PENDING,
    JobPhase.RUNNING: pb.JOB_STATE_RUNNING,
    JobPhase.SUCCEEDED: pb.JOB_STATE_SUCCEEDED,
    JobPhase.FAILED: pb.JOB_STATE_FAILED,
    JobPhase.CANCELLED: pb.JOB_STATE_CANCELLED,
}


def described_run(run_dir: Path) -> pb.Job | None:
    """Of a run that has ended, with the paths as its folder lies now; None if no copy of its records does.

    Raises UnreadableRecord, OSError.
    """
    copy = store_copy.read(run_dir)
    if copy is None:
        return None
    message = described(store_copy.mirror_of(copy.uid, copy.batch))
    for told in (message, message.best) if message.HasField("best") else (message,):
        told.checkpoint = told.checkpoint.replace(message.run_dir, str(run_dir), 1)
    message.run_dir = str(run_dir)
    return message


def described(mirror: JobMirror) -> pb.Job:
    """The job as its records say, without what it waits for, which only a controller that works on it knows.

    Raises UnreadableRecord: a record is not there, or its spec is none that this version knows.
    """
    if mirror.job is None or mirror.status is None:
        absent = mirror.keys.job if mirror.job is None else mirror.keys.state
        raise UnreadableRecord("it is not there", where=absent, fix=DAMAGED)
    job, status = mirror.job.record, mirror.status.record
    try:
        spec = stored_spec(job.spec)
    except SpecError as error:
        raise UnreadableRecord(error.what, where=error.where, fix=DAMAGED) from error
    message = pb.Job(
        uid=job.uid,
        name=job.name,
        state=STATES[status.phase],
        reason=status.reason,
        spec_json=json.dumps(job.spec),
        run_dir=job.run_dir,
        namespace=job.namespace,
        owner=job.owner,
        created=job.created,
        steps=_planned_steps(mirror),
        ended=status.changed if status.phase.ended else 0.0,
    )
    if mirror.head is not None:
        message.step = mirror.head.record.step
        message.lineage = mirror.head.record.lineage
    if mirror.assign is not None:
        for member in mirror.assign.record.members:
            shards = mirror.assign.record.shards_of(member)
            message.shares.add(node=node_of(member), incarnation=member, shards=shards)
    message.sources.extend(source_reports(mirror))
    best = best_checkpoint(mirror, spec.best_metric)
    if best is not None:
        message.best.CopyFrom(best)
    newest = _newest_checkpoint(mirror)
    if newest is not None:
        message.checkpoint = f"{job.run_dir}/{newest}"
    return message


def with_news(message: pb.Job, mirror: JobMirror) -> pb.Job:
    """The same, with what last went wrong beside the steps, and the newest rollback: for whoever followed no event."""
    newest = sorted(mirror.troubles.values(), key=lambda stored: (stored.record.time, stored.revision), reverse=True)
    for trouble in (stored.record for stored in newest[:MOST_WARNINGS]):
        sentence = trouble.sentence[:MOST_SAID]
        message.warnings.add(topic=trouble.topic, node=trouble.node, sentence=sentence, time=trouble.time)
    last = max((seq for seq, stored in mirror.log.items() if stored.record.kind == "rollback"), default=None)
    if last is not None:
        entry = mirror.log[last].record
        rollback = pb.LastRollback(step=entry.step, lineage=entry.lineage, reason=entry.reason[:MOST_SAID])
        message.rollback.CopyFrom(rollback)
    return message


def _planned_steps(mirror: JobMirror) -> int:
    """How many steps the job will have had; an estimate where it goes by epochs. 0: nothing is known yet."""
    assert mirror.job is not None
    rules = rules_of(mirror.job.record)
    if mirror.head is None:
        return rules.steps or 0
    return planned_steps(rules, mirror.head.record) or 0


def _newest_checkpoint(mirror: JobMirror) -> str | None:
    if mirror.head is None or mirror.checkpoints is None:
        return None
    on_chain = resumable(mirror.head.record, mirror.checkpoints.record.entries)
    return next((c.file for c in on_chain if c.file), None)
