"""Executes the actions that rules decide on: each becomes one guarded transaction, or one call to a train rank or an
engine.

If a transaction fails its compares, this is a normal outcome and not an error: the reconciler reads the view again. If
an action needs data that the view does not contain (a log entry, a checkpoint's files), it is read here, and the
transaction compares it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc

from controllers.job.effects import (
    Effects,
    forget_evaluations,
    new_writer,
    open_slots,
    prune_log,
    retain_checkpoints,
    start_job,
    sweep_keys,
    warning_transaction,
)
from controllers.job.rollback import highest_numbers, roll_back
from controllers.rules.actions import (
    AccumulateParts,
    Action,
    ActionResult,
    AssignShards,
    BeginEpoch,
    ChangePlan,
    CommitStep,
    FeedRank,
    FindBlobs,
    FolderAction,
    ForgetEvaluations,
    GiveUpBatch,
    GiveUpPrompt,
    JoinJob,
    LeaveJob,
    MakeSeal,
    MarkBatchReady,
    PostWarning,
    PruneLog,
    PublishWeights,
    PutOffer,
    RecordOutcomes,
    RegisterCheckpoint,
    ReleaseRank,
    ReportCopies,
    ReportMoves,
    RestoreRank,
    RetainCheckpoints,
    ReturnSlots,
    Rollback,
    SetPhase,
    SleepEngine,
    StartJob,
    SweepKeys,
    TakeLead,
    TrainBatch,
    WakeEngine,
    WriteMove,
)
from controllers.rules.view import JobView
from controllers.rules.world import world_loss
from controllers.workers.ranks import RankNotConnected
from gcore.errors import EngineError
from gcore.ledger import chain, transactions
from gcore.ledger.records.chain import HeldState, Member, NodeCopies, WorldState
from gcore.ledger.records.job import JobStatus, Leader
from gcore.ledger.transactions import Transaction, TxnOutcome, keeping_to
from gcore.models.layout import weights_folder
from gcore.models.replicas import list_copies
from gcore.system.fault_injection import FaultPoint, MoveFaultPoint, fault_point


async def apply_action(action: Action, view: JobView, effects: Effects) -> ActionResult:
    """Execute `action` once, as decided on `view`. Raises GcoreError only if a retry cannot help; the job then
    fails."""
    match action:
        case FeedRank():
            return await _feed(action, view, effects)
        case FindBlobs():
            return await _find_blobs(action, view, effects)
        case TrainBatch() | AccumulateParts():
            return await _apply(action, view, effects)
        case ReleaseRank() | RestoreRank():
            return await _release_or_restore(action, effects)
        case PublishWeights():
            return await _publish(action, effects)
        case SleepEngine():
            return await _sleep(action, effects)
        case WakeEngine():
            return await _wake(action, effects)
        case GiveUpPrompt():
            effects.buffer.in_flight.give_up(action.ref, stale=action.stale)
            return ActionResult(TxnOutcome.WON, f"gave up prompt {action.ref}: {action.reason}")
        case StartJob():
            return await start_job(view, effects)
        case RecordOutcomes():
            return await _record_outcomes(action, view, effects)
        case Rollback():
            return await roll_back(action, view, effects)
        case ReportCopies():
            return await _report_copies(action, view, effects)
        case RetainCheckpoints():
            return await retain_checkpoints(action, view, effects)
        case PruneLog():
            return await prune_log(action, view, effects)
        case SweepKeys():
            return await sweep_keys(action, view, effects)
        case ForgetEvaluations():
            return await forget_evaluations(action, view, effects)
        case FolderAction():
            if effects.replicator is None:
                return ActionResult(TxnOutcome.STALE, f"{type(action).__name__}: nodes share a folder")
            return await effects.replicator.carry_out(action, view)
        case _:
            txn = _transaction(action, view, effects)
            report = await effects.ledger.run(txn)
            return ActionResult(report.outcome, f"{txn.kind} {_of_step(action)}", report.revision)


def _transaction(action: Action, view: JobView, effects: Effects) -> Transaction:
    """Make the transaction of an action that is nothing but one transaction on the store."""
    mirror, keys = view.mirror, view.mirror.keys
    match action:
        case JoinJob():
            member = Member(incarnation=view.me, node=view.node, address=effects.address)
            return transactions.join(keys, member, effects.lease)
        case LeaveJob():
            return transactions.leave(keys, mirror.members[view.me], effects.lease)
        case AssignShards():
            return transactions.assign(keys, mirror.assign, action.assignment)
        case PutOffer():
            return transactions.offer(
                keys, mirror.written(keys.offer(view.me), mirror.offers.get(view.me)), action.offer, effects.lease
            )
        case MakeSeal():
            assert mirror.plan is not None
            mini_batches, weight = view.spec.train.mini_batches, view.job.attention_equals_at
            return transactions.seal(
                keys,
                open_slots(view),
                action.chosen,
                view.plan,
                mini_batches,
                view.me,
                weight,
                sequence_parallel=view.spec.train.sequence_parallel,
                checkpoint=action.checkpoint,
                near=view.near_ranks(action.chosen.groups),
            )
        case BeginEpoch():
            old = mirror.epochs.get(action.record.epoch)
            return transactions.begin_epoch(keys, *mirror.started, old, action.record, action.forgotten)
        case ChangePlan():
            assert mirror.plan is not None
            return keeping_to(view.share, transactions.replan(keys, mirror.plan, action.plan))
        case ReturnSlots():
            assert view.share is not None
            return transactions.give_back(keys, mirror.plan, view.share, action.slots)
        case TakeLead():
            known = mirror.written(keys.leader, mirror.leader)
            return transactions.lead(keys, known, Leader(node=view.node, incarnation=view.me), effects.lease)
        case WriteMove() | ReportMoves():
            return _move_transaction(action, view)
        case GiveUpBatch():
            return transactions.reseal(keys, open_slots(view), action.step, view.me)
        case MarkBatchReady():
            return transactions.ready(keys, open_slots(view), action.step)
        case CommitStep():
            assert view.seal is not None
            keep = view.spec.checkpoints_after(action.step, last=view.seal.last, asked=view.seal.checkpoint)
            return transactions.commit(
                keys, open_slots(view), view.rules.shape, new_writer(view), keep_cursors=keep, stats=effects.stats(view)
            )
        case RegisterCheckpoint():
            entry = mirror.log[action.checkpoint.seq]
            return transactions.register(keys, *mirror.started, entry, action.checkpoint)
        case PostWarning():
            return warning_transaction(view, action.topic, action.sentence, effects.clock.wall())
        case SetPhase():
            assert mirror.status is not None
            status = JobStatus(phase=action.phase, reason=action.reason, changed=effects.clock.wall())
            return transactions.set_status(keys, mirror.status, status, open_slots(view) if action.at_head else None)
        case _:
            raise TypeError(f"{action} is not one transaction")


def _move_transaction(action: WriteMove | ReportMoves, view: JobView) -> Transaction:
    mirror, keys = view.mirror, view.mirror.keys
    assert mirror.leader is not None
    assert mirror.plan is not None
    known = mirror.moves_revision
    if isinstance(action, ReportMoves):
        # Not the current record: it may contain a later change, which this report does not know.
        return transactions.tell_moves(keys, mirror.leader, action.report.since, action.report.moves)
    moves, plan = mirror.moves.plus(action.proposal.move), action.proposal.plan
    if plan is None:
        return transactions.tell_moves(keys, mirror.leader, known, moves)
    txn = transactions.place(
        keys, mirror.leader, mirror.plan, plan, known, moves, mirror.written(keys.pin, mirror.pins.get(""))
    )
    return keeping_to(view.share, txn)


async def _feed(action: FeedRank, view: JobView, effects: Effects) -> ActionResult:
    seal = view.seal
    assert seal is not None
    missing = sorted(view.unsent(seal, action.rank).items())
    found = [(effects.buffer.group(digest), frozenset(samples)) for digest, samples in missing]
    parts = [(group, samples) for group, samples in found if group is not None]
    sentence = f"feed {len(parts)} groups of {action.token} to rank {action.rank}"

    async def feed() -> None:
        fault_point(FaultPoint.FEED, "before")
        share = len(view.layout(seal).of_rank(action.rank))
        await effects.ranks.feed(action.rank, seal, parts, share, view.me, (view.node,))
        fault_point(FaultPoint.FEED, "after")

    return await _report_call(feed(), sentence)


async def _find_blobs(action: FindBlobs, view: JobView, effects: Effects) -> ActionResult:
    seal = view.seal
    assert seal is not None
    fetching, mine = view.fetching(seal, action.rank), view.held_for(seal)
    asked = {digest: one for digest, one in fetching.items() if one.unavailable and digest in mine}
    lost = sorted({blob for one in asked.values() for blob in one.unavailable})
    where = await effects.locate(lost)
    dropped, again = [], []
    for digest, one in sorted(asked.items()):
        group = effects.buffer.group(digest)
        if group is None:
            continue
        if gone := [blob for blob in sorted(one.unavailable) if not where.get(blob)]:
            effects.buffer.drop_group(group.ref)
            dropped.append(f"{group.ref} (blob {gone[0][:12]})")
        else:
            again.append((group, one.samples))
    if again:
        holders = frozenset(node for blob in lost for node in where.get(blob, ()))
        share = len(view.layout(seal).of_rank(action.rank))
        call = effects.ranks.feed(action.rank, seal, again, share, view.me, holders)
        return await _report_call(call, f"name other stores for {len(again)} groups of {action.token}")
    sentence = f"drop groups whose blobs no store has: {', '.join(dropped) or 'none'}"
    return ActionResult(TxnOutcome.WON, sentence)


async def _apply(action: TrainBatch | AccumulateParts, view: JobView, effects: Effects) -> ActionResult:
    seal = view.seal
    assert seal is not None
    whole = isinstance(action, TrainBatch)
    sentence = f"train {'' if whole else f'{seal.ready_parts} parts of '}{action.token} on rank {action.rank}"
    known = view.ranks.get(action.rank)
    stored = seal.encode(known.speaks if known is not None else None)

    async def train() -> None:
        fault_point(FaultPoint.APPLY, "before")
        await effects.ranks.apply(action.rank, seal, stored, whole=whole)
        fault_point(FaultPoint.APPLY, "after")

    return await _report_call(train(), sentence)


async def _release_or_restore(action: ReleaseRank | RestoreRank, effects: Effects) -> ActionResult:
    goes = isinstance(action, ReleaseRank)
    sentence = f"{'release' if goes else 'restore'} the memory of rank {action.rank}"
    step = action.step if isinstance(action, ReleaseRank) else None
    return await _report_call(effects.ranks.rest(action.rank, step), sentence)


async def _publish(action: PublishWeights, effects: Effects) -> ActionResult:
    async def publish() -> None:
        fault_point(FaultPoint.PUBLISH, "before")
        await effects.pools[""].publish(
            action.instance, action.version, weights_folder(effects.run_dir, action.version)
        )
        fault_point(FaultPoint.PUBLISH, "after")

    return await _report_call(publish(), f"publish {action.version} to {action.instance}")


async def _sleep(action: SleepEngine, effects: Effects) -> ActionResult:
    async def sleep() -> None:
        fault_point(MoveFaultPoint.SLEEP, "before")
        await effects.pools[action.judge].sleep(action.instance)
        fault_point(MoveFaultPoint.SLEEP, "after")

    return await _report_call(sleep(), f"put {action.instance} to sleep")


async def _wake(action: WakeEngine, effects: Effects) -> ActionResult:
    async def wake() -> None:
        fault_point(MoveFaultPoint.WAKE, "before")
        await effects.pools[action.judge].wake(action.instance)
        fault_point(MoveFaultPoint.WAKE, "after")

    return await _report_call(wake(), f"wake {action.instance}")


async def _report_call(call: Awaitable[None], sentence: str) -> ActionResult:
    """Await a call to a rank or an engine, and return its result as that of the action; UNKNOWN if the call failed,
    because it may have had an effect."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return ActionResult(TxnOutcome.UNKNOWN, f"{sentence}: {error.details()}")
    except (RankNotConnected, EngineError) as error:
        return ActionResult(TxnOutcome.UNKNOWN, f"{sentence}: {error}")
    return ActionResult(TxnOutcome.WON, sentence)


