"""A new world, in one transaction: from copies of head's own state if the nodes have them in memory, else from the newest whole
checkpoint on the chain, with its cursors and tally. And the account of outcomes without a step.

Where nodes share no folder, the checkpoint is fetched first. A peer that cannot be reached has damaged nothing, and is asked again. Only a
checkpoint that all present nodes have damaged, or that none has, is skipped.

While head's train world is lost, the store may have been restored from an older backup, and a rollback is about to find that. An account
written before would take a sequence number under which the run's folder has another entry, so it waits for the rollback.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from controllers.job.effects import Effects, new_world_name, new_writer, open_slots, plan_world, warning_transaction
from controllers.rules.actions import ActionResult, RecordOutcomes, Rollback
from controllers.rules.view import JobView, SavedCheckpoint
from controllers.rules.world import state_at_hand, world_loss
from gcore.errors import GcoreError, SpecError
from gcore.ledger import chain, transactions
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.chain import entry_digest
from gcore.ledger.records.chain import Checkpoint, LogEntry
from gcore.ledger.records.job import Plan
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.statistics import NOTHING
from gcore.ledger.transactions import Transaction, TxnOutcome, Versioned, keeping_to
from gcore.models.layout import CheckpointDamaged, highest_lineage, manifest_digest, verify_checkpoint

log = logging.getLogger(__name__)

DAMAGED = "damaged"
"""What the last trouble with a registered checkpoint is called in the store."""

AWAY = "mount"
"""And that with a folder that this node does not see any more."""


async def roll_back(action: Rollback, view: JobView, effects: Effects) -> ActionResult:
    """Load and verify first, then one transaction: weights and cursors always come from the same record."""
    head = open_slots(view).head.record
    world = new_world_name()
    try:
        generation = view.plan.generation + 1
        if action.stands_still:
            plan = Plan(
                generation=generation, world=world, ranks=(), engines=(), reason=action.reason, stands_still=True
            )
        else:
            plan = plan_world(view, world, generation=generation, split=action.split)
    except SpecError as error:
        # Nodes that are away may come back: a job that fitted once does not fail for want of them.
        return ActionResult(TxnOutcome.STALE, f"rollback: {error}")
    reason = action.reason
    seen = await highest_numbers(view, effects.run_dir)
    if seen.entry > head.seq:
        reason += f"; the store stands at entry {head.seq} of the log, and the run's folder has entries up to {seen.entry}: it was put back"
    # Copies in memory go with whoever stands still.
    state = None if action.stands_still else state_at_hand(view, frozenset(rank.node for rank in plan.ranks))
    if state is not None:
        advance = chain.reform_entry(head, state, world, new_writer(view), reason, seen=seen)
        txn = _transaction(action, view, advance, plan)
        report = await effects.ledger.run(txn)
        sentence = (
            f"{len(plan.ranks)} ranks go on from copies of step {head.step}, lineage {advance.head.lineage}: {reason}"
        )
        return ActionResult(report.outcome, sentence, report.revision)
    skipped: list[str] = []
    for target in resumable_checkpoints(head, view.checkpoints):
        if action.between_steps and target.step != head.step:
            # Head's own checkpoint is damaged, or copies went since it was decided: no training is given up for a larger world.
            return ActionResult(
                TxnOutcome.STALE, f"rollback: head's state is not at hand, and no rank is lost: {reason}"
            )
        entry = await _entry_of(target, view, effects)
        cursors = entry.cursors if entry is not None else None
        if effects.replicator is not None and target.file:
            brought = await effects.replicator.ensure_checkpoint(SavedCheckpoint.of(target), view, read_all=True)
            problem = brought.problem
            if problem and not brought.is_final:
                return ActionResult(TxnOutcome.UNKNOWN, f"rollback: checkpoint {target.file}: {problem}")
        else:
            problem = await asyncio.to_thread(find_damage, effects.run_dir, target)
        if problem and effects.replicator is None and (away := await asyncio.to_thread(effects.away)):
            # What this node cannot see is not damaged. Who skipped it would train everything anew, and then forget it.
            effects.tell(AWAY, away)
            return ActionResult(TxnOutcome.UNKNOWN, f"rollback: {away}")
        effects.tell(AWAY, "")
        if cursors is None:
            problem = f"its log entry {target.seq} is not there"
        if problem or entry is None or cursors is None:
            log.warning("checkpoint %s is skipped: %s", target.file, problem)
            skipped.append(f"checkpoint {target.file} is skipped: {problem.rstrip('.')}")
            continue
        reason = "; ".join([reason, *skipped])
        await _tell(skipped, target, view, effects)
        tally, parent = entry.tally or NOTHING, entry_digest(entry)
        advance = chain.rollback_entry(
            head, target, cursors, world, new_writer(view), reason, tally=tally, parent_digest=parent, seen=seen
        )
        txn = _transaction(action, view, advance, plan)
        report = await effects.ledger.run(txn)
        sentence = f"rollback from step {head.step} to {target.step}, lineage {advance.head.lineage}: {reason}"
        return ActionResult(report.outcome, sentence, report.revision)
    raise GcoreError("no whole checkpoint is left on the chain, not even the first model", where=str(effects.run_dir))


async def highest_numbers(view: JobView, run_dir: Path) -> chain.HighWater:
    """The highest numbers of which anything is left anywhere, as far as this node sees."""
    lineage, left = await asyncio.gather(
        asyncio.to_thread(highest_lineage, run_dir), asyncio.to_thread(highest_in_folder, run_dir)
    )
    told = (stored.record.entry for stored in view.mirror.folders.values())
    return chain.HighWater(
        lineage=max(lineage, left.lineage, highest_reported_lineage(view)), entry=max((left.entry, *told))
    )


def highest_reported_lineage(view: JobView) -> int:
    """The highest lineage of which engines, ranks and nodes tell. Higher than head's only where the store was put back."""
    served = [engine.version.lineage for engine in view.engines.values() if engine.version is not None]
    fed = [token.lineage for rank in view.ranks.values() for token in (rank.holding, rank.applied) if token is not None]
    held = [one.lineage for stored in view.mirror.folders.values() for one in stored.record.checkpoints]
    return max((*served, *fed, *held), default=0)


