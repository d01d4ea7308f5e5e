"""Every write to a job's records as one guarded etcd transaction; and the executor that runs transactions.

Each function takes stored records with their revisions and returns a `Transaction`: compares (revisions that keys must
still have; otherwise nothing is written), writes, and a nonce. `controllers.rules.decide` decides whether to run it. No
transaction relies on the assignment, an offer or a lease for safety: these are hints. Every transaction that writes a
plan compares `shares` (which slots each job has), so that no plan uses slots that were given back. A transaction that
gives slots back compares the plan, so that no newer plan uses them.

`TransactionExecutor.run` runs a transaction. A failed compare is an outcome (`STALE`: read again), not an exception.
After a timeout the executor reads head and the log to find out whether the write happened (`UNKNOWN` while that is
undecided). No transaction is applied twice.
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
    """A record and the store revision of its last write, which transactions compare."""

    record: R
    revision: int


class Revisioned(Protocol):
    """A stored value of which only the revision matters: a `Versioned` record, or an unreadable one."""

    @property
    def revision(self) -> int:
        """Store revision of the last write."""
        ...


class TxnKind(StrEnum):
    """Names of the transactions, as used in metrics and logs."""

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
    SETTINGS = "settings"
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
    """Outcome of a transaction.

    WON: written. STALE: a compare failed and nothing was written; read the records again. UNKNOWN: the store did not
    respond, and the write may or may not happen; read again later.
    """

    WON = "won"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TxnReport:
    """Outcome of a transaction, and the store revision at which it was decided (0: unknown)."""

    outcome: TxnOutcome
    revision: int
    why: str = field(default="", compare=False)
    """The store's error, if the outcome is UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Writes that the store applies together, if all compares hold.

    `nonce`: for a transaction that moves head, a unique value that it writes into head and the log entry.
    """

    kind: TxnKind
    compares: tuple[Compare, ...]
    writes: tuple[Put | Delete, ...]
    nonce: str = ""


class TransactionExecutor:
    """Runs transactions of one job, and finds out what became of those without a response."""

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._store = store
        self._keys = keys
        self.trouble = ""
        """Error of the last transaction if it had no response or the store refused it; else empty."""
        self.unanswered = 0
        """Number of transactions without a response so far."""

    async def run(self, txn: Transaction) -> TxnReport:
        """Run `txn` once, without retries.

        If the store does not respond, look for the transaction's nonce in the log. STALE also if the lease has ended.
        """
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
        """Find the outcome of a transaction without a response, from head and the log.

        Once a log entry with the number that `txn` writes exists, the outcome is final: WON if the entry has the nonce
        of `txn`; otherwise another transaction moved head, and the compare of `txn` can never hold. UNKNOWN for a
        transaction that does not move head.
        """
        unknown = TxnReport(TxnOutcome.UNKNOWN, 0)
        place = next((w.key for w in txn.writes if w.key.startswith(self._keys.log_prefix)), None)
        if not txn.nonce or place is None:
            # The next read shows the record itself; there is nothing to resolve.
            return unknown
        try:
            head = await self._store.get(self._keys.head)
            if head is None or self._keys.log(Head.decode(head.value, head.key).seq) < place:
                # It may still be applied later; its compare on head decides, and the next read shows it.
                return unknown
            entry = await self._store.get(place)
        except StoreUnavailable:
            return unknown
        if entry is None:  # moved to the run folder meanwhile
            return unknown
        won = LogEntry.decode(entry.value, entry.key).nonce == txn.nonce
        return TxnReport(TxnOutcome.WON if won else TxnOutcome.STALE, entry.mod_revision)


def put_if_unchanged(kind: TxnKind, key: str, old: Revisioned | None, new: Record, lease: int = 0) -> Transaction:
    """Write `new` under `key` in place of `old` (None: absent). Compares only this key. `lease` 0: no lease."""
    return Transaction(kind, (Compare(key, old.revision if old else 0),), (Put(key, new.encode(), lease=lease),))


DEPTH = 1
"""Maximum number of steps that are open at once. With 1, a step is sealed only after the previous step's commit."""


