"""The Jobs service's RPCs about the cluster: nodes, draining, usage and quotas.

A quota is a record that daemons apply when they divide slots between jobs (`placement.shares`). After a quota is lowered, jobs give slots
back at their next commits. This module never moves a slot itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from controllers.accounting.usage import read_usage
from controllers.api.edge.access import current_caller, may_see
from controllers.api.edge.errors import (
    BadFields,
    CallContext,
    NamespaceNotFound,
    NodeNotFound,
    bad_field,
    handle_errors,
)
from controllers.api.job_messages import JobsServiceBase, slot_users
from controllers.api.store_reader import ClusterListing, check_namespace
from gcore.api.rpc import Violation
from gcore.api.v1 import jobs_pb2 as pb
from gcore.config.base import MOST_SLOTS, NAMESPACE
from gcore.errors import StoreUnavailable, did_you_mean
from gcore.ledger import transactions
from gcore.ledger.records.cluster import Claim, Drained, Share, Shares, SickSlots, slots_of_share
from gcore.ledger.records.cluster import Quotas as QuotasRecord
from gcore.ledger.transactions import TransactionExecutor, TxnOutcome, Versioned
from gcore.ledger.usage import DAY_S, DIMENSIONS, NodeUsage, UsageSums
from gcore.schema import UnreadableRecord
from gcore.store import keys
from gcore.store.keys import JobKeys
from gcore.store.types import Compare, Delete, Put, Store

LONGEST_NODE = 64

LAST = 10.0**11
"""The latest time that a request may name, in seconds since the epoch."""

MOST_NAMESPACES = 1_000
"""Maximum number of namespaces with a quota: all quotas are in one record."""


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A parsed usage request. `first_day` and `last_day`: the days since the epoch, both included. `by`: the dimensions
    by which usage is summed. `namespace` empty: all namespaces that the caller may see."""

    first_day: int
    last_day: int
    by: tuple[str, ...]
    namespace: str

    def has(self, usage: NodeUsage) -> bool:
        """Whether a usage record is part of the answer."""
        is_then = self.first_day <= usage.day <= self.last_day
        return is_then and may_see(usage.namespace) and self.namespace in ("", usage.namespace)


