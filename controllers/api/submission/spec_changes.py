"""Changes of a job's spec after its creation.

- Extension: a job that has succeeded continues with a higher `flow.steps` or `flow.epochs`. The log entry binds the new job record, so
  the audit checks earlier steps against the earlier goal.
- Other execution settings (`EXECUTION_SETTINGS`): an unfinished job continues with them. The digest of the job does not contain them.

Either is one transaction. It records a rollback to the last checkpoint, with its optimizer state and positions in the data, and the job
then waits for slots like a suspended job. If two requests race, one wins.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Literal

from controllers.api.edge.errors import Conflict
from controllers.api.store_reader import StoreReader
from controllers.job.preparation import spec_differences
from controllers.job.rollback import find_damage
from controllers.storage.run_folder import collect_records, has_own_folder
from gcore.config.load import stored_spec
from gcore.config.spec import JobSpec
from gcore.config.train import EXECUTION_SETTINGS
from gcore.errors import StoreUnavailable
from gcore.ledger import chain, transactions
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Checkpoint, LogEntry, RaisedGoal
from gcore.ledger.records.job import JobPhase, JobRecord
from gcore.ledger.records.restart_reasons import CHANGED, CONTINUED
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.transactions import StoredJob, Transaction, TxnOutcome, Versioned
from gcore.models.layout import highest_lineage
from gcore.plugins import portable_reference, replace_plugin_files
from gcore.schema import written_version
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.system.clock import Clock
from placement.shares import new_claim

ANEW = "start a new job with --new"

GOALS: tuple[Literal["steps", "epochs"], ...] = ("steps", "epochs")


_EXECUTION_KEYS = frozenset(f"train.{name}" for name in EXECUTION_SETTINGS)


def changed_keys(job: JobRecord, spec: JobSpec) -> list[str]:
    """The dotted keys in which a spec differs from a job's. Copies of one plug-in file are equal, wherever they are."""
    old, new = (
        replace_plugin_files(one.model_dump(mode="json"), lambda file, _: portable_reference(file))
        for one in (stored_spec(job.spec), spec)
    )
    return spec_differences(old, new)


def raised_goal(job: JobRecord, spec: JobSpec) -> RaisedGoal | None:
    """The old and the new goal (steps or epochs), if `spec` differs from the job's spec only in a higher goal; None
    otherwise."""
    return _raised(job, spec, changed_keys(job, spec))


def fixed_changes(job: JobRecord, spec: JobSpec) -> tuple[list[str], bool]:
    """The changed keys that an unfinished job cannot take over, without execution settings, and whether they are only a
    raised goal."""
    changed = [key for key in changed_keys(job, spec) if key not in _EXECUTION_KEYS]
    return changed, _raised(job, spec, changed) is not None


def _raised(job: JobRecord, spec: JobSpec, changed: list[str]) -> RaisedGoal | None:
    old = stored_spec(job.spec)
    what = next((goal for goal in GOALS if changed == [f"flow.{goal}"]), None)
    if what is None:
        return None
    before, after = getattr(old.flow, what), getattr(spec.flow, what)
    return RaisedGoal(what=what, before=before, after=after) if before and after and after > before else None


def find_last_state(mirror: JobMirror, named: int, *, ended: bool = True) -> tuple[StoredJob, Checkpoint, LogEntry]:
    """Find where a job can continue: return its records, its last checkpoint and that checkpoint's log entry.
    `named`: the revision of the key that maps the job's name to it. `ended`: it must have succeeded; otherwise, it must
    be unfinished. Raises Conflict if the job cannot continue."""
    job, status, head = mirror.job, mirror.status, mirror.head
    if job is None or status is None or head is None or mirror.checkpoints is None or mirror.plan is None:
        raise Conflict(f"the store has lost records of job {mirror.keys.uid}", fix=f"`gcore audit` names them; {ANEW}")
    phase = status.record.phase
    if (phase is not JobPhase.SUCCEEDED if ended else phase.ended) or head.record.deleted:
        raise Conflict(f"another request changed job {job.record.name!r} at the same time", fix="Retry the request")
    known = mirror.checkpoints.record.entries
    target = next(iter(resumable_checkpoints(head.record, known)), None)
    entry: Versioned[LogEntry] | None = None if target is None else mirror.log.get(target.seq)
    if target is None or entry is None:
        what = f"the store has lost the last checkpoint of job {job.record.name!r}"
        raise Conflict(what, fix=f"`gcore audit` names what is missing; {ANEW}")
    return StoredJob(job, status, head, mirror.checkpoints, mirror.plan, named), target, entry.record


def extend_transaction(
    job_keys: JobKeys,
    ended: StoredJob,
    entry: LogEntry,
    raised: RaisedGoal,
    *,
    by: str,
    time: float,
    seen: chain.HighWater = chain.NOTHING_SEEN,
) -> Transaction:
    """Build the transaction that continues the job from the checkpoint whose log entry is `entry`.

    `by`: the writer; `time`: now, in seconds since the epoch; `seen`: numbers that are already used (`chain.rollback_entry`).
    """
    job = ended.job.record.with_goal(raised.what, raised.after)
    writer = chain.ChainWriter(by, uuid.uuid4().hex[:16], chain.job_digest(job))
    reason, world = f"{CONTINUED}: {raised}", uuid.uuid4().hex[:12]
    advance = chain.rollback_entry(ended.head.record, entry, world, writer, reason, seen=seen, raised=raised)
    claim = new_claim(stored_spec(job.spec), created=time, owner=job.owner)
    return transactions.extend(job_keys, ended, advance, claim)


