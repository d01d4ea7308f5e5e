"""The store on etcd (3.4 or later), over gcore's gRPC channels and aetcd's generated stubs: calls and watches.

`gcore.store.types.Store` defines the methods. The client retries reads and calls that are safe to repeat: keep-alives,
revocations, and grants (a lease whose ID was lost expires). It repeats a transaction only if etcd provably never began
it (`gcore.store.connection`); otherwise the outcome is unknown, and the caller must read the store to find out. There
is no cache, no lock and no election.

A watch survives broken streams, server restarts and compaction. It lists the prefix, emits everything as a batch with
`reset`, and then emits changes from the next revision on. A broken stream is reopened after the last emitted revision.
If that is not possible, because history was compacted or the server is *before* that revision (another or a restored
database), the watch lists the prefix again. A batch's revision is that of its last event, never the one in the response
header, because the header is ahead of the events while a watcher catches up.

If etcd was restored from an older backup while this process ran, a linearizable read returns a lower revision or
another cluster ID than before (`RestoreCheck`). Then known revisions have another meaning, a watch from a newer
revision waits silently, and the process's own lease may exist in the backup. `keep_alive` therefore raises LeaseLost,
and the process starts over. Late detection is harmless because transactions compare revisions, except for a revision
that was assigned twice. So operators restore a store only with everything stopped
(docs/operate/upgrade-and-backup.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio
from aetcd import rpc

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.connection import (
    REFUSALS,
    Action,
    ConnectionPool,
    EtcdCaller,
    EtcdConnection,
    Metadata,
    RevisionCompacted,
    StoreRefused,
    StoreTls,
    StoreUser,
    StreamEnded,
)
from gcore.store.types import (
    ALARMS,
    Compare,
    Delete,
    KeyListing,
    KeyValue,
    Put,
    StoreMemberStatus,
    TxnResult,
    WatchBatch,
    WatchEvent,
    check_transaction,
)
from gcore.system.clock import Clock
from gcore.system.concurrency import limit_time

_EVERYTHING = b"\0"


def range_begin(prefix: str) -> bytes:
    """Return the first key with `prefix`. etcd has no empty key, so the empty prefix starts at the zero byte."""
    return prefix.encode() or _EVERYTHING


def range_end(prefix: str) -> bytes:
    """Return the first key after all keys with `prefix`; for the empty prefix, etcd's code for "to the end"."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else _EVERYTHING


def key_value(kv: Any) -> KeyValue:
    """Convert etcd's KeyValue message to gcore's type."""
    return KeyValue(
        bytes(kv.key).decode(errors="backslashreplace"),  # a key that is not UTF-8 is not gcore's and must not raise
        bytes(kv.value),
        int(kv.create_revision),
        int(kv.mod_revision),
        version=int(kv.version),
        lease=int(kv.lease),
    )


def watch_event(event: Any) -> WatchEvent:
    """Convert etcd's Event message to gcore's type."""
    return WatchEvent("delete" if event.type == event.DELETE else "put", key_value(event.kv))


def build_transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> Any:
    """Return etcd's request for a transaction that makes `writes` if all `compares` hold, and nothing otherwise."""
    return rpc.TxnRequest(
        compare=[
            rpc.Compare(
                result=rpc.Compare.EQUAL,
                target=rpc.Compare.MOD,
                key=compare.key.encode(),
                mod_revision=compare.mod_revision,
            )
            for compare in compares
        ],
        success=[_operation(write) for write in writes],
    )


def _operation(write: Put | Delete) -> Any:
    if isinstance(write, Put):
        return rpc.RequestOp(request_put=rpc.PutRequest(key=write.key.encode(), value=write.value, lease=write.lease))
    if write.prefix:
        request = rpc.DeleteRangeRequest(key=range_begin(write.key), range_end=range_end(write.key))
    else:
        request = rpc.DeleteRangeRequest(key=write.key.encode())
    return rpc.RequestOp(request_delete_range=request)


log = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.05

