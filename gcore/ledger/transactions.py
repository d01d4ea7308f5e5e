"""Every write to a job's chain, as one transaction that compares what its writer believed; and the executor that runs one.

A function here takes the stored records with their revisions and returns a `Transaction`: the compares, the writes and the nonce.
`controllers.rules.decide` decides whether it should be made. No transaction compares the assignment, an offer or a lease for
safety: they are hints. Every transaction that writes a plan compares `shares`, so that no plan uses slots that were given back
meanwhile; one that gives slots back compares the plan, so that no newer plan uses them.

`TransactionExecutor.run` makes a transaction. A lost compare is an outcome (`STALE`: look again), not an exception; an answer that
never came is resolved by reading head and the chain (`UNKNOWN` only while that does not tell). Nothing is made twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from gcore.data.order import StreamShape
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.ledger import chain
from gcore.ledger.records.chain import (
    Assignment,
    Checkpoint,
    Checkpoints,
    EpochRecord,
    Head,
    LogEntry,
    Member,
    NodeCopies,
    NodeFolder,
    Offer,
    Seal,
    SealState,
)
from gcore.ledger.records.cluster import ATTENTION_EQUALS_AT, Claim, KnownShare, Quotas, Shares, Slot
from gcore.ledger.records.job import JobPhase, JobRecord, JobStatus, Leader, Moves, Pin, Plan, Trouble
from gcore.ledger.selection import SealPart, SealStep
from gcore.schema import Record
from gcore.store import keys as store_keys
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, Store
from gcore.system.fault_injection import fault_point

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Versioned(Generic[R]):
    """A record and the revision of its last write."""

    record: R
    revision: int


class Revisioned(Protocol):
    """Something that stands under a key, whether it can be read or not."""

    @property
    def revision(self) -> int:
        """Of its last write."""
        ...


class TxnKind(StrEnum):
    """Names of the transactions, as metrics and logs show them."""

    CREATE = "create"
    START = "start"
    JOIN = "join"
    LEAVE = "leave"
    ASSIGN = "assign"
    OFFER = "offer"
    SEAL = "seal"
    RESEAL = "reseal"
    READY = "ready"
    COMMIT = "commit"
    ACCOUNT = "account"
    REGISTER = "register"
    RETAIN = "retain"
    PRUNE = "prune"
    DELETE = "delete"
    ROLLBACK = "rollback"
    STATUS = "status"
    EXTEND = "extend"
    REPLAN = "replan"
    STOCK = "stock"
    FOLDER = "folder"
    EPOCH = "epoch"
    GIVE = "give"
    AGREE = "agree"
    EVAL_PART = "eval_part"
    EVALUATE = "evaluate"
    ASK = "ask"
    WARN = "warn"
    SPEND = "spend"
    LEAD = "lead"
    PLACE = "place"
    MOVES = "moves"
    PIN = "pin"
    SHARE = "share"
    GIVE_BACK = "give_back"
    CLAIM = "claim"
    QUOTAS = "quotas"


class TxnOutcome(StrEnum):
    """WON: written. STALE: a compare failed, nothing was written; look again. UNKNOWN: no answer; look again later."""

    WON = "won"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TxnReport:
    """What became of a transaction; `revision`: the store's when it was decided, 0 if that is not known."""

    outcome: TxnOutcome
    revision: int
    why: str = field(default="", compare=False)
    """What the store said instead of an answer, while it is not known what became of the transaction."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Compares and writes. `nonce`: if set, head carries it once the transaction was made."""

    kind: TxnKind
    compares: tuple[Compare, ...]
    writes: tuple[Put | Delete, ...]
    nonce: str = ""


