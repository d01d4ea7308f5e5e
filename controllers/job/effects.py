"""What actions are carried out with; the start of a job; what keeps the store and the run's folder small.

Retention: what leaves the store is in the run's folder before; what leaves the folder is named by no record any more. Each is one guarded
transaction and may be cut off anywhere: the next controller that looks sees what it left and finishes it.

Start: base entry, base checkpoint and first plan in one transaction, with the reason for the plan if the job's slots move. A warning about
estimates is reported and delays nothing.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controllers.flow.group_buffer import GroupBuffer
from controllers.inference.pool import EnginePool
from controllers.rules.actions import ActionResult, ForgetEvaluations, PruneLog, RetainCheckpoints, SweepKeys
from controllers.rules.view import JobView
from controllers.rules.world import model_configs, placeable_nodes
from controllers.workers.ranks import RankConnections
from gcore.engines.emulated.launch import emulation_remark
from gcore.ledger import archive, chain, transactions
from gcore.ledger import retention as sweeping
from gcore.ledger.records.chain import Checkpoint
from gcore.ledger.records.job import JobPhase, JobStatus, Moves, Plan, SplitPart, Trouble
from gcore.ledger.retention import orphaned_checkpoints
from gcore.ledger.transactions import OpenSlots, Transaction, TransactionExecutor, TxnOutcome, keeping_to
from gcore.models.layout import FIRST, checkpoint_folder, versions_in
from gcore.store.types import Store
from gcore.system.clock import Clock
from gcore.system.fault_injection import FaultPoint, fault_point
from gcore.types import Version
from placement.initial import make_initial_plan
from placement.moves import DecisionContext, initial_move, split_from
from placement.placer import new_placer

if TYPE_CHECKING:
    from controllers.storage.replication import Replicator


@dataclass(frozen=True)
class Effects:
    """What actions are carried out with."""

    store: Store
    ledger: TransactionExecutor
    lease: int
    address: str
    ranks: RankConnections
    pools: Mapping[str, EnginePool]
    """The engines, by judge; the policy's have no name."""
    buffer: GroupBuffer
    clock: Clock
    stats: Callable[[JobView], dict[str, float]]
    """Numbers for the log entry of the step that is committed."""
    run_dir: Path
    tell: Callable[[str, str], None] = lambda topic, sentence: None
    """Tells people of a trouble, by topic, once while it lasts; an empty sentence: it is over."""
    away: Callable[[], str] = str
    """Why this node does not see the run's folder any more, or nothing. Blocks."""
    replicator: Replicator | None = None
    """Keeps this node's own folder of the run, where nodes share none."""
    memory_dir: Path | None = None
    """Where copies of the job's train states lie in this node's memory."""


def plan_world(view: JobView, world: str, *, generation: int, split: SplitPart | None = None) -> Plan:
    """A plan over the nodes that may take a train world now. Raises SpecError while they are too few. `split`: what a policy wants."""
    stored = view.mirror.plan
    current = None if stored is None or stored.record.stands_still else stored.record
    wanted = None if split is None else split_from(split)
    placer = new_placer(view.spec, model_configs(view.mirror))
    return placer.for_new_world(
        placeable_nodes(view), current, wanted, view.mirror.pin, world=world, generation=generation
    )


def open_slots(view: JobView) -> OpenSlots:
    """What stands at head and at the step after it; it must be there."""
    slots = view.mirror.open_slots
    assert slots is not None
    return slots


def new_writer(view: JobView) -> chain.ChainWriter:
    """Me, with a name for this one transaction."""
    return chain.ChainWriter(view.me, uuid.uuid4().hex[:16])


def warning_transaction(view: JobView, topic: str, sentence: str, time: float) -> Transaction:
    """Tells people what went wrong beside the run; nothing if somebody else has told something of the topic meanwhile. `time`:
    now, in seconds since the epoch."""
    mirror = view.mirror
    trouble = Trouble(topic=topic, node=view.node, sentence=sentence, time=time)
    return transactions.warn(
        mirror.keys, mirror.written(mirror.keys.trouble(topic), mirror.troubles.get(topic)), trouble
    )


def new_world_name() -> str:
    """A name that no train world had."""
    return uuid.uuid4().hex[:12]


ARCHIVE_TOPIC = "archive"

FORGET_TOPIC = "checkpoints"
"""What trouble with old files is called in the store."""


async def retain_checkpoints(action: RetainCheckpoints, view: JobView, hands: Effects) -> ActionResult:
    """Out of the record first, then their files."""
    mirror = view.mirror
    txn = transactions.retain(mirror.keys, *mirror.started, action.kept)
    return await _left(txn, action.kept, f"retain {len(action.kept)} checkpoints", view, hands)


async def prune_log(action: PruneLog, view: JobView, hands: Effects) -> ActionResult:
    """First to the run's folder, then out of the store; an entry that stands in both is the same entry. Where nodes share no
    folder, enough of them have written it down by now (`controllers.rules.replication`)."""
    mirror = view.mirror
    entries = [mirror.log[seq].record for seq in action.seqs]
    txn = transactions.prune(mirror.keys, *mirror.started, action.seqs)
    keep = functools.partial(archive.append_entries, hands.run_dir, view.me, entries)
    return await _moved(keep, txn, f"prune {len(entries)} log entries", hands)