def _transaction(action: Rollback, view: JobView, advance: chain.Advance, plan: Plan) -> Transaction:
    mirror = view.mirror
    assert mirror.checkpoints is not None
    assert mirror.plan is not None
    txn = transactions.rollback(
        mirror.keys,
        open_slots(view),
        mirror.checkpoints,
        advance,
        mirror.plan,
        plan,
        slots_as_seen=action.slots_as_seen,
    )
    return keeping_to(view.share, txn)


def find_damage(run_dir: Path, checkpoint: Checkpoint) -> str:
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


async def _tell(skipped: list[str], target: Checkpoint, view: JobView, effects: Effects) -> None:
    """What is damaged is told by an event of its own: nobody reads why a world began anew if all goes well after it.

    One that is not written is not written again: whoever lost the compare finds it told.
    """
    instead = f"the one before it is used, of step {target.step}" if target.file else "the first model is used"
    sentence = f"{'; '.join(skipped)}; {instead}"
    known = view.mirror.troubles.get(DAMAGED)
    if skipped and (known is None or known.record.sentence != sentence):
        await effects.ledger.run(warning_transaction(view, DAMAGED, sentence, effects.clock.wall()))


async def _entry_of(target: Checkpoint, view: JobView, effects: Effects) -> LogEntry | None:
    """The target's log entry, whose cursors and tally are gone back to."""
    known: Versioned[LogEntry] | None = view.mirror.log.get(target.seq)
    if known is not None:
        return known.record
    kv = await effects.store.get(view.mirror.keys.log(target.seq))
    return LogEntry.decode(kv.value, kv.key) if kv is not None else None


async def account_outcomes(action: RecordOutcomes, view: JobView, effects: Effects) -> ActionResult:
    """One entry for `action.outcomes`, unless the run's folder knows of a later one than head."""
    head = open_slots(view).head.record
    if world_loss(view) is not None and (seen := await highest_numbers(view, effects.run_dir)).entry > head.seq:
        sentence = f"account: the run's folder has entries up to {seen.entry}, head is entry {head.seq}: a rollback comes first"
        return ActionResult(TxnOutcome.STALE, sentence)
    advance = chain.account_entry(head, action.outcomes, view.rules.shape, new_writer(view))
    report = await effects.ledger.run(transactions.account(view.mirror.keys, open_slots(view), advance))
    return ActionResult(report.outcome, f"account for {len(action.outcomes)} prompts", report.revision)
