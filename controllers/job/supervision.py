"""A daemon's supervision of one job: the daemon works on the job, leaves it on errors, and tries again `JOB_RETRY_S`
later.

A daemon leaves a job if it cannot read its records, spec or data, or if it meets a defect of gcore (an unexpected
exception). The cause may disappear later: a peer of another version has ended, a plug-in was installed, a data file was
restored. No record reports that, so each daemon tries again.

A defect ends the runner of that job, not the daemon, and discards the runner's state. If a daemon meets defects
repeatedly and no other member is left, it ends the job as failed. Leaving uses only the store, because the watch of the
job's records has stopped by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controllers.changes import LOOK_AGAIN_S, ChangeSignal
from controllers.cluster.mirror import read_record
from controllers.identity import Identity
from gcore.errors import GcoreError, LeaseLost, StoreUnavailable, UsageError
from gcore.ledger import transactions
from gcore.ledger.archive import mirror_of
from gcore.ledger.records.cluster import Claim
from gcore.ledger.records.job import JobPhase, JobStatus
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.schema import UnreadableRecord
from gcore.store.keys import JobKeys
from gcore.store.types import Store, WatchBatch, WatchEvent
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time

log = logging.getLogger(__name__)

JOB_RETRY_S = 10.0
"""Seconds between leaving a job and the next attempt."""

MOST_DEFECTS = 3
"""Number of consecutive attempts with a defect after which the job is failed, if it has no other members."""

MOST_NAMED = 4
"""Maximum number of lost keys that an error names."""

LONGEST_SAID = 500
"""Maximum characters of the message of a defect in the reason for which a job failed."""

CALM_S = 600.0
"""An attempt that lasted this many seconds resets the count of defects."""


class NodeNotReady(GcoreError):
    """Raised if this node lacks something that the job needs. It can be fixed, so the job must not end."""


class RecordsLost(GcoreError):
    """Raised if the store has lost records of a job that has not ended."""


class RunnableJob(Protocol):
    """One attempt to work on a job (`controllers.job.runner.JobRunner`)."""

    uid: str

    async def run(self) -> None:
        """Work on the job until it has ended. Raises UnreadableRecord, UsageError, NodeNotReady, RecordsLost."""
        ...

    async def withdraw(self) -> None:
        """Remove this controller's membership in the job."""
        ...

    async def end_left(self, reason: str) -> None:
        """End the job as failed for this reason, if it has no members."""
        ...

    async def end_lost(self) -> None:
        """End the job as failed if the store has lost records of it."""
        ...


async def work_on_job(
    new_runner: Callable[[], RunnableJob], is_active: Callable[[], bool], changes: ChangeSignal
) -> None:
    """Work on a job until it has ended. If this node cannot work on it, leave it to other nodes and try again later.
    `new_runner`: begins an attempt. `is_active`: whether the job has not ended."""
    said: set[str] = set()
    defects, loop = 0, asyncio.get_running_loop()
    while True:
        began, runner = loop.time(), new_runner()
        wrong, defect = await _tried(runner)
        if not wrong and defect is None:
            return
        for sentence in wrong - said:  # log each error once, and again only after a different one
            log.error("%s", sentence)
        said = wrong
        if defect is not None:
            # The loop's handler logs the defect with its traceback; in a simulation it ends the run.
            loop.call_exception_handler({"message": f"job {runner.uid} met a defect of gcore", "exception": defect})
        await runner.withdraw()
        await runner.end_lost()
        defects = 0 if loop.time() - began >= CALM_S else defects
        if (place := _place(defect)) is not None:
            defects += 1
            if defects >= MOST_DEFECTS:
                await runner.end_left(f"a defect of gcore was met {defects} times in a row: {place}")
        del runner, defect  # frees the job's memory until the next attempt
        with contextlib.suppress(TimeoutError):
            async with limit_time(JOB_RETRY_S):
                await changes.until(lambda: not is_active())
                return


async def _tried(runner: RunnableJob) -> tuple[set[str], ExceptionGroup[Exception] | None]:
    """Make one attempt. Return the expected errors as sentences and the defect that ended it; both empty if the job has
    ended. Raises LeaseLost."""
    wrong: set[str] = set()
    defect: ExceptionGroup[Exception] | None = None
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    try:
        await runner.run()
    except* LeaseLost:
        raise  # it concerns the incarnation, not the job
    except* (UnreadableRecord, UsageError, NodeNotReady, RecordsLost) as errors:
        wrong = {f"job {runner.uid} is not worked on here: {error}" for error in _leaves(errors)}
    except* Exception as errors:  # noqa: BLE001  the edge of the job: other jobs of this daemon continue
        defect = errors
    # Before Python 3.13, a task group with a failed task leaves a cancellation request counted. Before 3.11.3, a time limit in this task would
    # then end with CancelledError, and the job would not be retried.
    while task is not None and task.cancelling() > cancelled:
        task.uncancel()
    return wrong, defect


