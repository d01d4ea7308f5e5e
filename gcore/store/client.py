"""The store on a real etcd (3.4 or later), over our own gRPC channels and aetcd's generated stubs.

What each method promises stands in `gcore.store.types.Store`. Retried inside are reads, and what does no harm when it
is done twice: keep-alives, revocations, and grants (a lease whose id was lost ends by itself). A transaction is sent
again only if it was provably never begun (`gcore.store.calls`); otherwise its outcome is unknown and its caller's to
find out.

No cache, no locks, no elections: a program that needs those builds them from transactions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from aetcd import rpc

from gcore.clock import Clock
from gcore.errors import LeaseLost
from gcore.store.calls import REFUSALS, Action, Caller, Compacted, Metadata, StreamEnded
from gcore.store.endpoints import Connection, ConnectionPool, StoreTls, StoreUser
from gcore.store.heard import Heard
from gcore.store.limits import check_transaction
from gcore.store.standing import ALARMS, StoreStanding
from gcore.store.types import Compare, Delete, KeyValue, Listing, Put, TxnResult, WatchBatch
from gcore.store.watching import watch
from gcore.store.wire import key_value, range_begin, range_end, transaction

TIMEOUT_S = 5.0
"""After so long without an answer a call ends in StoreUnavailable."""

PAGE_KEYS = 500
"""Keys per answer of a listing."""

SETTLE_S = 0.02
"""How long `close` waits for what it cancelled."""


class EtcdStore:
    """`gcore.store.types.Store` on etcd. Belongs to the event loop in which it was connected."""

    def __init__(self, caller: Caller, lease_call_s: float | None = None) -> None:
        self._caller = caller
        self._lease_call_s = lease_call_s
        self._heard = Heard()

    @classmethod
    async def connect(
        cls,
        endpoints: Sequence[str],
        *,
        clock: Clock,
        tls: StoreTls | None = None,
        user: StoreUser | None = None,
        timeout_s: float = TIMEOUT_S,
        lease_call_s: float | None = None,
    ) -> EtcdStore:
        """Does not wait for a connection: the first call does. Raises UsageError for a wrong endpoint or TLS file.

        `lease_call_s`: how long the renewal of a lease may take, where that is less than `timeout_s`.
        """
        return cls(Caller(ConnectionPool.open(endpoints, tls), clock, user=user, timeout_s=timeout_s), lease_call_s)

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        answer = self._noted(await self._caller.call(_range(rpc.RangeRequest(key=key.encode())), repeatable=True))
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`. Read in pages of one revision; if that is compacted meanwhile, from the beginning."""
        while True:
            try:
                return await self._pages(prefix)
            except Compacted:
                continue

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> Listing:
        """See `Store.newest`."""
        request = rpc.RangeRequest(
            key=range_begin(prefix),
            range_end=range_end(prefix),
            limit=limit,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.CREATE,
            max_create_revision=0 if before is None else before - 1,
        )
        if before is not None and before <= 1:  # 0 would mean any
            return Listing((), 0)
        answer = await self._caller.call(_range(request), repeatable=True)
        return Listing(tuple(key_value(kv) for kv in answer.kvs), int(answer.header.revision))

    async def between(self, first: str, behind: str, limit: int) -> Listing:
        """See `Store.between`."""
        if first.encode() >= behind.encode():  # which etcd would take for nothing, or for a mistake
            return Listing((), 0)
        request = rpc.RangeRequest(key=first.encode(), range_end=behind.encode(), limit=limit)
        answer = await self._caller.call(_range(request), repeatable=True)
        return Listing(tuple(key_value(kv) for kv in answer.kvs), int(answer.header.revision))

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        check_transaction(compares, writes)
        request = transaction(compares, writes)
        answer = await self._caller.call(
            lambda connection, metadata, within: connection.kv.Txn(request, metadata=metadata, timeout=within),
            repeatable=False,
        )
        self._noted(answer)
        return TxnResult(won=bool(answer.succeeded), revision=int(answer.header.revision))

    async def grant(self, ttl: int) -> int:
        """See `Store.grant`."""
        request = rpc.LeaseGrantRequest(TTL=ttl)
        answer = await self._caller.call(
            lambda connection, metadata, within: connection.lease.LeaseGrant(
                request, metadata=metadata, timeout=within
            ),
            repeatable=True,
        )
        return int(answer.ID)

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`. A store that was put back to an older state has lost all leases, whatever it says of this one."""
        before = self._heard

        async def renew(connection: Connection, metadata: Metadata, within: float) -> Any:
            call = connection.lease.LeaseKeepAlive(metadata=metadata, timeout=within)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise StreamEnded("etcd closed the stream")
                return answer
            finally:
                call.cancel()

        answer = await self._caller.call(renew, repeatable=True, within_s=self._lease_call_s)
        if answer.TTL <= 0:  # etcd's way to say that it knows no such lease
            raise LeaseLost(f"lease {lease:x} has ended", fix="Begin a new session; what stood under it is gone")
        if before.contradicts(answer.header) and await self._is_put_back(before):
            raise LeaseLost(
                f"the store was put back to revision {self._heard.revision}, from {before.revision}",
                fix="Begin a new session; what was read before is no more",
            )
        return float(answer.TTL)

    async def _is_put_back(self, before: Heard) -> bool:
        """Ask the whole cluster, for the member that answered may only lag behind."""
        nothing = rpc.RangeRequest(key=b"\0", count_only=True)
        answer = await self._caller.call(_range(nothing), repeatable=True, within_s=self._lease_call_s)
        if not before.contradicts(answer.header):
            return False
        self._heard = Heard.of(answer.header)
        return True

    def _noted(self, answer: Any) -> Any:
        self._heard = self._heard.and_now(answer.header)
        return answer

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._caller.call(
                lambda connection, metadata, within: connection.lease.LeaseRevoke(
                    request, metadata=metadata, timeout=within
                ),
                repeatable=True,
            )
        except LeaseLost:
            return

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """See `Store.watch`. Raises StoreRefused if the user may not read there."""
        return watch(self._caller, prefix, self.list)

    async def versions(self) -> dict[str, str]:
        """The version ("3.4.23") of each member that answers, by host:port; "unknown" of one that will not say."""
        members = self._caller.pool.all
        told = await asyncio.gather(*(self._version(member) for member in members))
        return {member.endpoint.target: version for member, version in zip(members, told, strict=True) if version}

    async def standing(self) -> dict[str, StoreStanding]:
        """What each member that answers says of its size and of alarms, by host:port."""
        members = self._caller.pool.all
        told = await asyncio.gather(*(self._status(member) for member in members), return_exceptions=True)
        found: dict[str, StoreStanding] = {}
        for member, status in zip(members, told, strict=True):
            if isinstance(status, grpc.aio.AioRpcError):
                continue
            if isinstance(status, BaseException):
                raise status
            alarms = frozenset(alarm for alarm in ALARMS if any(alarm in error for error in status.errors))
            found[member.endpoint.target] = StoreStanding(int(status.dbSize), int(status.dbSizeInUse), alarms)
        return found

    async def _version(self, member: Connection) -> str:
        try:
            return str((await self._status(member)).version)
        except grpc.aio.AioRpcError as error:
            return "unknown" if error.code() in REFUSALS else ""

    async def _status(self, member: Connection) -> rpc.StatusResponse:
        """What a member says of itself. Raises grpc.aio.AioRpcError."""
        metadata = await self._caller.metadata(member, self._caller.timeout_s)
        timeout = self._caller.timeout_s
        return await member.maintenance.Status(rpc.StatusRequest(), metadata=metadata, timeout=timeout)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._caller.pool.close()
        # gRPC's thread tells this loop of the end of what was cancelled a moment later, and complains if it is closed.
        await self._caller.clock.sleep(SETTLE_S)

    async def _pages(self, prefix: str) -> Listing:
        kvs: tuple[KeyValue, ...] = ()
        begin, revision = range_begin(prefix), 0
        while True:
            request = rpc.RangeRequest(key=begin, range_end=range_end(prefix), limit=PAGE_KEYS, revision=revision)
            answer = self._noted(await self._caller.call(_range(request), repeatable=True))
            kvs += tuple(key_value(kv) for kv in answer.kvs)
            revision = revision or int(answer.header.revision)
            if not answer.more:
                return Listing(kvs, revision)
            begin = bytes(answer.kvs[-1].key) + b"\0"


def _range(request: Any) -> Action[Any]:
    return lambda connection, metadata, within: connection.kv.Range(request, metadata=metadata, timeout=within)