@dataclass(frozen=True, slots=True)
class OpenSlots:
    """Head and the stored seals of the steps after it (a step's key is its slot), with their revisions.

    `slots`: by step; a step without a seal is absent.
    """

    head: Versioned[Head]
    slots: Mapping[int, Versioned[Seal]]

    @property
    def seals(self) -> tuple[Seal, ...]:
        """The stored seals, in whatever state."""
        return tuple(slot.record for slot in self.slots.values())

    def compares(self, keys: JobKeys) -> tuple[Compare, ...]:
        """Compares that head and the seals of all steps that may be open, including absent ones, are unchanged."""
        steps = {self.head.record.step + i + 1 for i in range(DEPTH)} | set(self.slots)
        slots = tuple(
            Compare(keys.seal(step), self.slots[step].revision if step in self.slots else 0) for step in sorted(steps)
        )
        return (Compare(keys.head, self.head.revision), *slots)


def assign(keys: JobKeys, old: Versioned[Assignment] | None, new: Assignment) -> Transaction:
    """Write which controller generates for which shard. Compares only its own key."""
    return put_if_unchanged(TxnKind.ASSIGN, keys.assign, old, new)


def offer(keys: JobKeys, old: Revisioned | None, new: Offer, lease: int) -> Transaction:
    """Write a controller's own offer (its finished groups) under its lease. Fails if the lease has ended."""
    return put_if_unchanged(TxnKind.OFFER, keys.offer(new.incarnation), old, new, lease)


def join(keys: JobKeys, member: Member, lease: int) -> Transaction:
    """Add a controller to the job's members, under its lease. Compares that this incarnation has not joined before."""
    return put_if_unchanged(TxnKind.JOIN, keys.member(member.incarnation), None, member, lease)


def leave(keys: JobKeys, old: Versioned[Member], lease: int) -> Transaction:
    """Mark a member as leaving. Compares its key, so that a controller that is no member any more is not added."""
    leaving = old.record.model_copy(update={"leaving": True})
    return put_if_unchanged(TxnKind.LEAVE, keys.member(leaving.incarnation), old, leaving, lease)


def withdraw(keys: JobKeys, incarnation: str, node: str) -> Transaction:
    """Delete everything that a controller wrote under its lease about itself and its node in this job.

    The end of the lease has the same effect, but for all jobs. Compares nothing, because only this controller writes
    these keys.
    """
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
    sequence_parallel: int = 1,
    checkpoint: bool = False,
    near: Mapping[str, tuple[int, ...]] | None = None,
) -> Transaction:
    """Seal the next step (fix which groups form it), or one more part of it, for the ranks of `plan`. `by`: the writer.

    Other arguments: see `chain.seal_slot`. Compares head and all open seals. Raises ValueError if the step is not OPEN.
    """
    head = open_slots.head.record
    slot = open_slots.slots.get(head.step + 1)
    if slot is not None and slot.record.state is not SealState.OPEN:
        raise ValueError(f"step {head.step + 1} is already {slot.record.state}")
    record = chain.seal_slot(
        slot.record if slot else None,
        head,
        chosen,
        world_size=len(plan.ranks),
        mini_batches=mini_batches,
        sealer=by,
        sequence_parallel=sequence_parallel,
        attention_equals_at=attention_equals_at,
        checkpoint=checkpoint,
        near=near or {},
    )
    return Transaction(TxnKind.SEAL, open_slots.compares(keys), (Put(keys.seal(record.step), record.encode()),))


def reseal(keys: JobKeys, open_slots: OpenSlots, step: int, by: str) -> Transaction:
    """Give up the groups of a SEALED step, or the newest part of a PARTIAL one. READY parts stay.

    Compares head and the seals of all open steps. Raises ValueError for a seal in another state.
    """
    record = chain.reseal_slot(open_slots.slots[step].record, by)
    return Transaction(TxnKind.RESEAL, open_slots.compares(keys), (Put(keys.seal(step), record.encode()),))