class TransactionExecutor:
    """Makes transactions against the store, and finds out what became of those without an answer."""

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._store = store
        self._keys = keys
        self.trouble = ""
        """Why the last transaction had no answer, or was refused by the store; empty if it had one."""
        self.unanswered = 0
        """How many had none so far."""

    async def run(self, txn: Transaction) -> TxnReport:
        """Make `txn` once. Never repeats it: after an unknown answer it reads, and compares seq and nonce."""
        try:
            fault_point(txn.kind, "before")
            result = await self._store.transact(txn.compares, txn.writes)
            fault_point(txn.kind, "after")
        except LeaseLost:
            return TxnReport(TxnOutcome.STALE, 0)
        except StoreUnavailable as error:
            self.trouble, self.unanswered = str(error), self.unanswered + 1
            report = await self._find_out(txn)
            return replace(report, why=str(error)) if report.outcome is TxnOutcome.UNKNOWN else report
        self.trouble = ""
        return TxnReport(TxnOutcome.WON if result.won else TxnOutcome.STALE, result.revision)

    async def _find_out(self, txn: Transaction) -> TxnReport:
        """What became of `txn`, whose answer never came: read from head and from its place in the chain.

        Once that place is taken it is settled for ever: by this transaction if the entry has its nonce; else by another,
        and then head is not what this one compares, nor ever will be again.
        """
        unknown = TxnReport(TxnOutcome.UNKNOWN, 0)
        place = next((w.key for w in txn.writes if w.key.startswith(self._keys.log_prefix)), None)
        if not txn.nonce or place is None:
            # Whoever looks again sees the record itself; there is nothing to be resolved.
            return unknown
        try:
            head = await self._store.get(self._keys.head)
            if head is None or self._keys.log(Head.decode(head.value, head.key).seq) < place:
                # It may still be made later; its compare on head decides that, and whoever looks again sees it.
                return unknown
            entry = await self._store.get(place)
        except StoreUnavailable:
            return unknown
        if entry is None:  # moved to the run's folder since
            return unknown
        won = LogEntry.decode(entry.value, entry.key).nonce == txn.nonce
        return TxnReport(TxnOutcome.WON if won else TxnOutcome.STALE, entry.mod_revision)


def put_if_unchanged(kind: TxnKind, key: str, old: Revisioned | None, new: Record, lease: int = 0) -> Transaction:
    """Write a record in place of `old` (None: absent), comparing nothing but its own key."""
    return Transaction(kind, (Compare(key, old.revision if old else 0),), (Put(key, new.encode(), lease=lease),))


DEPTH = 1
"""Open steps at once. With 1 the next step is sealed after the commit of the one before."""


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """The slots of the steps that may be open after `head`, absent ones too, with revisions (0: absent)."""

    head: Versioned[Head]
    slots: Mapping[int, Versioned[Seal]]

    @property
    def seals(self) -> tuple[Seal, ...]:
        """The seals that are there, OPEN ones too."""
        return tuple(slot.record for slot in self.slots.values())

    def compares(self, keys: JobKeys) -> tuple[Compare, ...]:
        """Head and every slot that may be open are as they were seen."""
        steps = {self.head.record.step + i + 1 for i in range(DEPTH)} | set(self.slots)
        slots = tuple(
            Compare(keys.seal(step), self.slots[step].revision if step in self.slots else 0) for step in sorted(steps)
        )
        return (Compare(keys.head, self.head.revision), *slots)


def assign(keys: JobKeys, old: Versioned[Assignment] | None, new: Assignment) -> Transaction:
    """Who works on what. Compares only itself."""
    return put_if_unchanged(TxnKind.ASSIGN, keys.assign, old, new)


def offer(keys: JobKeys, old: Revisioned | None, new: Offer, lease: int) -> Transaction:
    """An incarnation's own offer, under its lease: a put under a lease that has ended fails whole."""
    return put_if_unchanged(TxnKind.OFFER, keys.offer(new.incarnation), old, new, lease)


def join(keys: JobKeys, member: Member, lease: int) -> Transaction:
    """Work on the job from now on, under the own lease. An incarnation joins once."""
    return put_if_unchanged(TxnKind.JOIN, keys.member(member.incarnation), None, member, lease)


def leave(keys: JobKeys, old: Versioned[Member], lease: int) -> Transaction:
    """Say that it is about to end. Compares only itself: who is no member any more does not become one by it."""
    leaving = old.record.model_copy(update={"leaving": True})
    return put_if_unchanged(TxnKind.LEAVE, keys.member(leaving.incarnation), old, leaving, lease)