LONGEST_PAUSE_S = 1.0
"""Maximum seconds between two attempts to reopen a broken watch."""


async def watch_prefix(
    caller: EtcdCaller, prefix: str, list_keys: Callable[[str], Awaitable[KeyListing]]
) -> AsyncIterator[WatchBatch]:
    """Yield all keys under `prefix` and then every change, without end (`gcore.store.types.Store.watch`).

    `list_keys`: lists a prefix. Raises StoreRefused if the user may not read `prefix`.
    """
    known: int | None = None
    pause = FIRST_PAUSE_S
    refused = False
    while True:
        stream: _Stream | None = None
        try:
            if known is None:
                listing = await list_keys(prefix)
                known = listing.revision
                yield WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), known, reset=True)
            stream = await _Stream.open(caller, prefix, known)
            refused = False
            while True:
                batch = await stream.next()
                known, pause = batch.revision, FIRST_PAUSE_S
                yield batch
        except RevisionCompacted as error:
            log.info(
                "changes under %s after revision %s were compacted; the prefix is listed again: %s",
                prefix,
                known,
                error,
            )
            known = None
        except _Denied as error:
            # etcd reports an expired token with the same message as a missing permission.
            if refused:
                raise StoreRefused(f"the store denies the watch ({error})", fix=_LET_READ) from error
            refused = True
            caller.forget_token()
        except (StoreUnavailable, StreamEnded):
            await caller.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            if stream is not None:
                stream.cancel()


_LET_READ = "Give the etcd user read permission for these keys"


class _Denied(Exception):
    """etcd cancelled the watch because of a missing permission."""


class _Stream:
    """One gRPC stream that carries one etcd watch."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @classmethod
    async def open(cls, caller: EtcdCaller, prefix: str, known: int) -> _Stream:
        """Open a stream of the changes under `prefix` after revision `known`.

        Raises RevisionCompacted, StoreUnavailable, _Denied, StreamEnded.
        """
        if await _revision_now(caller, prefix) < known:
            raise RevisionCompacted(f"the store is at an earlier revision than {known}, which it had reached")
        connection = await caller.connection(caller.timeout_s)
        call: Any = None
        try:
            async with limit_time(caller.timeout_s):
                metadata = await caller.metadata(connection, caller.timeout_s)
                call = connection.watch.Watch(metadata=metadata)
                create = rpc.WatchCreateRequest(
                    key=range_begin(prefix), range_end=range_end(prefix), start_revision=known + 1, fragment=True
                )
                await call.write(rpc.WatchRequest(create_request=create))
                stream = cls(call)
                answer = await stream._read()
                if not answer.created:
                    raise StreamEnded("etcd did not acknowledge the watch")
                return stream
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError, StreamEnded) as error:
            caller.pool.suspect(connection)
            caller.forget_token()  # it may be the cause; a new token costs one call
            _cancel(call)
            raise StreamEnded(str(error)) from error
        except BaseException:
            _cancel(call)
            raise

    async def next(self) -> WatchBatch:
        """Wait for the next changes, and return all of one or several revisions.

        Raises RevisionCompacted, _Denied, StreamEnded.
        """
        events: list[WatchEvent] = []
        while True:
            answer = await self._read()
            events.extend(watch_event(event) for event in answer.events)
            # A fragment may end within a revision; emit only whole revisions.
            if events and not answer.fragment:
                return WatchBatch(tuple(events), events[-1].kv.mod_revision)

    def cancel(self) -> None:
        """Cancel the stream."""
        _cancel(self._call)

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamEnded(str(error)) from error
        if answer is grpc.aio.EOF:
            raise StreamEnded("etcd closed the stream")
        if answer.canceled:
            raise _why_cancelled(answer)
        return answer


def _why_cancelled(answer: Any) -> Exception:
    reason = str(answer.cancel_reason)
    if answer.compact_revision:
        return RevisionCompacted(reason)
    if "permission denied" in reason:
        return _Denied(reason)
    return StreamEnded(reason)


async def _revision_now(caller: EtcdCaller, prefix: str) -> int:
    """Return the store's present revision, by a linearizable read: a lagging member asks the leader first."""
    request = rpc.RangeRequest(key=range_begin(prefix), range_end=range_end(prefix), count_only=True)
    answer = await caller.call(
        lambda connection, metadata, within: connection.kv.Range(request, metadata=metadata, timeout=within),
        repeatable=True,
    )
    return int(answer.header.revision)


