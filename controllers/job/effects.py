"""What the executor works with (`Effects`), helpers that several actions share, and the actions of retention and of the
start of a job.

Retention: records are written to the run's folder before they are deleted from the store; a file is deleted from the
folder when no record names it any more. Each of these actions is one guarded transaction and file operations. It may be
interrupted anywhere; the next controller finishes it.

Start: one transaction writes the first log entry, the checkpoint record of the base model and the first plan, with the
reason for the plan if a placement policy moves slots. A warning about memory estimates is reported and delays nothing.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from controllers.flow.group_buffer import GroupBuffer
from controllers.inference.pool import EnginePool
from controllers.rules.actions import ActionResult, ForgetEvaluations, PruneLog, RetainCheckpoints, SweepKeys
from controllers.rules.view import JobView
from controllers.rules.world import model_configs, placeable_nodes
from controllers.storage.replication import Replicator
from controllers.workers.ranks import RankConnections
from gcore.engines.emulated.launch import emulation_remark
from gcore.ledger import archive, chain, transactions
from gcore.ledger import retention as sweeping
from gcore.ledger.records.chain import Checkpoint
from gcore.ledger.records.job import JobPhase, JobStatus, Moves, Plan, SplitPart, Trouble
from gcore.ledger.retention import orphaned_checkpoints
from gcore.ledger.transactions import OpenSlots, Transaction, TransactionExecutor, TxnOutcome, keeping_to
from gcore.models.layout import FIRST, checkpoint_folder, versions_in
from gcore.schema import written_version
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.types import Version
from placement.initial import make_initial_plan
from placement.moves import DecisionContext, initial_move, split_from
from placement.placer import new_placer


async def no_stores(blobs: Sequence[str]) -> Mapping[str, Collection[str]]:
    """The answer of a cluster without blob stores: no node has any blob."""
    return {}


@dataclass(frozen=True)
class Effects:
    """What the executor needs to execute actions: store, connections, engines, buffers and folders."""

    store: Store
    ledger: TransactionExecutor
    lease: int
    address: str
    ranks: RankConnections
    pools: Mapping[str, EnginePool]
    """Engine pools by judge; the key of the policy's pool is empty."""
    buffer: GroupBuffer
    clock: Clock
    stats: Callable[[JobView], dict[str, float]]
    """Returns the statistics for the log entry of the committed step."""
    run_dir: Path
    tell: Callable[[str, str], None] = lambda topic, sentence: None
    """Reports a problem by topic, once while it lasts; an empty sentence ends it."""
    away: Callable[[], str] = str
    """Why this node no longer sees the run's folder; empty if it does. Blocks."""
    replicator: Replicator | None = None
    """Manages this node's own folder of the run, if nodes share no folder."""
    locate: Callable[[Sequence[str]], Awaitable[Mapping[str, Collection[str]]]] = no_stores
    """Returns the nodes whose blob stores have each blob of this job (by SHA-256)."""
    memory_dir: Path | None = None
    """The folder of in-memory copies of the job's train states on this node."""


def plan_world(view: JobView, world: str, *, generation: int, split: SplitPart | None = None) -> Plan:
    """Make a plan with a new train world named `world` on the nodes that may get a train rank now. `split`: slots per
    pool that a policy wants. Raises SpecError if there are too few slots."""
    stored = view.mirror.plan
    current = None if stored is None or stored.record.stands_still else stored.record
    wanted = None if split is None else split_from(split)
    placer = new_placer(view.spec, model_configs(view.mirror))
    return placer.for_new_world(
        placeable_nodes(view), current, wanted, view.mirror.pin, world=world, generation=generation
    )


def open_slots(view: JobView) -> OpenSlots:
    """Head and the seal records of the next steps, for transactions that compare them. Requires that the job has
    started."""
    slots = view.mirror.open_slots
    assert slots is not None
    return slots