def withdraw(keys: JobKeys, incarnation: str, node: str) -> Transaction:
    """Take back all that a controller says of itself, and of its node, under its lease, as the lease's end would. Compares
    nothing: the keys are its own alone."""
    of_it = (keys.member(incarnation), keys.offer(incarnation), keys.part(incarnation))
    of_node = (keys.fetch(node), keys.storage(node), keys.copies(node), keys.folder(node))
    return Transaction(TxnKind.LEAVE, (), tuple(Delete(key) for key in (*of_it, *of_node)))


def seal(
    keys: JobKeys,
    open_slots: OpenSlots,
    chosen: SealStep | SealPart,
    plan: Plan,
    mini_batches: int,
    by: str,
    attention_equals_at: int = ATTENTION_EQUALS_AT,
    *,
    checkpoint: bool = False,
) -> Transaction:
    """Close a batch, or one more part of it. Compares head and all slots, absent ones too."""
    head = open_slots.head.record
    slot = open_slots.slots.get(head.step + 1)
    if slot is not None and slot.record.state is not SealState.OPEN:
        raise ValueError(f"step {head.step + 1} is {slot.record.state} already")
    record = chain.seal_slot(
        slot.record if slot else None,
        head,
        chosen,
        world_size=len(plan.ranks),
        mini_batches=mini_batches,
        sealer=by,
        attention_equals_at=attention_equals_at,
        checkpoint=checkpoint,
    )
    return Transaction(TxnKind.SEAL, open_slots.compares(keys), (Put(keys.seal(record.step), record.encode()),))


def reseal(keys: JobKeys, open_slots: OpenSlots, step: int, by: str) -> Transaction:
    """Give a sealed batch up, from SEALED only, or a part of one, from PARTIAL; never what is READY."""
    record = chain.reseal_slot(open_slots.slots[step].record, by)
    return Transaction(TxnKind.RESEAL, open_slots.compares(keys), (Put(keys.seal(step), record.encode()),))


def ready(keys: JobKeys, open_slots: OpenSlots, step: int) -> Transaction:
    """Every rank holds its share, of the whole or of the newest part."""
    slot = open_slots.slots[step]
    return Transaction(
        TxnKind.READY,
        (Compare(keys.head, open_slots.head.revision), Compare(keys.seal(step), slot.revision)),
        (Put(keys.seal(step), chain.ready_slot(slot.record).encode()),),
    )


def commit(
    keys: JobKeys,
    open_slots: OpenSlots,
    shape: StreamShape,
    writer: chain.ChainWriter,
    *,
    keep_cursors: bool,
    stats: Mapping[str, float],
) -> Transaction:
    """Move head to the READY step. Compares head and seal: only one of them is not enough."""
    head = open_slots.head
    step = head.record.step + 1
    slot = open_slots.slots[step]
    advance = chain.commit_entry(head.record, slot.record, shape, writer, keep_cursors=keep_cursors, stats=stats)
    return Transaction(
        TxnKind.COMMIT,
        (Compare(keys.head, head.revision), Compare(keys.seal(step), slot.revision)),
        (*_advance(keys, advance), Delete(keys.seal(step))),
        nonce=writer.nonce,
    )


def account(keys: JobKeys, open_slots: OpenSlots, advance: chain.Advance) -> Transaction:
    """Write outcomes down without a step. Compares all slots: none may have sealed them meanwhile."""
    return Transaction(TxnKind.ACCOUNT, open_slots.compares(keys), _advance(keys, advance), nonce=advance.head.nonce)


def register(
    keys: JobKeys,
    head: Versioned[Head],
    old: Versioned[Checkpoints],
    entry: Versioned[LogEntry],
    checkpoint: Checkpoint,
) -> Transaction:
    """Name a whole checkpoint. Compares that its log entry still is what it was made from."""
    record = old.record.model_copy(update={"entries": (*old.record.entries, checkpoint)})
    return Transaction(
        TxnKind.REGISTER,
        (
            Compare(keys.head, head.revision),
            Compare(keys.checkpoints, old.revision),
            Compare(keys.log(checkpoint.seq), entry.revision),
        ),
        (Put(keys.checkpoints, record.encode()),),
    )