def _place(defects: ExceptionGroup[Exception] | None) -> str | None:
    """Describe the first exception in the group that is a defect of gcore, with its location in the code; None if all
    are expected errors of the node or the store."""
    own = (one for one in _leaves(defects) if not isinstance(one, GcoreError | OSError)) if defects else ()
    defect = next(iter(own), None)
    if defect is None:
        return None
    at = traceback.extract_tb(defect.__traceback__)
    where = f" at {Path(at[-1].filename).name}:{at[-1].lineno}" if at else ""
    said = f": {said[:LONGEST_SAID]}" if (said := str(defect)) else ""
    return f"{type(defect).__name__}{said}{where}; the daemon's log has the traceback"


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def withdraw_member(store: Store, keys: JobKeys, identity: Identity, clock: Clock) -> None:
    """Remove a controller's membership in a job, so that other members do not rely on it. Retries until the store has
    answered."""
    ledger, leaves = TransactionExecutor(store, keys), transactions.withdraw(keys, identity.incarnation, identity.node)
    while (await ledger.run(leaves)).outcome is TxnOutcome.UNKNOWN:
        await clock.sleep(LOOK_AGAIN_S)


async def fail_abandoned_job(store: Store, keys: JobKeys, clock: Clock, reason: str) -> None:
    """End a job as failed for this reason, if it has no members. Does nothing if the store is unavailable."""
    with contextlib.suppress(StoreUnavailable, UnreadableRecord):
        kv = await store.get(keys.state)
        if kv is None or (await store.list(keys.member_prefix)).kvs:
            return
        old = Versioned(JobStatus.decode(kv.value, kv.key), kv.mod_revision)
        if not old.record.phase.ended:
            new = JobStatus(phase=JobPhase.FAILED, reason=reason, changed=clock.wall())
            await TransactionExecutor(store, keys).run(transactions.set_status(keys, old, new, None))


async def find_lost_records(store: Store, keys: JobKeys) -> LostRecords | None:
    """Check whether the store has lost records of a job that has not ended; None if it has not. Raises
    StoreUnavailable, UnreadableRecord."""
    # The claim is read first: a job that ends deletes its claim in the transaction that writes its state.
    kv = await store.get(keys.active)
    listing = await store.list(keys.prefix)
    events = tuple(WatchEvent("put", one) for one in listing.kvs)
    mirror = mirror_of(keys.uid, WatchBatch(events, listing.revision, reset=True))
    lost = mirror.lost_keys(claimed=kv is not None)
    claim = None if kv is None else Versioned(read_record(Claim, kv, Claim()), kv.mod_revision)
    return LostRecords(lost, mirror.status, claim) if lost else None


@dataclass(frozen=True, slots=True)
class LostRecords:
    """The keys that a job has lost, and what was found of its status and of its claim on slots; None: these are
    absent."""

    keys: tuple[str, ...]
    status: Versioned[JobStatus] | None
    claim: Versioned[Claim] | None


def lost_sentence(keys: Sequence[str]) -> str:
    """The reason for which a job with lost keys is failed: what happened and what to do."""
    named = ", ".join(keys[:MOST_NAMED]) + (f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else "")
    return (
        f"the store has lost {named}: gcore never deletes these records alone, so the run cannot be verified and has ended. "
        "Restore etcd from a backup, or start a new job, which may use a checkpoint in the run's folder (model.path)"
    )


async def fail_lost_job(store: Store, keys: JobKeys, clock: Clock) -> None:
    """End a job as failed if the store has lost records of it. Does nothing if the store is unavailable, or another
    node has done so already."""
    with contextlib.suppress(StoreUnavailable, UnreadableRecord):
        if (lost := await find_lost_records(store, keys)) is None:
            return
        failed = JobStatus(phase=JobPhase.FAILED, reason=lost_sentence(lost.keys), changed=clock.wall())
        txn = transactions.fail_lost(keys, lost.status, lost.claim, lost.keys, failed)
        await TransactionExecutor(store, keys).run(txn)