def ready(keys: JobKeys, open_slots: OpenSlots, step: int) -> Transaction:
    """Mark a sealed step, or its newest part, as READY: every rank holds its share. Compares head and the seal."""
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
    """Commit the READY step: move head to it, write its log entry, and delete its seal. Compares head and the seal.

    `keep_cursors`, `stats`: see `chain.commit_entry`.
    """
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
    """Record outcomes without a training step (`chain.account_entry`).

    Compares head and the seals of all open steps, so that no seal contains these outcomes meanwhile.
    """
    return Transaction(TxnKind.ACCOUNT, open_slots.compares(keys), _advance(keys, advance), nonce=advance.head.nonce)


def register(
    keys: JobKeys,
    head: Versioned[Head],
    old: Versioned[Checkpoints],
    entry: Versioned[LogEntry],
    checkpoint: Checkpoint,
) -> Transaction:
    """Register a checkpoint that is complete on disk. Compares head, the checkpoints and the checkpoint's log entry."""
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
    """Unregister all checkpoints except `kept`. The caller deletes their files only after the outcome is WON."""
    record = old.record.model_copy(update={"entries": tuple(kept)})
    return Transaction(
        TxnKind.RETAIN,
        (Compare(keys.head, head.revision), Compare(keys.checkpoints, old.revision)),
        (Put(keys.checkpoints, record.encode()),),
    )


def warn(keys: JobKeys, old: Revisioned | None, trouble: Trouble) -> Transaction:
    """Write a warning in place of the previous one of the same topic."""
    return put_if_unchanged(TxnKind.WARN, keys.trouble(trouble.topic), old, trouble)


MOST_PRUNED = 100
"""Maximum number of log entries that one `prune` deletes: the store allows 128 operations per transaction."""


def prune(keys: JobKeys, head: Versioned[Head], known: Versioned[Checkpoints], seqs: Sequence[int]) -> Transaction:
    """Delete log entries from the store; they must be in the run folder already.

    Compares head and the checkpoints, from which `chain.prunable_entries` selected them. Raises ValueError for more
    than `MOST_PRUNED`.
    """
    if len(seqs) > MOST_PRUNED:
        raise ValueError(f"{len(seqs)} entries exceed the maximum of {MOST_PRUNED} per prune")
    return Transaction(
        TxnKind.PRUNE,
        (Compare(keys.head, head.revision), Compare(keys.checkpoints, known.revision)),
        tuple(Delete(keys.log(seq)) for seq in seqs),
    )


def delete_job(keys: JobKeys, head: Versioned[Head], status: Versioned[JobStatus]) -> Transaction:
    """First of two transactions that delete an ended job: mark head as deleted.

    After this, transactions that controllers prepared before fail, and the job cannot be continued. Raises ValueError
    if the job has not ended.
    """
    if not status.record.phase.ended:
        raise ValueError(f"the job is {status.record.phase}; only an ended job can be deleted")
    record = head.record.model_copy(update={"deleted": True})
    compares = (Compare(keys.head, head.revision), Compare(keys.state, status.revision))
    return Transaction(TxnKind.DELETE, compares, (Put(keys.head, record.encode()),))