def retain(
    keys: JobKeys, head: Versioned[Head], old: Versioned[Checkpoints], kept: Sequence[Checkpoint]
) -> Transaction:
    """Forget checkpoints; their files go after this was won, never before."""
    record = old.record.model_copy(update={"entries": tuple(kept)})
    return Transaction(
        TxnKind.RETAIN,
        (Compare(keys.head, head.revision), Compare(keys.checkpoints, old.revision)),
        (Put(keys.checkpoints, record.encode()),),
    )


def warn(keys: JobKeys, old: Revisioned | None, trouble: Trouble) -> Transaction:
    """What went wrong beside the run, in place of what was told of the same topic before."""
    return put_if_unchanged(TxnKind.WARN, keys.trouble(trouble.topic), old, trouble)


MOST_PRUNED = 100
"""Entries in one prune: the store takes 128 operations in a transaction."""


def prune(keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], seqs: Sequence[int]) -> Transaction:
    """Take entries out of the store that stand in the run's folder by now. Compares what made them superfluous."""
    if len(seqs) > MOST_PRUNED:
        raise ValueError(f"{len(seqs)} entries are more than the {MOST_PRUNED} of one prune")
    return Transaction(
        TxnKind.PRUNE,
        (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision)),
        tuple(Delete(keys.log(seq)) for seq in seqs),
    )


def delete_job(keys: JobKeys, head: Versioned[Head], status: Versioned[JobStatus]) -> Transaction:
    """First of two: mark head, so that whoever still works on the job loses every compare from now on, and nobody has it go on."""
    if not status.record.phase.ended:
        raise ValueError("a job that has not ended is not deleted")
    record = head.record.model_copy(update={"deleted": True})
    compares = (Compare(keys.head, head.revision), Compare(keys.state, status.revision))
    return Transaction(TxnKind.DELETE, compares, (Put(keys.head, record.encode()),))


def delete_rest(
    keys: JobKeys, head: Versioned[Head] | None, status: Versioned[JobStatus], named: Mapping[str, int]
) -> Transaction:
    """Second of two: everything of a job whose head is marked. `named`: what leads to it (its name, its request id), with revisions.

    A job that has ended before it had a head never gets one: its state says so, and is compared.
    """
    if head is not None and not head.record.deleted:
        raise ValueError("head is to be marked first")
    if not status.record.phase.ended:
        raise ValueError("a job that has not ended is not deleted")
    return Transaction(
        TxnKind.DELETE,
        (
            Compare(keys.head, head.revision if head is not None else 0),
            Compare(keys.state, status.revision),
            *(Compare(key, revision) for key, revision in named.items()),
        ),
        (Delete(keys.prefix, prefix=True), Delete(keys.active), *(Delete(key) for key in named)),
    )


def rollback(
    keys: JobKeys,
    open_slots: OpenSlots,
    checkpoints: Versioned[Checkpoints],
    advance: chain.Advance,
    old_plan: Versioned[Plan],
    plan: Plan,
    *,
    slots_as_seen: bool = False,
) -> Transaction:
    """Back to a checkpoint, or on from copies of head's own state (`chain.reform_entry`), with a new world, which `plan` places.

    Deletes every open slot: one that was READY may be half trained by the world that is given up. `slots_as_seen`: compares
    the slots too, so that nothing is given up that became READY meanwhile.
    """
    if plan.world != advance.head.world:
        raise ValueError("the plan must place the world that the rollback names")
    head = open_slots.compares(keys) if slots_as_seen else (Compare(keys.head, open_slots.head.revision),)
    return Transaction(
        TxnKind.ROLLBACK,
        (
            *head,
            Compare(keys.checkpoints, checkpoints.revision),
            Compare(keys.plan, old_plan.revision),
        ),
        (*_advance(keys, advance), Put(keys.plan, plan.encode()), Delete(keys.seal_prefix, prefix=True)),
        nonce=advance.head.nonce,
    )


