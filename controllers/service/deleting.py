"""Forgetting a job that has ended: its run's folder, if that is wanted, and its records.

The folder first: what is interrupted then is a job that is still there, and can be deleted again. A folder gets another name before it is
deleted, so that nobody finds half of one. Where nodes share no folder only this node's goes: the others' stay, as a folder of a run that
no record knows, which nothing deletes but a person (`controllers.clearing`). What the job has used stays told (`gcore.ledger.usage`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

from controllers.service.records import StoredJobs
from controllers.service.refusals import Conflict, JobNotEnded
from gcore.errors import GcoreError, StoreUnavailable
from gcore.ledger import transactions
from gcore.ledger.guarded import TxnOutcome
from gcore.ledger.job import JobRecord
from gcore.ledger.mirror import JobMirror
from gcore.store import keys
from gcore.store.types import Store

GOING = ".going"
"""What a folder's name ends with while it is deleted."""


def check_ended(mirror: JobMirror, workers: int) -> None:
    """Raises Conflict for a job of which anything is still at work."""
    assert mirror.job is not None
    name = mirror.job.record.name
    if mirror.status is None or not mirror.status.record.phase.ended:
        raise JobNotEnded(f"job {name!r} has not ended", fix="`gcore cancel` ends it")
    if workers:
        raise Conflict(f"{workers} workers of job {name!r} are still ending", fix="Ask again in a moment")


def remove_folder(run_dir: Path, uid: str) -> None:
    """Delete a run's folder and all that lies in it. Raises GcoreError. Blocks."""
    going = run_dir.with_name(run_dir.name + GOING)
    if not run_dir.name.endswith(f"-{uid}"):  # of a record that somebody wrote by hand
        raise GcoreError("that is not the folder of the job's run, and is not touched", where=str(run_dir))
    try:
        with contextlib.suppress(FileNotFoundError):
            run_dir.rename(going)
        with contextlib.suppress(FileNotFoundError):
            if not going.is_symlink():
                shutil.rmtree(going)
    except OSError as error:
        raise GcoreError(
            f"the run's folder cannot be deleted ({error.strerror or error})",
            where=error.filename if isinstance(error.filename, str) else str(going),
            fix="The job is still there; delete it again when the folder can be written",
        ) from error


async def delete(jobs: StoredJobs, mirror: JobMirror, *, files: bool) -> None:
    """Forget it. Raises GcoreError; StoreUnavailable if it is not known whether its records are gone."""
    assert mirror.job is not None
    job, ledger = mirror.job.record, jobs.ledger(mirror.keys.uid)
    if files:
        await asyncio.to_thread(remove_folder, Path(job.run_dir), job.uid)
    while mirror.job is not None:
        head = mirror.head
        if head is not None and not head.record.deleted:
            # From here on whoever still believes that it works on the job loses every compare.
            report = await ledger.run(transactions.delete_job(mirror.keys, head))
        else:
            assert mirror.status is not None
            named = await _named(jobs.store, job)
            report = await ledger.run(transactions.delete_rest(mirror.keys, head, mirror.status, named))
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"whether the job is deleted is not known ({report.why})", fix="Ask again")
        mirror = await jobs.mirror(mirror.keys.uid)


async def _named(store: Store, job: JobRecord) -> dict[str, int]:
    """What leads to the job and to no other: its name and its request id, with their revisions."""
    found = {}
    for key in (keys.name(job.name, job.namespace), keys.request(job.request_id) if job.request_id else ""):
        known = await store.get(key) if key else None
        if known is not None and known.value == job.uid.encode():
            found[key] = known.mod_revision
    return found