def changed_settings(job: JobRecord, spec: JobSpec) -> JobRecord | None:
    """The job's record with the execution settings of `spec`, if `spec` differs from the job's spec only in these; None
    otherwise."""
    changed = changed_keys(job, spec)
    if not changed or not {*changed} <= _EXECUTION_KEYS:
        return None
    theirs = spec.model_dump(mode="json")["train"]
    train = {name: value for name, value in job.spec.get("train", {}).items() if name not in EXECUTION_SETTINGS}
    train |= {name: theirs[name] for name in EXECUTION_SETTINGS if name in theirs}
    return job.model_copy(update={"spec": {**job.spec, "train": train}})


def settings_transaction(
    job_keys: JobKeys,
    job: StoredJob,
    entry: LogEntry,
    changed: JobRecord,
    *,
    by: str,
    seen: chain.HighWater = chain.NOTHING_SEEN,
) -> Transaction:
    """Build the transaction that gives an unfinished job the record `changed` from `changed_settings`. The other
    arguments are those of `extend_transaction`."""
    before, after = stored_spec(job.job.record.spec).train, stored_spec(changed.spec).train
    settings = ((name, getattr(before, name), getattr(after, name)) for name in EXECUTION_SETTINGS)
    what = ", ".join(f"train.{name}: {new} in place of {old}" for name, old, new in settings if new != old)
    writer = chain.ChainWriter(by, uuid.uuid4().hex[:16], chain.job_digest(changed) if _binds() else "")
    world, reason = uuid.uuid4().hex[:12], f"{CHANGED}; {what}"
    advance = chain.rollback_entry(job.head.record, entry, world, writer, reason, seen=seen)
    return transactions.change_settings(job_keys, job, advance, changed)


async def extend_job(jobs: StoreReader, uid: str, raised: RaisedGoal, clock: Clock) -> None:
    """Continue a job that has succeeded. Raises Conflict, StoreUnavailable."""
    if not _binds():
        what = "the cluster has nodes of an earlier version that cannot continue a job after its end"
        raise Conflict(what, fix=f"Upgrade them first, or {ANEW}")

    def transaction(mirror: JobMirror, ended: StoredJob, entry: LogEntry, seen: chain.HighWater) -> Transaction:
        return extend_transaction(
            mirror.keys, ended, entry, raised, by=jobs.node or "api", time=clock.wall(), seen=seen
        )

    await _change(jobs, uid, transaction, ended=True)


async def change_settings(jobs: StoreReader, uid: str, spec: JobSpec) -> None:
    """Give an unfinished job the execution settings of `spec`. Raises Conflict, StoreUnavailable."""

    def transaction(mirror: JobMirror, job: StoredJob, entry: LogEntry, seen: chain.HighWater) -> Transaction | None:
        changed = changed_settings(job.job.record, spec)
        if changed is None:  # another request has made this change
            return None
        return settings_transaction(mirror.keys, job, entry, changed, by=jobs.node or "api", seen=seen)

    await _change(jobs, uid, transaction, ended=False)


def _binds() -> bool:
    return written_version() >= chain.BINDING_VERSION


async def _change(
    jobs: StoreReader,
    uid: str,
    transaction: Callable[[JobMirror, StoredJob, LogEntry, chain.HighWater], Transaction | None],
    *,
    ended: bool,
) -> None:
    """Run the transaction that `transaction` builds, again with newer records if it is stale. None: nothing to do."""
    while True:
        mirror = JobMirror(JobKeys(uid)).fold(await jobs.batch(uid))
        stored, target, entry = find_last_state(mirror, await _named(jobs, mirror), ended=ended)
        seen = await _numbers_in_folder(jobs, uid, target)
        txn = transaction(mirror, stored, entry, seen)
        if txn is None:
            return
        report = await jobs.ledger(uid).run(txn)
        if report.outcome is TxnOutcome.WON:
            return
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"it is unknown whether the job was changed ({report.why})", fix="Retry the request")


async def _named(jobs: StoreReader, mirror: JobMirror) -> int:
    """The revision of the key that maps the job's name to it. Raises Conflict if the name now belongs to another job."""
    job = mirror.job
    named = None if job is None else await jobs.store.get(keys.name(job.record.name, job.record.namespace))
    if named is None or named.value != mirror.keys.uid.encode():
        raise Conflict(f"the name of job {mirror.keys.uid} now belongs to another job", fix="Retry the request")
    return named.mod_revision


async def _numbers_in_folder(jobs: StoreReader, uid: str, target: Checkpoint) -> chain.HighWater:
    """The highest lineage and log number in the run's folder; the continued job must use greater ones. Raises Conflict
    if the files of the checkpoint `target` are damaged. If nodes share no folder, they are checked only when the job
    has slots."""
    mirror = await jobs.mirror(uid)
    job, run_dir = mirror.job_record, mirror.run_dir
    if not has_own_folder(job) and (problem := await asyncio.to_thread(find_damage, run_dir, target)):
        what = f"the last checkpoint of job {job.name!r} cannot be used: {problem}"
        raise Conflict(what, where=str(run_dir / target.file), fix=f"Restore the files, or {ANEW}")
    await jobs.collect(mirror, collect_records)
    lineage, left = await asyncio.gather(
        asyncio.to_thread(highest_lineage, run_dir), asyncio.to_thread(highest_in_folder, run_dir)
    )
    return chain.HighWater(lineage=max(lineage, left.lineage), entry=left.entry)