def create(
    keys: JobKeys, job: JobRecord, created: JobStatus, name_revision: int, claim: Claim | None = None
) -> Transaction:
    """A new job under its name and request id, with what it claims of the slots; the request id makes a repeated request find it."""
    name = store_keys.name(job.name, job.namespace)
    compares = [Compare(name, name_revision), Compare(keys.job, 0)]
    writes: list[Put | Delete] = [
        Put(name, job.uid.encode()),
        Put(keys.job, job.encode()),
        Put(keys.state, created.encode()),
        Put(keys.active, (claim or Claim(namespace=job.namespace, name=job.name, created=job.created)).encode()),
    ]
    if job.request_id:
        compares.append(Compare(store_keys.request(job.request_id), 0))
        writes.append(Put(store_keys.request(job.request_id), job.uid.encode()))
    return Transaction(TxnKind.CREATE, tuple(compares), tuple(writes))


def start(
    keys: JobKeys,
    status: Versioned[JobStatus],
    advance: chain.Advance,
    plan: Plan,
    running: JobStatus,
    moves: Moves | None = None,
) -> Transaction:
    """Begin a PENDING job: its base entry, base checkpoint and first plan, all at once; and why it is that plan, of a job whose slots
    move."""
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    told = () if moves is None else (Put(keys.moves, moves.encode()),)
    return Transaction(
        TxnKind.START,
        (Compare(keys.state, status.revision), Compare(keys.head, 0)),
        (
            *_advance(keys, advance),
            Put(keys.checkpoints, Checkpoints(entries=(base,)).encode()),
            Put(keys.plan, plan.encode()),
            *told,
            Put(keys.state, running.encode()),
        ),
        nonce=advance.head.nonce,
    )


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, as it stands in the store. `named`: revision of the key by which its name means this job."""

    job: Versioned[JobRecord]
    status: Versioned[JobStatus]
    head: Versioned[Head]
    checkpoints: Versioned[Checkpoints]
    plan: Versioned[Plan]
    named: int


def extend(keys: JobKeys, ended: EndedJob, advance: chain.Advance, claim: Claim) -> Transaction:
    """Have a job that has succeeded go on to the goal that the new entry raises: from a checkpoint, in a new lineage, with a plan that
    places nothing until the job has slots. The only way out of an ended phase.

    Deletes what controllers said of themselves and hold: they join anew, and no offer of before its end counts.
    """
    raised = advance.entry.raised
    if ended.status.record.phase is not JobPhase.SUCCEEDED or raised is None or raised.after <= raised.before:
        raise ValueError("only a job that has succeeded goes on, and only to a higher goal")
    if ended.head.record.deleted:
        raise ValueError("a job that is being deleted does not go on")
    job, reason = ended.job.record, advance.entry.reason
    generation, world = ended.plan.record.generation + 1, advance.head.world
    plan = Plan(generation=generation, world=world, ranks=(), engines=(), reason=reason, stands_still=True)
    running = JobStatus(phase=JobPhase.RUNNING, reason=reason, changed=claim.created)
    hints = (keys.member_prefix, keys.offer_prefix, keys.part_prefix, keys.copies_prefix, keys.folder_prefix)
    return Transaction(
        TxnKind.EXTEND,
        (
            Compare(keys.state, ended.status.revision),
            Compare(keys.job, ended.job.revision),
            Compare(keys.head, ended.head.revision),
            Compare(keys.checkpoints, ended.checkpoints.revision),
            Compare(keys.plan, ended.plan.revision),
            Compare(store_keys.name(job.name, job.namespace), ended.named),
        ),
        (
            *_advance(keys, advance),
            Put(keys.job, job.with_goal(raised.what, raised.after).encode()),
            Put(keys.state, running.encode()),
            Put(keys.plan, plan.encode()),
            Put(keys.active, claim.encode()),
            *(Delete(prefix, prefix=True) for prefix in (keys.seal_prefix, *hints)),
        ),
        nonce=advance.head.nonce,
    )


def set_status(keys: JobKeys, old: Versioned[JobStatus], new: JobStatus, open_slots: OpenSlots | None) -> Transaction:
    """Move the job to another phase; never out of an ended one (`extend`). With `open_slots`, only if head and they are still that."""
    if old.record.phase.ended or new.phase is JobPhase.PENDING:
        raise ValueError(f"a job does not go from {old.record.phase} to {new.phase}")
    compares = [Compare(keys.state, old.revision)]
    if open_slots is not None:
        compares += open_slots.compares(keys)
    ending = (Delete(keys.active),) if new.phase.ended else ()
    return Transaction(TxnKind.STATUS, tuple(compares), (Put(keys.state, new.encode()), *ending))


def fail_lost(
    keys: JobKeys,
    status: Versioned[JobStatus] | None,
    claim: Revisioned | None,
    lost: Sequence[str],
    failed: JobStatus,
) -> Transaction:
    """End a job whose records are lost, while its state and its claim are what was read and the `lost` keys are still absent."""
    seen = dict.fromkeys(lost, 0) | {
        keys.state: status.revision if status is not None else 0,
        keys.active: claim.revision if claim is not None else 0,
    }
    if not lost or failed.phase is not JobPhase.FAILED or (status is not None and status.record.phase.ended):
        raise ValueError("only a job that has not ended fails for lost records")
    compares = tuple(Compare(key, revision) for key, revision in seen.items())
    return Transaction(TxnKind.STATUS, compares, (Put(keys.state, failed.encode()), Delete(keys.active)))


def take_stock(keys: JobKeys, old: Revisioned | None, new: NodeCopies, lease: int) -> Transaction:
    """What lies in a node's memory, under its controller's lease. Compares only itself: it is a hint."""
    return put_if_unchanged(TxnKind.STOCK, keys.copies(new.node), old, new, lease)


def say_folder(keys: JobKeys, old: Revisioned | None, new: NodeFolder, lease: int) -> Transaction:
    """What lies in a node's own folder, under its controller's lease. Compares only itself."""
    return put_if_unchanged(TxnKind.FOLDER, keys.folder(new.node), old, new, lease)


def replan(keys: JobKeys, old: Versioned[Plan], new: Plan) -> Transaction:
    """Change which slots run engines. The world stays: only a rollback changes it."""
    if new.world != old.record.world or new.ranks != old.record.ranks:
        raise ValueError("only a rollback places a train world")
    return put_if_unchanged(TxnKind.REPLAN, keys.plan, old, new)


def lead(keys: JobKeys, old: Revisioned | None, new: Leader, lease: int) -> Transaction:
    """Plan from now on, under the own lease. `old`: a leader that works on the job no more."""
    return put_if_unchanged(TxnKind.LEAD, keys.leader, old, new, lease)


def place(
    keys: JobKeys,
    leader: Versioned[Leader],
    old: Versioned[Plan],
    new: Plan,
    known: int,
    moves: Moves,
    pin: Revisioned | None,
) -> Transaction:
    """Change who serves in which role, and say why. Compares the plan and the leadership, so that of two who believe that they lead
    one changes it, and what a person has fixed, which may be more by now; the world stays, which only a rollback changes. `known`: the
    revision of the moves that `moves` goes on from."""
    if new.world != old.record.world or new.ranks != old.record.ranks:
        raise ValueError("only a rollback places a train world")
    if new.generation != old.record.generation + 1:
        raise ValueError("a plan follows the one that it replaces")
    return Transaction(
        TxnKind.PLACE,
        (
            *_led(keys, leader, known),
            Compare(keys.plan, old.revision),
            Compare(keys.pin, pin.revision if pin is not None else 0),
        ),
        (Put(keys.plan, new.encode()), Put(keys.moves, moves.encode())),
    )


def tell_moves(keys: JobKeys, leader: Versioned[Leader], known: int, moves: Moves) -> Transaction:
    """What is wanted, what would be done, what came of moves, and why nothing moved. Changes nothing. `known`: the revision of the record
    that `moves` was made from, so that what was written since is never lost by it."""
    return Transaction(TxnKind.MOVES, _led(keys, leader, known), (Put(keys.moves, moves.encode()),))


def _led(keys: JobKeys, leader: Versioned[Leader], known: int) -> tuple[Compare, Compare]:
    return Compare(keys.leader, leader.revision), Compare(keys.moves, known)


def pin(keys: JobKeys, old: Revisioned | None, new: Pin) -> Transaction:
    """What a person fixes. Compares only itself."""
    return put_if_unchanged(TxnKind.PIN, keys.pin, old, new)


def begin_epoch(
    keys: JobKeys,
    head: Versioned[Head],
    checkpoints: Versioned[Checkpoints],
    old: Versioned[EpochRecord] | None,
    record: EpochRecord,
    forgotten: Sequence[int],
) -> Transaction:
    """Fix the statistics of a data epoch. `old`: what a rollback has cut off and stands there still, if anything.

    Compares that nobody has begun the epoch meanwhile, and head, from which the statistics are. `forgotten`: epochs whose
    records nothing asks for any more; what they follow from is compared too.
    """
    return Transaction(
        TxnKind.EPOCH,
        (
            Compare(keys.head, head.revision),
            Compare(keys.checkpoints, checkpoints.revision),
            Compare(keys.epoch(record.epoch), old.revision if old else 0),
        ),
        (Put(keys.epoch(record.epoch), record.encode()), *(Delete(keys.epoch(epoch)) for epoch in forgotten)),
    )


def _advance(keys: JobKeys, advance: chain.Advance) -> tuple[Put, Put]:
    return (Put(keys.head, advance.head.encode()), Put(keys.log(advance.entry.seq), advance.entry.encode()))


MOST_DROPPED = 100
"""Jobs that one `share_out` takes slots from: the store takes 128 operations in a transaction."""


def share_out(keys: JobKeys, known: Versioned[Shares] | None, new: Shares) -> Transaction:
    """Write which slots each job has. `keys`: of no job in particular.

    Slots of a job that is no longer in the record may go to others at once. So the transaction compares that each such job has no claim: a
    controller whose watch of claims is late takes a job that was just created, or that continues after its end, for one that has ended.
    """
    before = {} if known is None else known.record.jobs
    dropped = sorted(uid for uid, share in before.items() if share.held and uid not in new.jobs)
    if len(dropped) > MOST_DROPPED:
        new = Shares(jobs={uid: share for uid, share in before.items() if uid not in dropped[:MOST_DROPPED]})
    txn = put_if_unchanged(TxnKind.SHARE, store_keys.SHARES, known, new)
    absent = tuple(Compare(JobKeys(uid).active, 0) for uid in dropped[:MOST_DROPPED])
    return replace(txn, compares=(*txn.compares, *absent))


def keeping_to(share: KnownShare | None, txn: Transaction) -> Transaction:
    """The same, only if the job still has the slots from which its plan was made. None: nobody shares anything out."""
    if share is None:
        return txn
    return replace(txn, compares=(*txn.compares, Compare(store_keys.SHARES, share.revision)))


def give_back(keys: JobKeys, plan: Versioned[Plan] | None, share: KnownShare, slots: frozenset[Slot]) -> Transaction:
    """The job uses these no more. Compares its plan, absent too."""
    return Transaction(
        TxnKind.GIVE_BACK,
        (Compare(store_keys.SHARES, share.revision), Compare(keys.plan, plan.revision if plan else 0)),
        (Put(store_keys.SHARES, share.shares.released(share.uid, slots).encode()),),
    )


def set_quotas(keys: JobKeys, known: Revisioned | None, new: Quotas) -> Transaction:
    """The most slots of each namespace, from now on. `keys`: no job's in particular."""
    return put_if_unchanged(TxnKind.QUOTAS, store_keys.QUOTAS, known, new)


def set_claim(keys: JobKeys, known: Revisioned, claim: Claim) -> Transaction:
    """What the job claims from now on, if it has not ended."""
    return put_if_unchanged(TxnKind.CLAIM, keys.active, known, claim)
