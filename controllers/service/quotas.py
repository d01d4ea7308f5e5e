"""The verbs of the Jobs service about quotas: the most slots that the jobs of a namespace may have together.

A quota is a record of its own, which the daemons share the slots out by (`placement.shares`). Lowered, it takes slots back as any
other claim does: at the jobs' next commits. Nothing here moves a slot.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter

from controllers.service.access import may_see
from controllers.service.desk import JobsDesk
from controllers.service.refusals import bad_field
from controllers.service.statuses import Context, edge
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.scheduling import MOST_SLOTS, NAMESPACE
from gcore.errors import StoreUnavailable
from gcore.ledger import share_transactions
from gcore.ledger.claims import Claim, Share, Shares, slots_of
from gcore.ledger.claims import Quotas as QuotasRecord
from gcore.ledger.guarded import Ledger, Stored, TxnOutcome
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Store

MOST_NAMESPACES = 1_000
"""With a quota: they stand in one record."""


class QuotaVerbs(JobsDesk):
    """Tells and sets them."""

    @edge
    async def GetQuotas(self, request: pb.GetQuotasRequest, context: Context) -> pb.Quotas:
        """Those of the namespaces that the caller may see."""
        return await told(self._jobs.store)

    @edge
    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.Quotas:
        """One namespace's."""
        if re.fullmatch(NAMESPACE, request.namespace) is None:
            raise bad_field(
                "namespace", f"{request.namespace[:80]!r} is no namespace", "Use lower-case letters, digits and '-'"
            )
        if request.slots > MOST_SLOTS:
            raise bad_field("slots", f"{request.slots} is more than {MOST_SLOTS}", "Take the quota away for no limit")
        await set_quota(self._jobs.store, request.namespace, request.slots if request.HasField("slots") else None)
        return await told(self._jobs.store)


async def set_quota(store: Store, namespace: str, slots: int | None) -> None:
    """Set it, however often somebody else changes another meanwhile. Raises StoreUnavailable, BadFields."""
    while True:
        kv = await store.get(keys.QUOTAS)
        try:
            before = QuotasRecord() if kv is None else QuotasRecord.decode(kv.value, kv.key)
        except UnreadableRecord:
            before = QuotasRecord()  # as the daemons take it; it is written anew
        others = {name: count for name, count in before.slots.items() if name != namespace}
        after = QuotasRecord(slots=others if slots is None else dict(sorted({**others, namespace: slots}.items())))
        if len(after.slots) > MOST_NAMESPACES:
            raise bad_field("namespace", f"{MOST_NAMESPACES} namespaces have a quota", "Take another's away first")
        known = None if kv is None else Stored(before, kv.mod_revision)
        nobodys = JobKeys("")
        report = await Ledger(store, nobodys).run(share_transactions.set_quotas(nobodys, known, after))
        if report.outcome is TxnOutcome.WON:
            return
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"whether the quota was set is not known ({report.why})", fix="Set it again")


async def told(store: Store) -> pb.Quotas:
    """All that the caller may see. What this version cannot read counts as if it were not there."""
    quota = await store.get(keys.QUOTAS)
    shares = await store.get(keys.SHARES)
    limits, jobs, used = dict[str, int](), Counter[str](), Counter[str]()
    held = dict[str, Share]()
    with contextlib.suppress(UnreadableRecord):
        limits = {} if quota is None else dict(QuotasRecord.decode(quota.value, quota.key).slots)
    with contextlib.suppress(UnreadableRecord):
        held = {} if shares is None else Shares.decode(shares.value, shares.key).jobs
    for kv in (await store.list(keys.ACTIVE)).kvs:
        try:
            namespace = Claim.read(kv.value, kv.key).namespace
        except UnreadableRecord:
            namespace = Claim().namespace
        jobs[namespace] += 1
        uid = kv.key.removeprefix(keys.ACTIVE)
        if uid in held:
            used[namespace] += len(slots_of(held[uid].held))
    names = sorted(name for name in limits.keys() | jobs.keys() if may_see(name))
    return pb.Quotas(
        quotas=[pb.Quota(namespace=name, slots=limits.get(name), used=used[name], jobs=jobs[name]) for name in names]
    )