def delete_rest(
    keys: JobKeys, head: Versioned[Head] | None, status: Versioned[JobStatus], named: Mapping[str, int]
) -> Transaction:
    """Second of two transactions that delete an ended job: delete all of its keys.

    `head`: must be marked as deleted; None for a job that ended before it had a head, which never gets one. `named`:
    revisions of further keys that lead to the job (its name, its request id). Raises ValueError if head is not marked,
    or if the job has not ended.
    """
    if head is not None and not head.record.deleted:
        raise ValueError("head is not marked as deleted; mark it first")
    if not status.record.phase.ended:
        raise ValueError(f"the job is {status.record.phase}; only an ended job can be deleted")
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
    """Restart training in a new lineage with the train world in `plan`.

    `advance`: from `chain.rollback_entry` (from a checkpoint) or `chain.reform_entry` (from in-memory replicas).
    Deletes the seals of all open steps, even READY ones: the discarded world may have trained a part of them.
    `slots_as_seen`: also compare these seals, so that no step that became READY meanwhile is given up. Raises
    ValueError if `plan` and `advance` name different worlds.
    """
    if plan.world != advance.head.world:
        raise ValueError(f"the plan places world {plan.world}, but the rollback names world {advance.head.world}")
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
    """Create a job: its record, its state, its claim on slots, and the keys for its name and its request ID.

    `name_revision`: revision of the key of the job's name (0: absent). A repeated request with the same request ID
    fails here and finds the existing job.
    """
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
    """Start a PENDING job: write head, the first log entry, the base checkpoint, the first plan and the new state.

    `moves`: the reasons for the plan; None if the job's placement cannot change.
    """
    base = Checkpoint(lineage=0, step=0, seq=0, file="")
    moves_write = () if moves is None else (Put(keys.moves, moves.encode()),)
    return Transaction(
        TxnKind.START,
        (Compare(keys.state, status.revision), Compare(keys.head, 0)),
        (
            *_advance(keys, advance),
            Put(keys.checkpoints, Checkpoints(entries=(base,)).encode()),
            Put(keys.plan, plan.encode()),
            *moves_write,
            Put(keys.state, running.encode()),
        ),
        nonce=advance.head.nonce,
    )


@dataclass(frozen=True, slots=True)
class StoredJob:
    """Records of a job that has started, with which changes of its spec are compared. `named`: revision of the key that
    maps its name to this job.
    """

    job: Versioned[JobRecord]
    status: Versioned[JobStatus]
    head: Versioned[Head]
    checkpoints: Versioned[Checkpoints]
    plan: Versioned[Plan]
    named: int

    def compares(self, keys: JobKeys) -> tuple[Compare, ...]:
        """Compare all of them."""
        return (
            Compare(keys.state, self.status.revision),
            Compare(keys.job, self.job.revision),
            Compare(keys.head, self.head.revision),
            Compare(keys.checkpoints, self.checkpoints.revision),
            Compare(keys.plan, self.plan.revision),
            Compare(store_keys.name(self.job.record.name, self.job.record.namespace), self.named),
        )

    def suspended_plan(self, advance: chain.Advance) -> Plan:
        """The next plan, which places nothing until the job has slots."""
        number, world, why = self.plan.record.generation + 1, advance.head.world, advance.entry.reason
        return Plan(generation=number, world=world, ranks=(), engines=(), reason=why, stands_still=True)


def extend(keys: JobKeys, ended: StoredJob, advance: chain.Advance, claim: Claim) -> Transaction:
    """Continue a job in phase SUCCEEDED to a higher goal. This is the only way out of a final phase.

    `advance`: rollback to a checkpoint with `raised` set, from `chain.rollback_entry`. `claim`: the slots that the job
    requests. The plan places nothing until the job has slots. Deletes the members, offers and other hints of its
    controllers: they join again, and no earlier offer counts. Raises ValueError if the job did not succeed, is being
    deleted, or has no higher goal.
    """
    raised = advance.entry.raised
    if ended.status.record.phase is not JobPhase.SUCCEEDED or raised is None or raised.after <= raised.before:
        raise ValueError("only a job in phase SUCCEEDED can continue, and only to a higher goal")
    if ended.head.record.deleted:
        raise ValueError("the job is being deleted and cannot continue")
    job = ended.job.record.with_goal(raised.what, raised.after)
    running = JobStatus(phase=JobPhase.RUNNING, reason=advance.entry.reason, changed=claim.created)
    hints = (keys.member_prefix, keys.offer_prefix, keys.part_prefix, keys.copies_prefix, keys.folder_prefix)
    return Transaction(
        TxnKind.EXTEND,
        ended.compares(keys),
        (
            *_advance(keys, advance),
            Put(keys.job, job.encode()),
            Put(keys.state, running.encode()),
            Put(keys.plan, ended.suspended_plan(advance).encode()),
            Put(keys.active, claim.encode()),
            *(Delete(prefix, prefix=True) for prefix in (keys.seal_prefix, *hints)),
        ),
        nonce=advance.head.nonce,
    )