async def sweep_keys(action: SweepKeys, view: JobView, hands: Effects) -> ActionResult:
    """Out of the store, then the checkpoints that a change of the world has cut off."""
    mirror = view.mirror
    txn = sweeping.sweep(mirror.keys, *mirror.started, action.swept)
    sentence = f"sweep {len(action.swept.worlds)} worlds, {len(action.swept.parts)} parts of evaluations"
    return await _left(txn, view.checkpoints, sentence, view, hands)


async def forget_evaluations(action: ForgetEvaluations, view: JobView, hands: Effects) -> ActionResult:
    """First to the run's folder, then out of the store."""
    mirror = view.mirror
    old = [mirror.evaluations[version].record for version in action.versions]
    txn = sweeping.forget_evaluations(mirror.keys, *mirror.started, action.versions)
    keep = functools.partial(archive.append_evaluations, hands.run_dir, view.me, old)
    return await _moved(keep, txn, f"forget {len(old)} evaluations", hands)


async def _moved(keep: Callable[[], None], txn: Transaction, sentence: str, hands: Effects) -> ActionResult:
    """What `keep` writes down in the run's folder leaves the store by `txn`, and only if the folder took it.

    A folder that is not the one, beneath a mount that is gone or in place of one that was moved, takes it too, and nobody
    would find it there.
    """
    if away := await asyncio.to_thread(hands.away):
        why = f"{away}; old records stay in the store, which grows"
        hands.tell(ARCHIVE_TOPIC, why)
        return ActionResult(TxnOutcome.UNKNOWN, why)
    try:
        if hands.replicator is None:
            await asyncio.to_thread(keep)
    except OSError as error:
        why = f"the run's folder takes no old records ({error.strerror or error}); they stay in the store, which grows"
        hands.tell(ARCHIVE_TOPIC, why)
        return ActionResult(TxnOutcome.UNKNOWN, why)
    hands.tell(ARCHIVE_TOPIC, "")
    report = await hands.ledger.run(txn)
    return ActionResult(report.outcome, sentence, report.revision)


async def _left(
    txn: Transaction, kept: Sequence[Checkpoint], sentence: str, view: JobView, hands: Effects
) -> ActionResult:
    """Out of the store by `txn`; then the checkpoints' files that are not `kept` and no world will go back to.

    Not only those that were just forgotten: a deed that was cut off may have left others behind.
    """
    # Listed before head is compared: what a later lineage writes while this controller sleeps is not among them.
    lying = await _lying(hands)
    if isinstance(lying, OSError):
        return _unread(hands, lying)
    report = await hands.ledger.run(txn)
    if report.outcome is TxnOutcome.WON:
        await _delete(orphaned_checkpoints(view.head, kept, lying), hands)
    return ActionResult(report.outcome, sentence, report.revision)


async def _lying(hands: Effects) -> frozenset[Version] | OSError:
    """The checkpoints that lie in the run's folder, or why that cannot be told. In a thread: the folder's mount may hang."""
    try:
        found = await asyncio.to_thread(versions_in, checkpoint_folder(hands.run_dir, FIRST).parent)
    except OSError as error:
        return error
    hands.tell(FORGET_TOPIC, "")
    return found


def _unread(hands: Effects, error: OSError) -> ActionResult:
    why = f"the run's folder cannot be read ({error.strerror or error}): {hands.run_dir}; old checkpoints stay until it can"
    hands.tell(FORGET_TOPIC, why)
    return ActionResult(TxnOutcome.UNKNOWN, why)


async def _delete(versions: Iterable[Version], hands: Effects) -> None:
    for version in versions:
        fault_point(FaultPoint.FORGET, "before")
        await asyncio.to_thread(shutil.rmtree, checkpoint_folder(hands.run_dir, version), ignore_errors=True)
        fault_point(FaultPoint.FORGET, "after")


START_TOPIC = "beginning"
"""What a warning of what a job begins with is called in the store."""


async def start_job(view: JobView, hands: Effects) -> ActionResult:
    """Begin it. Raises SpecError while there are too few slots."""
    mirror, spec = view.mirror, view.spec
    assert mirror.status is not None
    advance = chain.base_entry(len(view.rules.shape.lengths), new_world_name(), new_writer(view))
    there, models, pin, world = placeable_nodes(view), model_configs(mirror), mirror.pin, advance.head.world
    moves, warning = None, ""
    if spec.placement.is_live:
        found = await asyncio.to_thread(make_initial_plan, there, spec, models, world=world, pin=pin)
        warning, now = found.beginning.warning, hands.clock.wall()
        at = DecisionContext(step=0, seq=0, by=view.node, time=now)
        moves = Moves().plus(initial_move(found.plan, found.beginning.reason, found.beginning.expected_s, at))
    else:
        found = make_initial_plan(there, spec, models, world=world)
    reason = "training" + emulation_remark(one.slot for one in found.plan.engines)
    running = JobStatus(phase=JobPhase.RUNNING, reason=reason, changed=hands.clock.wall())
    txn = transactions.start(mirror.keys, mirror.status, advance, found.plan, running, moves)
    report = await hands.ledger.run(keeping_to(view.share, txn))
    if warning and report.outcome is not TxnOutcome.STALE:
        hands.tell(START_TOPIC, warning)
    return ActionResult(report.outcome, f"{txn.kind}", report.revision)
