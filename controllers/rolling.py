"""Going back to a checkpoint: the newest whole one on the chain, with its cursors and tally, in one transaction."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from controllers.actions import Rollback
from controllers.hands import Applied, Hands, new_world, place, slots, writer
from controllers.view import JobView
from gcore.errors import GcoreError, SpecError
from gcore.ledger import chain, transactions
from gcore.ledger.ancestry import resumable
from gcore.ledger.guarded import Stored, TxnOutcome
from gcore.ledger.records import Checkpoint, LogEntry
from gcore.ledger.tally import NOTHING
from gcore.weights.layout import CheckpointDamaged, manifest_digest, verify_checkpoint

log = logging.getLogger(__name__)


async def roll_back(action: Rollback, view: JobView, hands: Hands) -> Applied:
    """Load and verify first, then one transaction: weights and cursors always come from the same record."""
    mirror = view.mirror
    assert mirror.checkpoints is not None
    assert mirror.plan is not None
    head = slots(view).head.record
    world = new_world()
    try:
        plan = place(view, world, generation=mirror.plan.record.generation + 1)
    except SpecError as error:
        # Nodes that are away may come back: a job that fitted once does not fail for want of them.
        return Applied(TxnOutcome.STALE, f"rollback: {error}")
    reason = action.reason
    for target in resumable(head, mirror.checkpoints.record.entries):
        entry = await _entry_of(target, view, hands)
        cursors = entry.cursors if entry is not None else None
        problem = await asyncio.to_thread(damage, hands.run_dir, target)
        if cursors is None:
            problem = f"its log entry {target.seq} is not there"
        if problem or entry is None or cursors is None:
            log.warning("checkpoint %s is skipped: %s", target.file, problem)
            reason += f"; checkpoint {target.file} is skipped: {problem}"
            continue
        advance = chain.rolled_back(head, target, cursors, world, writer(view), reason, tally=entry.tally or NOTHING)
        txn = transactions.rollback(mirror.keys, slots(view), mirror.checkpoints, advance, mirror.plan, plan)
        report = await hands.ledger.run(txn)
        sentence = f"rollback from step {head.step} to {target.step}, lineage {advance.head.lineage}: {reason}"
        return Applied(report.outcome, sentence, report.revision)
    raise GcoreError("no whole checkpoint is left on the chain, not even the first model", where=str(hands.run_dir))


def damage(run_dir: Path, checkpoint: Checkpoint) -> str:
    """What is wrong with a checkpoint's files, or nothing. The base has none: it is the job's model."""
    if not checkpoint.file:
        return ""
    folder = run_dir / checkpoint.file
    try:
        verify_checkpoint(folder)
        if manifest_digest(folder) != checkpoint.digest:
            return "it is not the one that was registered"
    except CheckpointDamaged as error:
        return str(error)
    return ""


async def _entry_of(target: Checkpoint, view: JobView, hands: Hands) -> LogEntry | None:
    """The target's log entry, whose cursors and tally are gone back to."""
    known: Stored[LogEntry] | None = view.mirror.log.get(target.seq)
    if known is not None:
        return known.record
    kv = await hands.store.get(view.mirror.keys.log(target.seq))
    return LogEntry.decode(kv.value, kv.key) if kv is not None else None