def _cancel(call: Any) -> None:
    if call is not None:
        call.cancel()


@dataclass(frozen=True, slots=True)
class RestoreCheck:
    """Detects that etcd was restored from an older backup, from the newest cluster ID and revision of its responses.

    Zeros before the first response.
    """

    cluster: int = 0
    revision: int = 0

    @classmethod
    def of(cls, header: Any) -> Self:
        """Read cluster ID and revision from a response header."""
        return cls(int(header.cluster_id), int(header.revision))

    def and_now(self, header: Any) -> Self:
        """Return the check updated with another response. A delayed response, or one of a lagging member, changes
        nothing.
        """
        now = type(self).of(header)
        return now if self.cluster == 0 or (now.cluster == self.cluster and now.revision > self.revision) else self

    def contradicts(self, header: Any) -> bool:
        """Return whether a later linearizable response cannot come from the same store."""
        now = type(self).of(header)
        return self.cluster != 0 and (now.cluster != self.cluster or now.revision < self.revision)


TIMEOUT_S = 5.0
"""Default timeout of a call in seconds, after which it raises StoreUnavailable."""

PAGE_KEYS = 500
"""Maximum number of keys per response of a listing."""

SETTLE_S = 0.02
"""Seconds that `close` waits for the end of cancelled calls."""


