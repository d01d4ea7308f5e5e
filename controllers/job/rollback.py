"""Executes a rollback: replaces the train world in one transaction. The new world starts from in-memory copies of the
committed state if the nodes have them, otherwise from the newest complete checkpoint. With a checkpoint, the progress
in the data (cursors and tally) goes back to it too.

If nodes share no folder, the checkpoint is fetched first. If a peer is unreachable, this is retried, because it does
not prove damage. A checkpoint is only skipped if it is damaged on all registered nodes or if none has it.
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
from gcore.ledger.records.restart_reasons import RESTORED
from gcore.ledger.selection import resumable_checkpoints
from gcore.ledger.transactions import Transaction, TxnOutcome, Versioned, keeping_to
from gcore.models.layout import CheckpointDamaged, highest_lineage, manifest_digest, verify_checkpoint

log = logging.getLogger(__name__)

DAMAGED = "damaged"
"""Topic of the warning about damaged checkpoints."""

AWAY = "mount"
"""Topic of the warning about a run folder that this node no longer sees."""


async def roll_back(action: Rollback, view: JobView, effects: Effects) -> ActionResult:
    """Replace the train world: choose its start state and verify it, then run one transaction, which takes weights and
    progress in the data from the same record."""
    head = open_slots(view).head.record
    world = new_world_name()
    try:
        plan = _plan_of(action, view, world)
    except SpecError as error:
        # Absent nodes may return: a job that fitted once does not fail without them.
        return ActionResult(TxnOutcome.STALE, f"rollback: {error}")
    reason = action.reason
    seen = await highest_numbers(view, effects.run_dir)
    if seen.entry > head.seq:
        reason += f"; {RESTORED}: its log ends at entry {head.seq}, but the run's folder has entries up to {seen.entry}"
    # In-memory copies are lost with the ranks of a suspended job.
    state = None if action.stands_still else state_at_hand(view, frozenset(rank.node for rank in plan.ranks))
    if state is not None:
        advance = chain.reform_entry(head, state, world, new_writer(view), reason, seen=seen)
        report = await effects.ledger.run(_transaction(action, view, advance, plan))
        sentence = f"{len(plan.ranks)} ranks start from in-memory copies of step {head.step}, lineage {advance.head.lineage}: {reason}"
        return ActionResult(report.outcome, sentence, report.revision)
    skipped: list[str] = []
    for target in resumable_checkpoints(head, view.checkpoints):
        if action.between_steps and target.step != head.step:
            # Head's own checkpoint is damaged, or the copies were lost after the decision. A larger world is not worth discarded training.
            return ActionResult(
                TxnOutcome.STALE,
                f"rollback: skipped, because head's state is not available and no rank is lost: {reason}",
            )
        entry = await _entry_of(target, view, effects)
        problem = await _find_problem(target, view, effects)
        if isinstance(problem, ActionResult):
            return problem
        if entry is None or entry.cursors is None or entry.tally is None:
            problem = f"its log entry {target.seq} {'is missing' if entry is None else 'has no cursors or no tally'}"
        if problem or entry is None:
            log.warning("skipping checkpoint %s: %s", target.file, problem)
            skipped.append(f"checkpoint {target.file} is skipped: {problem.rstrip('.')}")
            continue
        reason = "; ".join([reason, *skipped])
        await _warn_of_skipped(skipped, target, view, effects)
        advance = chain.rollback_entry(head, entry, world, new_writer(view), reason, seen=seen)
        report = await effects.ledger.run(_transaction(action, view, advance, plan))
        sentence = f"rollback from step {head.step} to {target.step}, lineage {advance.head.lineage}: {reason}"
        return ActionResult(report.outcome, sentence, report.revision)
    raise GcoreError("the job has no usable checkpoint left, not even the initial model", where=str(effects.run_dir))


def _plan_of(action: Rollback, view: JobView, world: str) -> Plan:
    """Make the plan of the new train world; without any places if the job is suspended. Raises SpecError if there are
    too few slots."""
    generation = view.plan.generation + 1
    if action.stands_still:
        return Plan(generation=generation, world=world, ranks=(), engines=(), reason=action.reason, stands_still=True)
    return plan_world(view, world, generation=generation, split=action.split)


async def _find_problem(target: Checkpoint, view: JobView, effects: Effects) -> str | ActionResult:
    """Check whether a checkpoint can be used. Return why not, or an empty string; or the result of the whole action if
    this node cannot tell now. If nodes share no folder, the checkpoint is fetched first."""
    if effects.replicator is not None and target.file:
        brought = await effects.replicator.ensure_checkpoint(SavedCheckpoint.of(target), view, read_all=True)
        problem = brought.problem
        if problem and not brought.is_final:
            return ActionResult(TxnOutcome.UNKNOWN, f"rollback: checkpoint {target.file}: {problem}")
    else:
        problem = await asyncio.to_thread(find_damage, effects.run_dir, target)
    if problem and effects.replicator is None and (away := await asyncio.to_thread(effects.away)):
        # A checkpoint that this node cannot see is not damaged. Skipping it would discard training and then delete it.
        effects.tell(AWAY, away)
        return ActionResult(TxnOutcome.UNKNOWN, f"rollback: {away}")
    effects.tell(AWAY, "")
    return problem


async def highest_numbers(view: JobView, run_dir: Path) -> chain.HighWater:
    """Find the highest lineage and the highest number of a log entry in the run's folder and in the reports of engines,
    ranks and nodes. They exceed those of the store if it was restored from a backup."""
    lineage, left = await asyncio.gather(
        asyncio.to_thread(highest_lineage, run_dir), asyncio.to_thread(highest_in_folder, run_dir)
    )
    entries = (stored.record.entry for stored in view.mirror.folders.values())
    return chain.HighWater(
        lineage=max(lineage, left.lineage, highest_reported_lineage(view)), entry=max((left.entry, *entries))
    )


def highest_reported_lineage(view: JobView) -> int:
    """The highest lineage that engines, ranks and nodes report. It exceeds that of head only if the store was restored
    from a backup."""
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
    """Return what is wrong with the files of a checkpoint; empty if nothing is. The base checkpoint has no files: it is
    the job's model."""
    if not checkpoint.file:
        return ""
    folder = run_dir / checkpoint.file
    try:
        verify_checkpoint(folder)
        if manifest_digest(folder) != checkpoint.digest:
            return "its content differs from the registered checkpoint"
    except CheckpointDamaged as error:
        return str(error)
    return ""


async def _warn_of_skipped(skipped: list[str], target: Checkpoint, view: JobView, effects: Effects) -> None:
    """Write a warning about damaged checkpoints that were skipped, because users may not read the reason of a
    successful rollback. `target`: the checkpoint that is used instead.

    One attempt is enough: if it fails, another peer has written the warning.
    """
    instead = f"using the earlier checkpoint of step {target.step}" if target.file else "using the initial model"
    sentence = f"{'; '.join(skipped)}; {instead}"
    known = view.mirror.troubles.get(DAMAGED)
    if skipped and (known is None or known.record.sentence != sentence):
        await effects.ledger.run(warning_transaction(view, DAMAGED, sentence, effects.clock.wall()))


async def _entry_of(target: Checkpoint, view: JobView, effects: Effects) -> LogEntry | None:
    """Return the log entry of a checkpoint, which contains the progress in the data (cursors and tally); None if it is
    gone. Reads the store if the mirror does not have it."""
    known: Versioned[LogEntry] | None = view.mirror.log.get(target.seq)
    if known is not None:
        return known.record
    kv = await effects.store.get(view.mirror.keys.log(target.seq))
    return LogEntry.decode(kv.value, kv.key) if kv is not None else None
