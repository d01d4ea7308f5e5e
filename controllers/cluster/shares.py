"""Writes the division of the cluster's slots between the jobs (the shares), and changes claims of jobs.

`placement.shares` computes the shares. When its input changes, one daemon writes the new shares, by a transaction that
compares the old ones; if it does not, another does so shortly after. It is safe that any daemon may write with an
outdated view, because one record contains the slots of all jobs, and no slot is granted that another job may still use.

If a node is absent, its jobs keep their slots there and get no others for `NODE_GRACE_S`, the time for which a train
world waits for it. So a restart of a daemon moves nothing.

`change_claim` changes a job's claim on slots as a user may: its priority, its limits, whether it is paused.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from controllers.changes import ChangeSignal
from controllers.cluster.mirror import ClusterMirror
from controllers.rules.view import Memo, Timers, turn_of
from controllers.rules.world import NODE_GRACE_S
from gcore.errors import StoreUnavailable
from gcore.ledger import transactions as share_transactions
from gcore.ledger.records.cluster import Claim, Shares
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.store.keys import JobKeys
from gcore.store.types import Store
from gcore.system.clock import Clock
from placement.shares import divide_slots

log = logging.getLogger(__name__)
LOOK_AGAIN_S = 1.0


class ShareWriter:
    """Writes the shares when they change. Runs in every daemon."""

    def __init__(self, node: str, store: Store, cluster: ClusterMirror, changes: ChangeSignal, clock: Clock) -> None:
        self._node = node
        self._store = store
        self._cluster = cluster
        self._changes = changes
        self._clock = clock
        self._remembered = Memo()
        self._waits = Timers({})
        self._missed: dict[str, float] = {}
        """Absent nodes on which jobs have slots, and since when they are absent."""
        self._absent: frozenset[str] = frozenset()
        """Those of them that are absent for less than `NODE_GRACE_S`."""

    async def run(self) -> None:
        """Write the shares when they change and it is this daemon's turn; never returns."""
        while True:
            wanted = self._wanted()
            if wanted is None:
                since = min((self._missed[node] for node in self._absent), default=None)
                left = None if since is None else max(0.01, since + NODE_GRACE_S - self._clock.monotonic())
                await self._changes.wait(left)
                continue
            known, shares = wanted
            now = self._clock.monotonic()
            topic = f"shares {known.revision}"
            self._waits = self._waits.note([topic], now)
            mine = turn_of(self._cluster.nodes, self._node, topic)
            if not self._waits.ripe(topic, mine, now):
                await self._changes.wait(max(self._waits.since[topic] + Timers.wait(mine, 0.0) - now, 0.01))
                continue
            with contextlib.suppress(StoreUnavailable):
                # No job's keys, because the record concerns all jobs.
                nobodys = JobKeys("")
                txn = share_transactions.share_out(nobodys, known, shares)
                report = await TransactionExecutor(self._store, nobodys).run(txn)
                log.info("writing the shares of slots: %s", report.outcome)
                if report.outcome is TxnOutcome.WON:
                    await self._await_notification(known)
                    continue
            await self._changes.wait(LOOK_AGAIN_S)

    async def _await_notification(self, before: Versioned[Shares]) -> None:
        """Wait until the watch shows the written shares, because a transaction that is based on the old ones would
        fail."""
        end = self._clock.monotonic() + LOOK_AGAIN_S
        while self._cluster.shares is before and self._clock.monotonic() < end:
            await self._changes.wait(LOOK_AGAIN_S)

    def _wanted(self) -> tuple[Versioned[Shares], Shares] | None:
        """The stored and the new shares; None if they are equal."""
        cluster = self._cluster
        if not cluster.is_complete or cluster.shares is None:
            return None
        there, claims, shares = cluster.there, cluster.claims, cluster.shares
        absent = self._absent_nodes(there.nodes, shares.record)
        found = self._remembered.get(
            "wanted",
            (there, claims, shares, absent),
            lambda: divide_slots(replace(there, absent=absent), claims, shares.record),
        )
        return None if found is cluster.shares.record else (cluster.shares, found)

    def _absent_nodes(self, there: Collection[str], shares: Shares) -> frozenset[str]:
        """The absent nodes whose slots stay with their jobs: those that have been absent for less than `NODE_GRACE_S`
        and on which jobs have slots. `there`: the present nodes. Returns the same object while they are the same."""
        now = self._clock.monotonic()
        used = {node for share in shares.jobs.values() for node in share.granted}
        missed = used - set(there) - self._cluster.drained
        self._missed = {node: self._missed.get(node, now) for node in missed}
        absent = frozenset(node for node, since in self._missed.items() if now - since < NODE_GRACE_S)
        self._absent = self._absent if self._absent == absent else absent
        return self._absent


async def change_claim(store: Store, uid: str, change: Callable[[Claim], Claim]) -> Claim | None:
    """Change a job's claim on slots: call `change` with the present claim and write its result. If another writer was
    faster, repeat this. Return the new claim; None: the job has ended or does not exist.

    Raises StoreUnavailable, also if it is unknown whether the claim was written; and the errors of `change`.
    """
    keys = JobKeys(uid)
    while True:
        known = await store.get(keys.active)
        if known is None:
            return None
        claim = Claim.decode(known.value, known.key)
        new = change(claim)
        if new == claim:
            return claim
        txn = share_transactions.set_claim(keys, Versioned(claim, known.mod_revision), new)
        report = await TransactionExecutor(store, keys).run(txn)
        if report.outcome is TxnOutcome.WON:
            return new
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(
                f"it is unknown whether the job's claim was changed ({report.why})", fix="Retry the request"
            )