def new_writer(view: JobView) -> chain.ChainWriter:
    """Identify this controller as the writer of a log entry, with a new random name for one transaction (by which it
    recognizes its entry after a missing response)."""
    binds = written_version() >= chain.BINDING_VERSION
    job = chain.job_digest(view.mirror.job_record) if binds else ""
    return chain.ChainWriter(view.me, uuid.uuid4().hex[:16], job)


def warning_transaction(view: JobView, topic: str, sentence: str, time: float) -> Transaction:
    """Make the transaction that writes a warning. It fails if another peer has changed the warning of the topic.
    `time`: now, in seconds since the epoch."""
    mirror = view.mirror
    trouble = Trouble(topic=topic, node=view.node, sentence=sentence, time=time)
    return transactions.warn(
        mirror.keys, mirror.written(mirror.keys.trouble(topic), mirror.troubles.get(topic)), trouble
    )


def new_world_name() -> str:
    """A new unique name for a train world."""
    return uuid.uuid4().hex[:12]


ARCHIVE_TOPIC = "archive"
FORGET_TOPIC = "checkpoints"
"""Topics of the warnings about old records and about old checkpoints."""


async def retain_checkpoints(action: RetainCheckpoints, view: JobView, effects: Effects) -> ActionResult:
    """Unregister all checkpoints except those that the action keeps, then delete their files."""
    mirror = view.mirror
    txn = transactions.retain(mirror.keys, *mirror.started, action.kept)
    return await _run_then_delete_orphans(txn, action.kept, f"retain {len(action.kept)} checkpoints", view, effects)


async def prune_log(action: PruneLog, view: JobView, effects: Effects) -> ActionResult:
    """Write log entries to the run's folder, then delete them from the store. If nodes share no folder, enough nodes
    have written them before (`controllers.rules.replication`)."""
    mirror = view.mirror
    entries = [mirror.log[seq].record for seq in action.seqs]
    txn = transactions.prune(mirror.keys, *mirror.started, action.seqs)
    keep = functools.partial(archive.append_entries, effects.run_dir, view.me, entries)
    return await _archive_then_delete(keep, txn, f"prune {len(entries)} log entries", effects)


async def sweep_keys(action: SweepKeys, view: JobView, effects: Effects) -> ActionResult:
    """Delete the keys of past train worlds from the store, then the files of checkpoints that a rollback discarded."""
    mirror = view.mirror
    txn = sweeping.sweep(mirror.keys, *mirror.started, action.swept)
    sentence = f"sweep {len(action.swept.worlds)} worlds, {len(action.swept.parts)} parts of evaluations"
    return await _run_then_delete_orphans(txn, view.checkpoints, sentence, view, effects)


async def forget_evaluations(action: ForgetEvaluations, view: JobView, effects: Effects) -> ActionResult:
    """Write evaluations to the run's folder, then delete them from the store."""
    mirror = view.mirror
    old = [mirror.evaluations[version].record for version in action.versions]
    txn = sweeping.forget_evaluations(mirror.keys, *mirror.started, action.versions)
    keep = functools.partial(archive.append_evaluations, effects.run_dir, view.me, old)
    return await _archive_then_delete(keep, txn, f"forget {len(old)} evaluations", effects)


async def _archive_then_delete(
    keep: Callable[[], None], txn: Transaction, sentence: str, effects: Effects
) -> ActionResult:
    """Call `keep`, which writes records to the run's folder, then run `txn`, which deletes them from the store.

    Does nothing if this node no longer sees the run's folder (a lost mount, a moved folder), because no reader would
    find the records.
    """
    if away := await asyncio.to_thread(effects.away):
        why = f"{away}; old records stay in the store, so the store grows"
        effects.tell(ARCHIVE_TOPIC, why)
        return ActionResult(TxnOutcome.UNKNOWN, why)
    try:
        if effects.replicator is None:
            await asyncio.to_thread(keep)
    except OSError as error:
        why = f"old records cannot be written to the run's folder ({error.strerror or error}); they stay in the store, so the store grows"
        effects.tell(ARCHIVE_TOPIC, why)
        return ActionResult(TxnOutcome.UNKNOWN, why)
    effects.tell(ARCHIVE_TOPIC, "")
    report = await effects.ledger.run(txn)
    return ActionResult(report.outcome, sentence, report.revision)


