"""A guarded transaction on a job's records: what it is, how it is made, and what became of it.

`Ledger.run` makes it and says what came of it. A lost compare is an outcome (`STALE`: look again), not an exception; an
answer that never came is resolved by reading head again (`UNKNOWN` only when that cannot be done either). Nothing is
made twice here. Which transactions there are is `gcore.ledger.transactions`' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.ledger.records import Head, Record
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, Store

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Stored(Generic[R]):
    """A record and the revision of its last write."""

    record: R
    revision: int


class TxnKind(StrEnum):
    """Names of the transactions, as metrics and logs show them."""

    CREATE = "create"
    START = "start"
    JOIN = "join"
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
    EPOCH = "epoch"
    GIVE = "give"
    AGREE = "agree"
    EVAL_PART = "eval_part"
    EVALUATE = "evaluate"


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
        """Make `txn` once. Never repeats it: after an unknown answer it reads head and compares the nonce."""
        try:
            result = await self._store.transact(txn.compares, txn.writes)
        except LeaseLost:
            return TxnReport(TxnOutcome.STALE, 0)
        except StoreUnavailable:
            return await self._find_out(txn)
        return TxnReport(TxnOutcome.WON if result.won else TxnOutcome.STALE, result.revision)

    async def _find_out(self, txn: Transaction) -> TxnReport:
        if not txn.nonce:
            # Whoever looks again sees the record itself; there is nothing to be resolved.
            return TxnReport(TxnOutcome.UNKNOWN, 0)
        try:
            kv = await self._store.get(self._keys.head)
        except StoreUnavailable:
            return TxnReport(TxnOutcome.UNKNOWN, 0)
        if kv is not None and Head.decode(kv.value, kv.key).nonce == txn.nonce:
            return TxnReport(TxnOutcome.WON, kv.mod_revision)
        # It may still be made later; its compare on head decides that, and whoever looks again sees it.
        return TxnReport(TxnOutcome.UNKNOWN, 0)
