"""A guarded transaction on a job's records: what it is, how it is made, and what became of it.

`Ledger.run` makes it and says what came of it. A lost compare is an outcome (`STALE`: look again), not an exception; an
answer that never came is resolved by reading head and the chain (`UNKNOWN` only while that does not tell). Nothing is
made twice here. Which transactions there are is `gcore.ledger.transactions`' business.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.fault_points import point
from gcore.ledger.records import Head, LogEntry
from gcore.schema import Record
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, Store

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record and the revision of its last write."""

    record: R
    revision: int


class Written(Protocol):
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


class Ledger:
    """Makes transactions against the store, and finds out what became of those without an answer."""

    def __init__(self, store: Store, keys: JobKeys) -> None:
        self._store = store
        self._keys = keys

    async def run(self, txn: Transaction) -> TxnReport:
        """Make `txn` once. Never repeats it: after an unknown answer it reads, and compares seq and nonce."""
        try:
            point(txn.kind, "before")
            result = await self._store.transact(txn.compares, txn.writes)
            point(txn.kind, "after")
        except LeaseLost:
            return TxnReport(TxnOutcome.STALE, 0)
        except StoreUnavailable as error:
            report = await self._find_out(txn)
            return replace(report, why=str(error)) if report.outcome is TxnOutcome.UNKNOWN else report
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
