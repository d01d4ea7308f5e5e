"""Carries out what keeps the store and the run's folder small: see `controllers.housekeeping` and `controllers.sweeping`.

What leaves the store stands in the run's folder before; what leaves the folder is named by no record any more. Each is one
guarded transaction, and it may be cut off anywhere: what it left is seen and done by whoever looks next. Decides nothing.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from controllers.actions import ForgetEvaluations, Prune, Retain, Sweep
from controllers.hands import Applied, Hands
from controllers.view import JobView
from gcore.fault_points import At, point
from gcore.ledger import archive, sweeping, transactions
from gcore.ledger.guarded import Transaction, TxnOutcome
from gcore.ledger.records import Checkpoint
from gcore.ledger.retention import orphaned
from gcore.types import Version
from gcore.weights.layout import checkpoint_folder

FIRST = Version(0, 0)
TOPIC = "archive"
FORGET_TOPIC = "checkpoints"
"""What trouble with old files is called in the store."""


async def retain(action: Retain, view: JobView, hands: Hands) -> Applied:
    """Out of the record first, then their files."""
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    txn = transactions.retain(mirror.keys, mirror.head, mirror.checkpoints, action.kept)
    return await _left(txn, action.kept, f"retain {len(action.kept)} checkpoints", view, hands)


async def prune(action: Prune, view: JobView, hands: Hands) -> Applied:
    """First to the run's folder, then out of the store; an entry that stands in both is the same entry. Where nodes share no
    folder, enough of them have written it down by now (`controllers.spreading`)."""
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    entries = [mirror.log[seq].record for seq in action.seqs]
    txn = transactions.prune(mirror.keys, mirror.head, mirror.checkpoints, action.seqs)
    keep = functools.partial(archive.append, hands.run_dir, view.me, entries)
    return await _moved(keep, txn, f"prune {len(entries)} log entries", hands)


async def sweep(action: Sweep, view: JobView, hands: Hands) -> Applied:
    """Out of the store, then the checkpoints that a change of the world has cut off."""
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    txn = sweeping.sweep(mirror.keys, mirror.head, mirror.checkpoints, action.swept)
    sentence = f"sweep {len(action.swept.worlds)} worlds, {len(action.swept.parts)} parts of evaluations"
    return await _left(txn, mirror.checkpoints.record.entries, sentence, view, hands)


async def forget_evaluations(action: ForgetEvaluations, view: JobView, hands: Hands) -> Applied:
    """First to the run's folder, then out of the store."""
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    old = [mirror.evaluations[version].record for version in action.versions]
    txn = sweeping.forget_evaluations(mirror.keys, mirror.head, mirror.checkpoints, action.versions)
    keep = functools.partial(archive.append_evaluations, hands.run_dir, view.me, old)
    return await _moved(keep, txn, f"forget {len(old)} evaluations", hands)


async def _moved(keep: Callable[[], None], txn: Transaction, sentence: str, hands: Hands) -> Applied:
    """What `keep` writes down in the run's folder leaves the store by `txn`, and only if the folder took it.

    A folder that is not the one, beneath a mount that is gone or in place of one that was moved, takes it too, and nobody
    would find it there.
    """
    if away := await asyncio.to_thread(hands.away):
        why = f"{away}; old records stay in the store, which grows"
        hands.tell(TOPIC, why)
        return Applied(TxnOutcome.UNKNOWN, why)
    try:
        if hands.own is None:
            await asyncio.to_thread(keep)
    except OSError as error:
        why = f"the run's folder takes no old records ({error.strerror or error}); they stay in the store, which grows"
        hands.tell(TOPIC, why)
        return Applied(TxnOutcome.UNKNOWN, why)
    hands.tell(TOPIC, "")
    report = await hands.ledger.run(txn)
    return Applied(report.outcome, sentence, report.revision)


async def _left(txn: Transaction, kept: Sequence[Checkpoint], sentence: str, view: JobView, hands: Hands) -> Applied:
    """Out of the store by `txn`; then the checkpoints' files that are not `kept` and no world will go back to.

    Not only those that were just forgotten: a deed that was cut off may have left others behind.
    """
    # Listed before head is compared: what a later lineage writes while this controller sleeps is not among them.
    lying = await _lying(hands)
    if isinstance(lying, OSError):
        return _unread(hands, lying)
    report = await hands.ledger.run(txn)
    if report.outcome is TxnOutcome.WON:
        await _delete(orphaned(view.head, kept, lying), hands)
    return Applied(report.outcome, sentence, report.revision)


async def _lying(hands: Hands) -> frozenset[Version] | OSError:
    """The checkpoints that lie in the run's folder, or why that cannot be told. In a thread: the folder's mount may hang."""
    try:
        found = await asyncio.to_thread(versions_in, checkpoint_folder(hands.run_dir, FIRST).parent)
    except OSError as error:
        return error
    hands.tell(FORGET_TOPIC, "")
    return found


def _unread(hands: Hands, error: OSError) -> Applied:
    why = f"the run's folder cannot be read ({error.strerror or error}): {hands.run_dir}; old checkpoints stay until it can"
    hands.tell(FORGET_TOPIC, why)
    return Applied(TxnOutcome.UNKNOWN, why)


async def _delete(versions: Iterable[Version], hands: Hands) -> None:
    for version in versions:
        point(At.FORGET, "before")
        await asyncio.to_thread(shutil.rmtree, checkpoint_folder(hands.run_dir, version), ignore_errors=True)
        point(At.FORGET, "after")


def versions_in(folder: Path) -> frozenset[Version]:
    """The versions after which folders in `folder` are called. Raises OSError."""
    found = set()
    for path in folder.glob("*-*") if folder.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found.add(Version(int(lineage), int(step)))
    return frozenset(found)