def parse_usage_query(request: pb.GetUsageRequest, now: float) -> UsageQuery:
    """Parse a usage request. Raises BadFields."""
    wrong = []
    for name in ("since", "until"):
        if not 0 <= getattr(request, name) <= LAST:  # false for NaN too
            wrong.append(Violation(name, "is not a time in seconds since the epoch"))
    unknown = [one for one in request.by if one not in DIMENSIONS]
    if unknown:
        near = did_you_mean(unknown[0], DIMENSIONS)
        wrong.append(Violation("by", f"{unknown[0][:40]!r} is not one of {', '.join(DIMENSIONS)}{near}"))
    if not wrong and request.until and request.until < request.since:
        wrong.append(Violation("until", "is before since"))
    if wrong:
        raise BadFields(wrong)
    first, last = int(request.since // DAY_S), int((request.until or now) // DAY_S)
    return UsageQuery(first, last, tuple(request.by) or ("namespace",), request.namespace)


def usage_reply(sums: UsageSums) -> pb.GetUsageReply:
    """Convert summed usage to the response."""
    reply = pb.GetUsageReply()
    for named, seconds in sums.ranked():
        reply.usages.add(by=named, slot_seconds=seconds.slot_s, busy_seconds=seconds.busy_s)
    return reply


class FleetMethods(JobsServiceBase):
    """Implements the RPCs of Jobs that list and drain nodes and report usage."""

    @functools.cached_property
    def _one_sum(self) -> asyncio.Lock:
        """The lock that lets only one usage request at a time read the store."""
        return asyncio.Lock()

    @handle_errors
    async def GetUsage(self, request: pb.GetUsageRequest, context: CallContext) -> pb.GetUsageReply:
        """Return slot-seconds for whole UTC days, from the day of `since` to the day of `until`."""
        asked = parse_usage_query(request, self._clock.wall())
        sums = UsageSums(asked.by)
        async with aclosing(self._used(asked.first_day, asked.last_day)) as pages:
            async for usages in pages:
                for usage in filter(asked.has, usages):
                    sums.add(usage)
        reply = usage_reply(sums)
        if request.namespace and not reply.usages:
            await self._check_namespace(request.namespace)
        return reply

    async def _used(self, first_day: int, last_day: int) -> AsyncGenerator[Sequence[NodeUsage], None]:
        async with self._one_sum, aclosing(read_usage(self._jobs.store, first_day, last_day)) as pages:
            async for usages in pages:
                yield usages

    async def _check_namespace(self, namespace: str) -> None:
        """Raise NamespaceNotFound if the namespace is unknown. Searches the usage of all days only if no other record names it."""
        try:
            await check_namespace(self._jobs.store, namespace)
        except NamespaceNotFound:
            if current_caller().namespaces is not None:
                raise
            async with aclosing(self._used(0, keys.LAST_DAY)) as pages:
                used = {one.namespace async for usages in pages for one in usages}
            await check_namespace(self._jobs.store, namespace, used)

    async def _nodes(self, listing: ClusterListing, namespaces: Mapping[str, str]) -> list[pb.Node]:
        """The registered nodes, with the jobs that use their slots."""
        (drained, sick), shares = await self._jobs.pool(), await self._jobs.shares()
        uses = slot_users(shares or Shares(), namespaces, may_see)
        found = []
        for n in listing.nodes:
            node = pb.Node(name=n.name, incarnation=n.incarnation, address=n.address, pid=n.pid, slots=n.slots)
            node.draining = n.name in drained
            node.sick.extend(f"{slot}: {why}" for slot, why in sick.get(n.name, SickSlots()).slots.items())
            for slot, uid in sorted(uses.get(n.name, {}).items()):
                node.uses.add(slot=slot, job_uid=uid)
            found.append(node)
        return found

    @handle_errors
    async def DrainNode(self, request: pb.DrainNodeRequest, context: CallContext) -> pb.Node:
        """Drain a node, or undo it. The mark stays in the store even if the node's daemon is not running."""
        name = request.node
        if not name or len(name) > LONGEST_NODE:
            raise bad_field("node", "is empty" if not name else f"is longer than {LONGEST_NODE} characters")
        listing, key = await self._jobs.cluster(), keys.drained_node(name)
        known = await self._jobs.store.get(key)
        if known is None and name not in {node.name for node in listing.nodes} and not await self._has_slots(name):
            raise NodeNotFound(f"there is no node {name!r}", fix="`gcore nodes` lists the nodes")
        if request.undo and known is not None:
            await self._jobs.store.transact((), (Delete(key),))
        elif not request.undo and known is None:
            mark = Drained(by=current_caller().name, since=self._clock.wall())
            await self._jobs.store.transact((Compare(key, 0),), (Put(key, mark.encode()),))
        namespaces = {uid: claim.namespace for uid, claim in (await self._jobs.claims()).items()}
        there = {node.name: node for node in await self._nodes(await self._jobs.cluster(), namespaces)}
        return there.get(name, pb.Node(name=name, draining=not request.undo))

    async def _has_slots(self, node: str) -> bool:
        """Whether jobs have slots on a node that is not registered: its daemon has ended and may return."""
        shares = await self._jobs.shares() or Shares()
        return any(node in share.held for share in shares.jobs.values())

    @handle_errors
    async def ListNodes(self, request: pb.ListNodesRequest, context: CallContext) -> pb.ListNodesReply:
        """List the registered daemons and workers."""
        listing, claims = await self._jobs.cluster(), await self._jobs.claims()
        namespaces = {uid: claim.namespace for uid, claim in claims.items()}
        return pb.ListNodesReply(
            nodes=await self._nodes(listing, namespaces),
            workers=[
                pb.WorkerInfo(
                    instance=w.instance,
                    node=w.node,
                    role=w.role,
                    job_uid=w.job_uid if may_see(namespaces.get(w.job_uid, "")) else "",
                    state=w.state,
                    address=w.address,
                    pid=w.pid,
                    slot=" ".join(w.slots),
                )
                for w in listing.workers
            ],
        )


class QuotaMethods(JobsServiceBase):
    """Implements the RPCs of Jobs that read and set quotas."""

    @handle_errors
    async def GetQuotas(self, request: pb.GetQuotasRequest, context: CallContext) -> pb.Quotas:
        """Return the quotas of the namespaces that the caller may see."""
        return await list_quotas(self._jobs.store)

    @handle_errors
    async def SetQuota(self, request: pb.SetQuotaRequest, context: CallContext) -> pb.Quotas:
        """Set or remove the quota of one namespace."""
        if re.fullmatch(NAMESPACE, request.namespace) is None:
            raise bad_field(
                "namespace",
                f"{request.namespace[:80]!r} is not a valid namespace",
                "Use lower-case letters, digits and '-'",
            )
        if request.slots > MOST_SLOTS:
            raise bad_field("slots", f"{request.slots} is more than {MOST_SLOTS}", "Remove the quota for no limit")
        await set_quota(self._jobs.store, request.namespace, request.slots if request.HasField("slots") else None)
        return await list_quotas(self._jobs.store)


async def set_quota(store: Store, namespace: str, slots: int | None) -> None:
    """Set or remove the quota of one namespace. All quotas are in one record, so the write is repeated if another quota
    was changed at the same time. Raises StoreUnavailable, BadFields."""
    while True:
        kv = await store.get(keys.QUOTAS)
        try:
            before = QuotasRecord() if kv is None else QuotasRecord.decode(kv.value, kv.key)
        except UnreadableRecord:
            before = QuotasRecord()  # daemons treat it as empty too; it is overwritten
        others = {name: count for name, count in before.slots.items() if name != namespace}
        after = QuotasRecord(slots=others if slots is None else dict(sorted({**others, namespace: slots}.items())))
        if len(after.slots) > MOST_NAMESPACES:
            raise bad_field(
                "namespace", f"{MOST_NAMESPACES} namespaces already have a quota", "Remove another quota first"
            )
        known = None if kv is None else Versioned(before, kv.mod_revision)
        nobodys = JobKeys("")
        report = await TransactionExecutor(store, nobodys).run(transactions.set_quotas(nobodys, known, after))
        if report.outcome is TxnOutcome.WON:
            return
        if report.outcome is TxnOutcome.UNKNOWN:
            raise StoreUnavailable(f"it is unknown whether the quota was set ({report.why})", fix="Set it again")


async def list_quotas(store: Store) -> pb.Quotas:
    """The quotas that the caller may see. A record that this version cannot read counts as empty."""
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
            namespace = Claim.decode(kv.value, kv.key).namespace
        except UnreadableRecord:
            namespace = Claim().namespace
        jobs[namespace] += 1
        uid = kv.key.removeprefix(keys.ACTIVE)
        if uid in held:
            used[namespace] += len(slots_of_share(held[uid].held))
    names = sorted(name for name in limits.keys() | jobs.keys() if may_see(name))
    return pb.Quotas(
        quotas=[pb.Quota(namespace=name, slots=limits.get(name), used=used[name], jobs=jobs[name]) for name in names]
    )