def change_settings(keys: JobKeys, job: StoredJob, advance: chain.Advance, changed: JobRecord) -> Transaction:
    """Give an unfinished job other settings of how its steps are computed, and suspend it at a checkpoint.

    `advance`: rollback to the checkpoint, from `chain.rollback_entry`. `changed`: the new record. The job resumes with
    its slots. A controller receives the new settings together with the end of the old world, so that all ranks of the
    next one have them. Raises ValueError if the job has ended or is being deleted, or if more would change.
    """
    if job.status.record.phase.ended or job.head.record.deleted:
        raise ValueError("only an unfinished job can change its settings")
    if chain.job_digest(changed) != chain.job_digest(job.job.record):
        raise ValueError("an unfinished job can only change settings that its digest excludes")
    return Transaction(
        TxnKind.SETTINGS,
        job.compares(keys),
        (
            *_advance(keys, advance),
            Put(keys.job, changed.encode()),
            Put(keys.plan, job.suspended_plan(advance).encode()),
            Delete(keys.seal_prefix, prefix=True),
        ),
        nonce=advance.head.nonce,
    )


def set_status(keys: JobKeys, old: Versioned[JobStatus], new: JobStatus, open_slots: OpenSlots | None) -> Transaction:
    """Write the job's new phase; a final phase also ends its claim on slots.

    `open_slots`: if given, also compare head and the seals of open steps. Raises ValueError if the old phase is final
    (only `extend` leaves it) or the new one is PENDING.
    """
    if old.record.phase.ended or new.phase is JobPhase.PENDING:
        raise ValueError(f"a job cannot change from {old.record.phase} to {new.phase}")
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
    """End a job whose central records are lost, as FAILED, and delete its claim on slots.

    Compares that state and claim are unchanged and that the keys in `lost` are still absent. Raises ValueError if the
    job has ended already or `lost` is empty.
    """
    seen = dict.fromkeys(lost, 0) | {
        keys.state: status.revision if status is not None else 0,
        keys.active: claim.revision if claim is not None else 0,
    }
    if not lost or failed.phase is not JobPhase.FAILED or (status is not None and status.record.phase.ended):
        raise ValueError("only a job that has not ended can fail because of lost records")
    compares = tuple(Compare(key, revision) for key, revision in seen.items())
    return Transaction(TxnKind.STATUS, compares, (Put(keys.state, failed.encode()), Delete(keys.active)))


def take_stock(keys: JobKeys, old: Revisioned | None, new: NodeCopies, lease: int) -> Transaction:
    """Write which in-memory replicas of train states a node holds, under its controller's lease.

    A hint; compares only its own key.
    """
    return put_if_unchanged(TxnKind.STOCK, keys.copies(new.node), old, new, lease)


def say_folder(keys: JobKeys, old: Revisioned | None, new: NodeFolder, lease: int) -> Transaction:
    """Write the content of a node's own run folder, under its controller's lease. Compares only its own key."""
    return put_if_unchanged(TxnKind.FOLDER, keys.folder(new.node), old, new, lease)


def replan(keys: JobKeys, old: Versioned[Plan], new: Plan) -> Transaction:
    """Change which slots run engines. Compares only the plan. Raises ValueError if the train world would change."""
    if new.world != old.record.world or new.ranks != old.record.ranks:
        raise ValueError("only a rollback can change the train world")
    return put_if_unchanged(TxnKind.REPLAN, keys.plan, old, new)


def lead(keys: JobKeys, old: Revisioned | None, new: Leader, lease: int) -> Transaction:
    """Make a controller the planner of the job's placement, under its own lease.

    `old`: the previous leader, which no longer works on the job; None: there is none.
    """
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
    """Change which slots serve which pool, and record the reasons in `moves`.

    `known`: revision of the record that `moves` replaces. Compares it, the plan, the leader and the pin (what a person
    fixed): of two controllers that both believe they lead, only one wins, and a newer pin is respected. Raises
    ValueError if the train world would change (only a rollback does that), or if the plan's generation is not the next.
    """
    if new.world != old.record.world or new.ranks != old.record.ranks:
        raise ValueError("only a rollback can change the train world")
    if new.generation != old.record.generation + 1:
        raise ValueError(f"the plan has generation {new.generation}; expected {old.record.generation + 1}")
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
    """Write the record of placement changes without changing the plan: wanted changes, results, why nothing moved.

    `known`: revision of the record that `moves` replaces. Compares it and the leader.
    """
    return Transaction(TxnKind.MOVES, _led(keys, leader, known), (Put(keys.moves, moves.encode()),))