class EtcdStore:
    """`gcore.store.types.Store` on etcd. Belongs to the event loop that connected it."""

    def __init__(self, caller: EtcdCaller, lease_call_s: float | None = None) -> None:
        self._caller = caller
        self._lease_call_s = lease_call_s
        self._restore_check = RestoreCheck()

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
        """Create the client without waiting for a connection. Raises UsageError for a wrong endpoint or TLS file.

        `lease_call_s`: timeout of a lease renewal, if shorter than `timeout_s`.
        """
        return cls(EtcdCaller(ConnectionPool.open(endpoints, tls), clock, user=user, timeout_s=timeout_s), lease_call_s)

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        answer = self._noted(await self._caller.call(_range(rpc.RangeRequest(key=key.encode())), repeatable=True))
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> KeyListing:
        """See `Store.list`. Reads pages of one revision; starts over if that revision is compacted meanwhile."""
        while True:
            try:
                return await self._pages(prefix)
            except RevisionCompacted:
                continue

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """See `Store.newest`."""
        request = rpc.RangeRequest(
            key=range_begin(prefix),
            range_end=range_end(prefix),
            limit=limit,
            sort_order=rpc.RangeRequest.DESCEND,
            sort_target=rpc.RangeRequest.CREATE,
            max_create_revision=0 if before is None else before - 1,
        )
        if before is not None and before <= 1:  # a max_create_revision of 0 would mean no limit
            return KeyListing((), 0)
        answer = await self._caller.call(_range(request), repeatable=True)
        return KeyListing(tuple(key_value(kv) for kv in answer.kvs), int(answer.header.revision))

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """See `Store.between`."""
        if first.encode() >= behind.encode():  # etcd would return nothing, or an error
            return KeyListing((), 0)
        request = rpc.RangeRequest(key=first.encode(), range_end=behind.encode(), limit=limit)
        answer = await self._caller.call(_range(request), repeatable=True)
        return KeyListing(tuple(key_value(kv) for kv in answer.kvs), int(answer.header.revision))

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        check_transaction(compares, writes)
        request = build_transaction(compares, writes)
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
        """See `Store.keep_alive`. If the store was restored from an older backup, all leases count as lost."""
        before = self._restore_check

        async def renew(connection: EtcdConnection, metadata: Metadata, within: float) -> Any:
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
        if answer.TTL <= 0:  # etcd reports an unknown lease in this way
            raise LeaseLost(
                f"lease {lease:x} has ended", fix="Open a new session; the keys under the lease are deleted"
            )
        if before.contradicts(answer.header) and await self._is_put_back(before):
            raise LeaseLost(
                f"the store was restored from a backup: it was at revision {before.revision} and is at {self._restore_check.revision}",
                fix="Open a new session and read everything again",
            )
        return float(answer.TTL)

    async def _is_put_back(self, before: RestoreCheck) -> bool:
        """Return whether the store was restored from an older backup than `before`.

        Confirms it with a linearizable read, because the member that answered may only be lagging.
        """
        nothing = rpc.RangeRequest(key=b"\0", count_only=True)
        answer = await self._caller.call(_range(nothing), repeatable=True, within_s=self._lease_call_s)
        if not before.contradicts(answer.header):
            return False
        self._restore_check = RestoreCheck.of(answer.header)
        return True

    def _noted(self, answer: Any) -> Any:
        self._restore_check = self._restore_check.and_now(answer.header)
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
        """See `Store.watch`. Raises StoreRefused if the user lacks the read permission."""
        return watch_prefix(self._caller, prefix, self.list)

    async def versions(self) -> dict[str, str]:
        """Return the etcd version ("3.4.23") of each member that answers, by host:port.

        "unknown" if a member denies the request.
        """
        members = self._caller.pool.all
        versions = await asyncio.gather(*(self._version(member) for member in members))
        return {member.endpoint.target: version for member, version in zip(members, versions, strict=True) if version}

    async def standing(self) -> dict[str, StoreMemberStatus]:
        """Return database size and alarms of each member that answers, by host:port."""
        members = self._caller.pool.all
        statuses = await asyncio.gather(*(self._status(member) for member in members), return_exceptions=True)
        found: dict[str, StoreMemberStatus] = {}
        for member, status in zip(members, statuses, strict=True):
            if isinstance(status, grpc.aio.AioRpcError):
                continue
            if isinstance(status, BaseException):
                raise status
            alarms = frozenset(alarm for alarm in ALARMS if any(alarm in error for error in status.errors))
            found[member.endpoint.target] = StoreMemberStatus(int(status.dbSize), int(status.dbSizeInUse), alarms)
        return found

    async def _version(self, member: EtcdConnection) -> str:
        try:
            return str((await self._status(member)).version)
        except grpc.aio.AioRpcError as error:
            return "unknown" if error.code() in REFUSALS else ""

    async def _status(self, member: EtcdConnection) -> rpc.StatusResponse:
        """Return a member's status. Raises grpc.aio.AioRpcError."""
        metadata = await self._caller.metadata(member, self._caller.timeout_s)
        timeout = self._caller.timeout_s
        return await member.maintenance.Status(rpc.StatusRequest(), metadata=metadata, timeout=timeout)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._caller.pool.close()
        # gRPC's thread reports the end of cancelled calls to this loop a moment later, and logs an error if the loop is closed.
        await self._caller.clock.sleep(SETTLE_S)

    async def _pages(self, prefix: str) -> KeyListing:
        kvs: tuple[KeyValue, ...] = ()
        begin, revision = range_begin(prefix), 0
        while True:
            request = rpc.RangeRequest(key=begin, range_end=range_end(prefix), limit=PAGE_KEYS, revision=revision)
            answer = self._noted(await self._caller.call(_range(request), repeatable=True))
            kvs += tuple(key_value(kv) for kv in answer.kvs)
            revision = revision or int(answer.header.revision)
            if not answer.more:
                return KeyListing(kvs, revision)
            begin = bytes(answer.kvs[-1].key) + b"\0"


def _range(request: Any) -> Action[Any]:
    return lambda connection, metadata, within: connection.kv.Range(request, metadata=metadata, timeout=within)
