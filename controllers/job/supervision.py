"""A daemon's part in one job: it works on the job, leaves it when it cannot, and tries again every `JOB_RETRY_S`.

It leaves a job whose records, spec or data it cannot read, and one in which it meets a defect of gcore. The cause may be gone later: a
peer of another version has ended, a plug-in was installed, a data file was restored. No record would say so, so each daemon looks again.

A defect ends that job's runner and not the daemon; all that was believed of the job is thrown away. A daemon that meets a defect again and
again, and is the last member to leave, ends the job as failed. Leaving goes by the store alone, for nothing is heard of the job by then.
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
"""From leaving a job to the next look at it."""

MOST_DEFECTS = 3
"""In a row; then the job is ended, if nobody else works on it."""

MOST_NAMED = 4
"""Lost keys that are named."""

LONGEST_SAID = 500
"""Characters of what a defect says, in the reason of the job's end."""

CALM_S = 600.0
"""After so long at work on a job, defects are counted from zero."""


class NodeNotReady(GcoreError):
    """This node lacks what the job needs, which can be put right, and the job must not end for it."""


class RecordsLost(GcoreError):
    """The store has lost records of a job that has not ended."""


class RunnableJob(Protocol):
    """One try at a job: `controllers.job`'s."""

    uid: str

    async def run(self) -> None:
        """Until the job has ended. Raises UnreadableRecord, UsageError, NodeNotReady, RecordsLost."""
        ...

    async def withdraw(self) -> None:
        """Be no member of it."""
        ...

    async def end_left(self, reason: str) -> None:
        """End it as failed, if it has no members."""
        ...

    async def end_lost(self) -> None:
        """End it as failed, if the store has lost records of it."""
        ...


async def work_on_job(
    new_runner: Callable[[], RunnableJob], is_active: Callable[[], bool], changes: ChangeSignal
) -> None:
    """Until the job has ended. While it cannot be worked on here it is left to others; the daemon goes on with the rest."""
    said: set[str] = set()
    defects, loop = 0, asyncio.get_running_loop()
    while True:
        began, runner = loop.time(), new_runner()
        wrong, defect = await _tried(runner)
        if not wrong and defect is None:
            return
        for sentence in wrong - said:  # each once, and again only if something else was wrong meanwhile
            log.error("%s", sentence)
        said = wrong
        if defect is not None:
            # The loop's handler logs it with its traceback; where a defect has to end everything, in a simulation, it does.
            loop.call_exception_handler({"message": f"job {runner.uid} met a defect of gcore", "exception": defect})
        await runner.withdraw()
        await runner.end_lost()
        defects = 0 if loop.time() - began >= CALM_S else defects
        if (place := _place(defect)) is not None:
            defects += 1
            if defects >= MOST_DEFECTS:
                await runner.end_left(f"a defect of gcore was met {defects} times in a row: {place}")
        del runner, defect  # a job's memory is not kept while it is left
        with contextlib.suppress(TimeoutError):
            async with limit_time(JOB_RETRY_S):
                await changes.until(lambda: not is_active())
                return


async def _tried(runner: RunnableJob) -> tuple[set[str], ExceptionGroup[Exception] | None]:
    """What was wrong, and the defect that was met; nothing if the job has ended. Raises LeaseLost."""
    wrong: set[str] = set()
    defect: ExceptionGroup[Exception] | None = None
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    try:
        await runner.run()
    except* LeaseLost:
        raise  # it is the life's, not the job's
    except* (UnreadableRecord, UsageError, NodeNotReady, RecordsLost) as errors:
        wrong = {f"job {runner.uid} is not worked on here: {error}" for error in _leaves(errors)}
    except* Exception as errors:  # noqa: BLE001  the edge of the job: the others of this daemon go on
        defect = errors
    # A task group whose task failed leaves a cancel request counted (until Python 3.13). With one, a time limit of this task ends
    # with CancelledError before Python 3.11.3, and the job would not be tried again.
    while task is not None and task.cancelling() > cancelled:
        task.uncancel()
    return wrong, defect


def _place(defects: ExceptionGroup[Exception] | None) -> str | None:
    """What was raised, and where; None if it is only what the node lacks, or the store."""
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
    """Be no member of a job, so that the others do not count on this controller; however long the store is away."""
    ledger, leaves = TransactionExecutor(store, keys), transactions.withdraw(keys, identity.incarnation, identity.node)
    while (await ledger.run(leaves)).outcome is TxnOutcome.UNKNOWN:
        await clock.sleep(LOOK_AGAIN_S)


async def fail_abandoned_job(store: Store, keys: JobKeys, clock: Clock, reason: str) -> None:
    """End a job as failed, if nobody works on it any more and the store is there."""
    with contextlib.suppress(StoreUnavailable, UnreadableRecord):
        kv = await store.get(keys.state)
        if kv is None or (await store.list(keys.member_prefix)).kvs:
            return
        old = Versioned(JobStatus.decode(kv.value, kv.key), kv.mod_revision)
        if not old.record.phase.ended:
            new = JobStatus(phase=JobPhase.FAILED, reason=reason, changed=clock.wall())
            await TransactionExecutor(store, keys).run(transactions.set_status(keys, old, new, None))


async def find_lost_records(store: Store, keys: JobKeys) -> LostRecords | None:
    """What the store has lost of a job that has not ended; None if nothing is. Raises StoreUnavailable, UnreadableRecord."""
    # The claim first: a job that ends loses it in the transaction that writes its state.
    kv = await store.get(keys.active)
    listing = await store.list(keys.prefix)
    events = tuple(WatchEvent("put", one) for one in listing.kvs)
    mirror = mirror_of(keys.uid, WatchBatch(events, listing.revision, reset=True))
    lost = mirror.lost_keys(claimed=kv is not None)
    claim = None if kv is None else Versioned(read_record(Claim, kv, Claim()), kv.mod_revision)
    return LostRecords(lost, mirror.status, claim) if lost else None


@dataclass(frozen=True, slots=True)
class LostRecords:
    """The keys that a job has lost, with its state and its claim on slots as they were read then; None: absent."""

    keys: tuple[str, ...]
    status: Versioned[JobStatus] | None
    claim: Versioned[Claim] | None


def lost_sentence(keys: Sequence[str]) -> str:
    """What happened and what to do, for the reason of the job's end."""
    named = ", ".join(keys[:MOST_NAMED]) + (f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else "")
    return (
        f"the store has lost {named}: somebody deleted what gcore never deletes alone, so the run cannot be proven and ends; "
        "restore etcd from a backup, or begin a new job, which may start from a checkpoint in the run's folder (model.path)"
    )


async def fail_lost_job(store: Store, keys: JobKeys, clock: Clock) -> None:
    """End a job as failed if the store has lost records of it. While the store is away, or another node was first, nothing is done."""
    with contextlib.suppress(StoreUnavailable, UnreadableRecord):
        if (lost := await find_lost_records(store, keys)) is None:
            return
        failed = JobStatus(phase=JobPhase.FAILED, reason=lost_sentence(lost.keys), changed=clock.wall())
        txn = transactions.fail_lost(keys, lost.status, lost.claim, lost.keys, failed)
        await TransactionExecutor(store, keys).run(txn)
