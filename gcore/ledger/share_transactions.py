"""The transactions by which slots are shared out, and a job keeps to its share and gives slots back. Pure.

What is compared here and why: `shares`, by whoever writes a plan, so that no plan is made of slots that were given back meanwhile; and
the plan, by whoever gives slots back, so that none is given back that a newer plan uses.
"""

from __future__ import annotations

from dataclasses import replace

from gcore.ledger.claims import Claim, KnownShare, Quotas, Shares, Slot
from gcore.ledger.guarded import Stored, Transaction, TxnKind, Written
from gcore.ledger.job import Plan
from gcore.store import keys as store_keys
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Put


def share_out(keys: JobKeys, known: Written | None, new: Shares) -> Transaction:
    """Which slots each job has from now on. `keys`: no job's in particular."""
    return Transaction(
        TxnKind.SHARE,
        (Compare(store_keys.SHARES, known.revision if known else 0),),
        (Put(store_keys.SHARES, new.encode()),),
    )


def keeping_to(share: KnownShare | None, txn: Transaction) -> Transaction:
    """The same, only if the job still has the slots from which its plan was made. None: nobody shares anything out."""
    if share is None:
        return txn
    return replace(txn, compares=(*txn.compares, Compare(store_keys.SHARES, share.revision)))


def give_back(keys: JobKeys, plan: Stored[Plan] | None, share: KnownShare, slots: frozenset[Slot]) -> Transaction:
    """The job uses these no more. Compares its plan, absent too."""
    return Transaction(
        TxnKind.GIVE_BACK,
        (Compare(store_keys.SHARES, share.revision), Compare(keys.plan, plan.revision if plan else 0)),
        (Put(store_keys.SHARES, share.shares.released(share.uid, slots).encode()),),
    )


def set_quotas(keys: JobKeys, known: Written | None, new: Quotas) -> Transaction:
    """The most slots of each namespace, from now on. `keys`: no job's in particular."""
    return Transaction(
        TxnKind.QUOTAS,
        (Compare(store_keys.QUOTAS, known.revision if known else 0),),
        (Put(store_keys.QUOTAS, new.encode()),),
    )


def set_claim(keys: JobKeys, known: Written, claim: Claim) -> Transaction:
    """What the job claims from now on, if it has not ended."""
    return Transaction(TxnKind.CLAIM, (Compare(keys.active, known.revision),), (Put(keys.active, claim.encode()),))