def _led(keys: JobKeys, leader: Versioned[Leader], known: int) -> tuple[Compare, Compare]:
    return Compare(keys.leader, leader.revision), Compare(keys.moves, known)


def pin(keys: JobKeys, old: Revisioned | None, new: Pin) -> Transaction:
    """Write what a person fixed of the job's placement. Compares only its own key."""
    return put_if_unchanged(TxnKind.PIN, keys.pin, old, new)


def begin_epoch(
    keys: JobKeys,
    head: Versioned[Head],
    checkpoints: Versioned[Checkpoints],
    old: Versioned[EpochRecord] | None,
    record: EpochRecord,
    forgotten: Sequence[int],
) -> Transaction:
    """Begin a data epoch: write the record with its statistics.

    `old`: an invalid record of this epoch from a discarded branch, if it still exists. `forgotten`: epochs whose
    records are deleted (`gcore.ledger.statistics.superfluous_epochs`). Compares the epoch's record, so that only one
    controller begins the epoch; head, from which the statistics come; and the checkpoints, which determine `forgotten`.
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
"""Maximum number of jobs that one `share_out` removes: the store allows 128 operations per transaction."""


def share_out(keys: JobKeys, known: Versioned[Shares] | None, new: Shares) -> Transaction:
    """Write which slots each job has. `keys` is not used.

    Other jobs may get the slots of a removed job at once. So the transaction compares that each removed job has no
    claim: without this, a controller whose view of the claims is outdated could remove a job that was just created, or
    that continues after its end. If more than `MOST_DROPPED` jobs are to be removed, only these removals are written.
    """
    before = {} if known is None else known.record.jobs
    dropped = sorted(uid for uid, share in before.items() if share.held and uid not in new.jobs)
    if len(dropped) > MOST_DROPPED:
        new = Shares(jobs={uid: share for uid, share in before.items() if uid not in dropped[:MOST_DROPPED]})
    txn = put_if_unchanged(TxnKind.SHARE, store_keys.SHARES, known, new)
    absent = tuple(Compare(JobKeys(uid).active, 0) for uid in dropped[:MOST_DROPPED])
    return replace(txn, compares=(*txn.compares, *absent))


def keeping_to(share: KnownShare | None, txn: Transaction) -> Transaction:
    """Return `txn` with a compare that the shares of slots are unchanged since its plan was made.

    `share` None: the job does not share its slots with others, and `txn` is returned unchanged.
    """
    if share is None:
        return txn
    return replace(txn, compares=(*txn.compares, Compare(store_keys.SHARES, share.revision)))


def give_back(keys: JobKeys, plan: Versioned[Plan] | None, share: KnownShare, slots: frozenset[Slot]) -> Transaction:
    """Give back slots that the job no longer uses. Compares the shares and the job's plan (None: absent)."""
    return Transaction(
        TxnKind.GIVE_BACK,
        (Compare(store_keys.SHARES, share.revision), Compare(keys.plan, plan.revision if plan else 0)),
        (Put(store_keys.SHARES, share.shares.released(share.uid, slots).encode()),),
    )


def set_quotas(keys: JobKeys, known: Revisioned | None, new: Quotas) -> Transaction:
    """Write the maximum number of slots of each namespace. `keys` is not used."""
    return put_if_unchanged(TxnKind.QUOTAS, store_keys.QUOTAS, known, new)


def set_claim(keys: JobKeys, known: Revisioned, claim: Claim) -> Transaction:
    """Write the job's claim on slots. Compares the known claim, which is deleted when the job ends."""
    return put_if_unchanged(TxnKind.CLAIM, keys.active, known, claim)