async def _record_outcomes(action: RecordOutcomes, view: JobView, effects: Effects) -> ActionResult:
    """Write an account entry (outcomes of prompts without a step), unless the run's folder contains later log entries
    than the store.

    While the train world is lost, the store may have been restored from an older backup, which the rollback will
    detect. An entry that is written before the rollback could reuse a number that the run's folder already contains, so
    it waits.
    """
    head = open_slots(view).head.record
    if world_loss(view) is not None and (seen := await highest_numbers(view, effects.run_dir)).entry > head.seq:
        sentence = f"account: the run's folder has entries up to {seen.entry}, but head is entry {head.seq}; waiting for a rollback"
        return ActionResult(TxnOutcome.STALE, sentence)
    advance = chain.account_entry(head, action.outcomes, view.rules.shape, new_writer(view))
    report = await effects.ledger.run(transactions.account(view.mirror.keys, open_slots(view), advance))
    return ActionResult(report.outcome, f"account for {len(action.outcomes)} prompts", report.revision)


async def _report_copies(action: ReportCopies, view: JobView, effects: Effects) -> ActionResult:
    keys = view.mirror.keys
    found = () if effects.memory_dir is None else await asyncio.to_thread(list_copies, effects.memory_dir, keys.uid)
    shards: dict[WorldState, list[int]] = {}
    for header in found:
        shards.setdefault(header.of, []).append(header.shard)
    held = tuple(HeldState(state=state, shards=tuple(own)) for state, own in shards.items())
    stock = NodeCopies(node=view.node, by=view.me, seq=action.seq, held=held)
    report = await effects.ledger.run(
        transactions.take_stock(
            keys, view.mirror.written(keys.copies(view.node), view.mirror.copies.get(view.node)), stock, effects.lease
        )
    )
    there = ", ".join(map(str, shards)) or "none"
    return ActionResult(report.outcome, f"report copies of train states in memory: {there}", report.revision)


def _of_step(action: Action) -> str:
    step = getattr(action, "step", None)
    return f"step {step}" if step is not None else ""
