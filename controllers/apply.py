"""Carries decisions out: each action becomes one guarded transaction, or one call to a rank or an engine.

A lost compare is an outcome, not an error: the caller looks again. Nothing here decides anything; where an action needs
what the view does not hold (a log entry, a checkpoint's files), it is read here and the transaction compares it.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc

from controllers.actions import (
    Account,
    Action,
    Apply,
    Assign,
    BeginEpoch,
    Commit,
    Feed,
    GiveUp,
    Join,
    MakeSeal,
    Prune,
    Publish,
    PutOffer,
    Ready,
    Register,
    Reseal,
    Retain,
    Rollback,
    SetPhase,
    StartJob,
)
from controllers.hands import Applied, Hands, new_world, place, slots, writer
from controllers.housekeeping import orphaned_checkpoints
from controllers.ranks import NotConnected
from controllers.rolling import roll_back
from controllers.view import JobView
from gcore.errors import EngineError
from gcore.ledger import archive, chain, transactions
from gcore.ledger.balance import balance
from gcore.ledger.guarded import Transaction, TxnKind, TxnOutcome, TxnReport
from gcore.ledger.job import JobPhase, JobStatus
from gcore.ledger.records import Member
from gcore.store.types import Compare, Put
from gcore.types import Version
from gcore.weights.layout import checkpoint_folder, weights_folder

FIRST = Version(0, 0)


async def apply(action: Action, view: JobView, hands: Hands) -> Applied:
    """Carry `action` out, once. Raises GcoreError only for what cannot be tried again."""
    match action:
        case Feed():
            return await _feed(action, view, hands)
        case Apply():
            return await _apply(action, view, hands)
        case Publish():
            return await _publish(action, hands)
        case GiveUp():
            hands.holdings.in_flight.give_up(action.ref, stale=action.stale)
            return Applied(TxnOutcome.WON, f"prompt {action.ref} is given up: {action.reason}")
        case Rollback():
            return await roll_back(action, view, hands)
        case Retain():
            return await _retain(action, view, hands)
        case Prune():
            return await _prune(action, view, hands)
        case _:
            txn = _transaction(action, view, hands)
            report = await hands.ledger.run(txn)
            return Applied(report.outcome, f"{txn.kind} {_name(action)}", report.revision)


def _transaction(action: Action, view: JobView, hands: Hands) -> Transaction:
    """The transaction of an action that is nothing but one."""
    mirror, keys = view.mirror, view.mirror.keys
    match action:
        case StartJob():
            assert mirror.status is not None
            advance = chain.base(len(view.rules.shape.lengths), new_world(), writer(view))
            plan = place(view, advance.head.world, generation=1)
            running = JobStatus(phase=JobPhase.RUNNING, reason="training", changed=hands.clock.wall())
            return transactions.start(keys, mirror.status, advance, plan, running)
        case Join():
            member = Member(incarnation=view.me, node=view.node, address=hands.address)
            key = keys.member(view.me)
            return Transaction(TxnKind.JOIN, (Compare(key, 0),), (Put(key, member.encode(), lease=hands.lease),))
        case Assign():
            return transactions.assign(keys, mirror.assign, action.assignment)
        case PutOffer():
            return transactions.offer(keys, mirror.offers.get(view.me), action.offer, hands.lease)
        case MakeSeal():
            assert mirror.plan is not None
            assert mirror.job is not None
            mini_batches, weight = view.spec.train.mini_batches, mirror.job.record.attention_equals_at
            return transactions.seal(
                keys, slots(view), action.chosen, mirror.plan.record, mini_batches, view.me, weight
            )
        case Account():
            head = slots(view).head.record
            advance = chain.accounted(head, action.outcomes, view.rules.shape, writer(view))
            return transactions.account(keys, slots(view), advance)
        case BeginEpoch():
            assert mirror.head is not None
            assert mirror.checkpoints is not None
            old = mirror.epochs.get(action.record.epoch)
            return transactions.begin_epoch(keys, mirror.head, mirror.checkpoints, old, action.record, action.forgotten)
        case Reseal():
            return transactions.reseal(keys, slots(view), action.step, view.me)
        case Ready():
            return transactions.ready(keys, slots(view), action.step)
        case Commit():
            assert view.seal is not None
            keep = view.spec.checkpoints_after(action.step, last=view.seal.last)
            return transactions.commit(
                keys, slots(view), view.rules.shape, writer(view), keep_cursors=keep, stats=hands.stats(view)
            )
        case Register():
            assert mirror.head is not None
            assert mirror.checkpoints is not None
            entry = mirror.log[action.checkpoint.seq]
            return transactions.register(keys, mirror.head, mirror.checkpoints, entry, action.checkpoint)
        case SetPhase():
            assert mirror.status is not None
            status = JobStatus(phase=action.phase, reason=action.reason, changed=hands.clock.wall())
            return transactions.set_status(keys, mirror.status, status, slots(view) if action.at_head else None)
        case _:
            raise TypeError(f"{action} is not one transaction")


async def _feed(action: Feed, view: JobView, hands: Hands) -> Applied:
    seal = view.seal
    assert seal is not None
    missing = view.missing(seal, balance(seal), action.rank)
    parts = []
    for digest, samples in sorted(missing.items()):
        group = hands.holdings.group(digest)
        if group is not None:
            parts.append((group, frozenset(samples)))
    sentence = f"feed {len(parts)} groups of {action.token} to rank {action.rank}"
    try:
        await hands.ranks.feed(action.rank, seal, parts, view.me)
    except grpc.aio.AioRpcError as error:
        return Applied(TxnOutcome.UNKNOWN, f"{sentence}: {error.details()}")
    except NotConnected as error:
        return Applied(TxnOutcome.UNKNOWN, f"{sentence}: {error}")
    return Applied(TxnOutcome.WON, sentence)


async def _apply(action: Apply, view: JobView, hands: Hands) -> Applied:
    seal = view.seal
    assert seal is not None
    sentence = f"train {action.token} on rank {action.rank}"
    try:
        await hands.ranks.apply(action.rank, seal, seal.encode())
    except grpc.aio.AioRpcError as error:
        return Applied(TxnOutcome.UNKNOWN, f"{sentence}: {error.details()}")
    except NotConnected as error:
        return Applied(TxnOutcome.UNKNOWN, f"{sentence}: {error}")
    return Applied(TxnOutcome.WON, sentence)


async def _publish(action: Publish, hands: Hands) -> Applied:
    sentence = f"publish {action.version} to {action.instance}"
    try:
        await hands.engines.publish(action.instance, action.version, weights_folder(hands.run_dir, action.version))
    except EngineError as error:
        return Applied(TxnOutcome.UNKNOWN, f"{sentence}: {error}")
    return Applied(TxnOutcome.WON, sentence)


async def _retain(action: Retain, view: JobView, hands: Hands) -> Applied:
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    # Listed before head is compared: what a later lineage writes while this controller sleeps is not among them.
    lying = versions_in(checkpoint_folder(hands.run_dir, FIRST).parent)
    report: TxnReport = await hands.ledger.run(
        transactions.retain(mirror.keys, mirror.head, mirror.checkpoints, action.kept)
    )
    if report.outcome is TxnOutcome.WON:
        # Not only those that were just forgotten: a deed that was cut off may have left others behind.
        for version in orphaned_checkpoints(view.head, action.kept, lying):
            await asyncio.to_thread(shutil.rmtree, checkpoint_folder(hands.run_dir, version), ignore_errors=True)
    return Applied(report.outcome, f"retain {len(action.kept)} checkpoints", report.revision)


async def _prune(action: Prune, view: JobView, hands: Hands) -> Applied:
    """First to the run's folder, then out of the store; an entry that stands in both is the same entry."""
    mirror = view.mirror
    assert mirror.head is not None
    assert mirror.checkpoints is not None
    entries = [mirror.log[seq].record for seq in action.seqs]
    try:
        await asyncio.to_thread(archive.append, hands.run_dir, view.me, entries)
    except OSError as error:
        return Applied(TxnOutcome.UNKNOWN, f"prune: the run's folder takes no entries ({error.strerror or error})")
    report = await hands.ledger.run(transactions.prune(mirror.keys, mirror.head, mirror.checkpoints, action.seqs))
    return Applied(report.outcome, f"prune {len(action.seqs)} log entries", report.revision)


def _name(action: Action) -> str:
    step = getattr(action, "step", None)
    return f"step {step}" if step is not None else ""


def staged_versions(run_dir: Path) -> frozenset[Version]:
    """The versions whose weights lie whole in the run's folder, and the first, which engines start with."""
    return versions_in(weights_folder(run_dir, FIRST).parent) | {FIRST}


def versions_in(folder: Path) -> frozenset[Version]:
    """The versions after which folders in `folder` are called."""
    found = set()
    for path in folder.glob("*-*") if folder.is_dir() else ():
        lineage, _, step = path.name.partition("-")
        if lineage.isdigit() and step.isdigit():
            found.add(Version(int(lineage), int(step)))
    return frozenset(found)