async def _run_then_delete_orphans(
    txn: Transaction, kept: Sequence[Checkpoint], sentence: str, view: JobView, effects: Effects
) -> ActionResult:
    """Run `txn`. If it succeeds, delete the files of checkpoints that are not in `kept` and that no train world will
    use again, including those that an interrupted action has left.
    """
    # Listed before head is compared, so that checkpoints of a later lineage are not included.
    present = await _list_checkpoints(effects)
    if isinstance(present, OSError):
        return _report_unreadable_folder(effects, present)
    report = await effects.ledger.run(txn)
    if report.outcome is TxnOutcome.WON:
        await _delete(orphaned_checkpoints(view.head, kept, present), effects)
    return ActionResult(report.outcome, sentence, report.revision)


async def _list_checkpoints(effects: Effects) -> frozenset[Version] | OSError:
    """List the versions of the checkpoints in the run's folder, in a thread, because the mount may hang. Return the
    error if it cannot be read."""
    try:
        found = await asyncio.to_thread(versions_in, checkpoint_folder(effects.run_dir, FIRST).parent)
    except OSError as error:
        return error
    effects.tell(FORGET_TOPIC, "")
    return found


def _report_unreadable_folder(effects: Effects, error: OSError) -> ActionResult:
    why = f"the run's folder cannot be read ({error.strerror or error}): {effects.run_dir}; old checkpoints are not deleted until it can be read"
    effects.tell(FORGET_TOPIC, why)
    return ActionResult(TxnOutcome.UNKNOWN, why)


async def _delete(versions: Iterable[Version], effects: Effects) -> None:
    for version in versions:
        fault_point(FaultPoint.FORGET, "before")
        await asyncio.to_thread(shutil.rmtree, checkpoint_folder(effects.run_dir, version), ignore_errors=True)
        fault_point(FaultPoint.FORGET, "after")


START_TOPIC = "beginning"
"""Topic of a warning about the estimates of a job's first plan."""


async def start_job(view: JobView, effects: Effects) -> ActionResult:
    """Start a pending job: write its first log entry, the first plan and the phase RUNNING. Raises SpecError if there
    are too few slots."""
    mirror, spec = view.mirror, view.spec
    assert mirror.status is not None
    advance = chain.base_entry(len(view.rules.shape.lengths), new_world_name(), new_writer(view))
    there, models, pin, world = placeable_nodes(view), model_configs(mirror), mirror.pin, advance.head.world
    moves, warning = None, ""
    if spec.placement.is_live:
        found = await asyncio.to_thread(make_initial_plan, there, spec, models, world=world, pin=pin)
        warning, now = found.beginning.warning, effects.clock.wall()
        at = DecisionContext(step=0, seq=0, by=view.node, time=now)
        moves = Moves().plus(initial_move(found.plan, found.beginning.reason, found.beginning.expected_s, at))
    else:
        found = make_initial_plan(there, spec, models, world=world)
    reason = "training" + emulation_remark(one.slot for one in found.plan.engines)
    running = JobStatus(phase=JobPhase.RUNNING, reason=reason, changed=effects.clock.wall())
    txn = transactions.start(mirror.keys, mirror.status, advance, found.plan, running, moves)
    report = await effects.ledger.run(keeping_to(view.share, txn))
    if warning and report.outcome is not TxnOutcome.STALE:
        effects.tell(START_TOPIC, warning)
    return ActionResult(report.outcome, f"{txn.kind}", report.revision)
