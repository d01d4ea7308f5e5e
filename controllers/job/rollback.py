"""A new world, in one transaction: from copies of head's own state if the nodes have them in memory, else from the newest whole
checkpoint on the chain, with its cursors and tally.

Where nodes share no folder, the checkpoint is fetched first. A peer that cannot be reached has damaged nothing, and is asked again. Only a
checkpoint that all present nodes have damaged, or that none has, is skipped.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from controllers.job.effects import Effects, new_world_name, new_writer, open_slots, plan_world, warning_transaction
from controllers.rules.actions import ActionResult, Rollback
from controllers.rules.view import JobView, SavedCheckpoint
from controllers.rules.world import state_at_hand
from gcore.errors import GcoreError, SpecError
from gcore.ledger import chain, transactions
from gcore.ledger.archive import highest_in_folder
from gcore.ledger.records.chain import Checkpoint, LogEntry
from gcore.ledger.records.job import Plan
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.transactions import Transaction, TxnOutcome, Versioned, keeping_to
from gcore.models.layout import CheckpointDamaged, highest_lineage, manifest_digest, verify_checkpoint

log = logging.getLogger(__name__)

DAMAGED = "damaged"
"""Topic of the warning about damaged checkpoints."""

AWAY = "mount"
"""Topic of the warning about a folder that this node no longer sees."""


async def roll_back(action: Rollback, view: JobView, effects: Effects) -> ActionResult:
    """Load and verify first, then one transaction: weights and cursors always come from the same record."""
    head = open_slots(view).head.record
    world = new_world_name()
    try:
        plan = _plan_of(action, view, world)
    except SpecError as error:
        # Nodes that are away may come back: a job that fitted once does not fail for want of them.
        return ActionResult(TxnOutcome.STALE, f"rollback: {error}")
    reason = action.reason
    seen = await highest_numbers(view, effects.run_dir)
    if seen.entry > head.seq:
        reason += f"; the store stands at entry {head.seq} of the log, and the run's folder has entries up to {seen.entry}: it was put back"
    # Copies in memory are lost with the ranks of a job that stands still.
    state = None if action.stands_still else state_at_hand(view, frozenset(rank.node for rank in plan.ranks))
    if state is not None:
        advance = chain.reform_entry(head, state, world, new_writer(view), reason, seen=seen)
        report = await effects.ledger.run(_transaction(action, view, advance, plan))
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
        problem = await _find_problem(target, view, effects)
        if isinstance(problem, ActionResult):
            return problem
        if entry is None or entry.cursors is None or entry.tally is None:
            problem = (
                f"its log entry {target.seq} {'is not there' if entry is None else 'keeps no cursors or no tally'}"
            )
        if problem or entry is None:
            log.warning("checkpoint %s is skipped: %s", target.file, problem)
            skipped.append(f"checkpoint {target.file} is skipped: {problem.rstrip('.')}")
            continue
        reason = "; ".join([reason, *skipped])
        await _warn_of_skipped(skipped, target, view, effects)
        advance = chain.rollback_entry(head, entry, world, new_writer(view), reason, seen=seen)
        report = await effects.ledger.run(_transaction(action, view, advance, plan))
        sentence = f"rollback from step {head.step} to {target.step}, lineage {advance.head.lineage}: {reason}"
        return ActionResult(report.outcome, sentence, report.revision)
    raise GcoreError("no whole checkpoint is left on the chain, not even the first model", where=str(effects.run_dir))


def _plan_of(action: Rollback, view: JobView, world: str) -> Plan:
    """The plan of the new world. Raises SpecError while too few slots are there."""
    generation = view.plan.generation + 1
    if action.stands_still:
        return Plan(generation=generation, world=world, ranks=(), engines=(), reason=action.reason, stands_still=True)
    return plan_world(view, world, generation=generation, split=action.split)


async def _find_problem(target: Checkpoint, view: JobView, effects: Effects) -> str | ActionResult:
    """Why a checkpoint cannot be used, or nothing; the result of the action, if this node cannot say now. Where nodes share no folder,
    the checkpoint is fetched first."""
    if effects.replicator is not None and target.file:
        brought = await effects.replicator.ensure_checkpoint(SavedCheckpoint.of(target), view, read_all=True)
        problem = brought.problem
        if problem and not brought.is_final:
            return ActionResult(TxnOutcome.UNKNOWN, f"rollback: checkpoint {target.file}: {problem}")
    else:
        problem = await asyncio.to_thread(find_damage, effects.run_dir, target)
    if problem and effects.replicator is None and (away := await asyncio.to_thread(effects.away)):
        # A checkpoint that this node cannot see is not damaged. To skip it would train everything again, and then forget it.
        effects.tell(AWAY, away)
        return ActionResult(TxnOutcome.UNKNOWN, f"rollback: {away}")
    effects.tell(AWAY, "")
    return problem


async def highest_numbers(view: JobView, run_dir: Path) -> chain.HighWater:
    """The highest lineage and entry that this node can find anywhere."""
    lineage, left = await asyncio.gather(
        asyncio.to_thread(highest_lineage, run_dir), asyncio.to_thread(highest_in_folder, run_dir)
    )
    told = (stored.record.entry for stored in view.mirror.folders.values())
    return chain.HighWater(
        lineage=max(lineage, left.lineage, highest_reported_lineage(view)), entry=max((left.entry, *told))
    )


def highest_reported_lineage(view: JobView) -> int:
    """The highest lineage that engines, ranks and nodes report. Higher than head's only if the store was restored from a backup."""
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


async def _warn_of_skipped(skipped: list[str], target: Checkpoint, view: JobView, effects: Effects) -> None:
    """Write a warning about the damaged checkpoints: people do not read the reason of a new world if all goes well after it.

    It is tried once: a peer that loses the compare finds the warning written.
    """
    instead = f"the one before it is used, of step {target.step}" if target.file else "the first model is used"
    sentence = f"{'; '.join(skipped)}; {instead}"
    known = view.mirror.troubles.get(DAMAGED)
    if skipped and (known is None or known.record.sentence != sentence):
        await effects.ledger.run(warning_transaction(view, DAMAGED, sentence, effects.clock.wall()))


async def _entry_of(target: Checkpoint, view: JobView, effects: Effects) -> LogEntry | None:
    """The target's log entry, which has the cursors and the tally to go back to."""
    known: Versioned[LogEntry] | None = view.mirror.log.get(target.seq)
    if known is not None:
        return known.record
    kv = await effects.store.get(view.mirror.keys.log(target.seq))
    return LogEntry.decode(kv.value, kv.key) if kv is not None else None
