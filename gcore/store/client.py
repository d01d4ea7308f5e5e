"""The store on a real etcd (3.4 or later), over gcore's gRPC channels and aetcd's generated stubs: calls and watches.

`gcore.store.types.Store` says what each method promises. Retried inside are reads, and calls that do no harm twice: keep-alives,
revocations, and grants (a lease whose id was lost ends by itself). A transaction is sent again only if it was provably never begun
(`gcore.store.connection`); otherwise its outcome is unknown, and its caller finds out. No cache, no locks, no elections.

A watch lasts over stream breaks, restarts of the server, and compaction. It lists, emits everything as a batch with `reset`, and
follows the changes from the next revision on. A broken stream is opened again behind the last emitted revision; where that is not
possible, because history was compacted or the server is *before* that revision (another or a restored database), it lists again. A
batch's revision is that of its last event, never the one in the answer's header: while a watcher catches up, the header is ahead of
the events.

A store that was restored from a backup is detected by the processes that outlived it: a linearizable read returned an older revision
than before, or another cluster's number. Then revisions that were compared mean something else, a watch from a newer one waits in
silence, and the own lease may be there still, because a backup has leases too. The process begins again, as after the loss of its
lease. Found late it does no harm that compares do not prevent, but for a revision that was given out twice; so a store is restored
with everything stopped (docs/operate/upgrade-and-backup.md).
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
    """Where the keys with `prefix` begin. etcd has no empty key: everything begins at the zero byte."""
    return prefix.encode() or _EVERYTHING


def range_end(prefix: str) -> bytes:
    """The first key after all keys with `prefix`; for the empty prefix etcd's sign for "to the end"."""
    raw = prefix.encode().rstrip(b"\xff")
    return raw[:-1] + bytes([raw[-1] + 1]) if raw else _EVERYTHING


def key_value(kv: Any) -> KeyValue:
    """From etcd's."""
    return KeyValue(
        bytes(kv.key).decode(errors="backslashreplace"),  # a key that is no text is none of gcore's, and ends nobody
        bytes(kv.value),
        int(kv.create_revision),
        int(kv.mod_revision),
        version=int(kv.version),
        lease=int(kv.lease),
    )


def watch_event(event: Any) -> WatchEvent:
    """From etcd's."""
    return WatchEvent("delete" if event.type == event.DELETE else "put", key_value(event.kv))


def build_transaction(compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> Any:
    """A TxnRequest that makes `writes` if all `compares` hold, and nothing otherwise."""
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
"""Between attempts to open a broken watch again."""


async def watch_prefix(
    caller: EtcdCaller, prefix: str, list_keys: Callable[[str], Awaitable[KeyListing]]
) -> AsyncIterator[WatchBatch]:
    """See `gcore.store.types.Store.watch`. Raises StoreRefused if the user may not read `prefix`."""
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
            log.info("what changed under %s since revision %s is gone, it is listed again: %s", prefix, known, error)
            known = None
        except _Denied as error:
            # A token that is no longer valid is refused in the same words as a user who lacks the permission.
            if refused:
                raise StoreRefused(f"the store refuses the watch ({error})", fix=_LET_READ) from error
            refused = True
            caller.forget_token()
        except (StoreUnavailable, StreamEnded):
            await caller.clock.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            if stream is not None:
                stream.cancel()


_LET_READ = "Let the etcd user read these keys"


class _Denied(Exception):
    """etcd cancelled the watch for want of a permission."""


class _Stream:
    """One gRPC stream that carries one watch."""

    def __init__(self, call: Any) -> None:
        self._call = call

    @classmethod
    async def open(cls, caller: EtcdCaller, prefix: str, known: int) -> _Stream:
        """Opened behind `known`. Raises RevisionCompacted, StoreUnavailable, _Denied, StreamEnded."""
        if await _revision_now(caller, prefix) < known:
            raise RevisionCompacted(f"the store stands before revision {known}, which it had reached")
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
            caller.forget_token()  # it may be why; a new one costs one call
            _cancel(call)
            raise StreamEnded(str(error)) from error
        except BaseException:
            _cancel(call)
            raise

    async def next(self) -> WatchBatch:
        """The next changes; waits for them. Raises RevisionCompacted, _Denied, StreamEnded."""
        events: list[WatchEvent] = []
        while True:
            answer = await self._read()
            events.extend(watch_event(event) for event in answer.events)
            # A fragment may end within a revision, and a revision is told whole.
            if events and not answer.fragment:
                return WatchBatch(tuple(events), events[-1].kv.mod_revision)

    def cancel(self) -> None:
        """Let go of it."""
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
    """The store's revision, linearizable: a member that lags behind asks its leader first."""
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
    """The newest of what a store's answers have said of it; zeros: nothing yet."""

    cluster: int = 0
    revision: int = 0

    @classmethod
    def of(cls, header: Any) -> Self:
        """From the header of one answer."""
        return cls(int(header.cluster_id), int(header.revision))

    def and_now(self, header: Any) -> Self:
        """With one answer more. An older one, which was long under way or is a lagging member's, changes nothing."""
        now = type(self).of(header)
        return now if self.cluster == 0 or (now.cluster == self.cluster and now.revision > self.revision) else self

    def contradicts(self, header: Any) -> bool:
        """Whether an answer cannot be of the store that was heard, if it is of the whole cluster and was asked for afterwards."""
        now = type(self).of(header)
        return self.cluster != 0 and (now.cluster != self.cluster or now.revision < self.revision)


TIMEOUT_S = 5.0
"""After so long without an answer a call ends in StoreUnavailable."""

PAGE_KEYS = 500
"""Keys per answer of a listing."""

SETTLE_S = 0.02
"""How long `close` waits for what it cancelled."""


class EtcdStore:
    """`gcore.store.types.Store` on etcd. Belongs to the event loop in which it was connected."""

    def __init__(self, caller: EtcdCaller, lease_call_s: float | None = None) -> None:
        self._caller = caller
        self._lease_call_s = lease_call_s
        self._heard = RestoreCheck()

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
        return cls(EtcdCaller(ConnectionPool.open(endpoints, tls), clock, user=user, timeout_s=timeout_s), lease_call_s)

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        answer = self._noted(await self._caller.call(_range(rpc.RangeRequest(key=key.encode())), repeatable=True))
        return key_value(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> KeyListing:
        """See `Store.list`. Read in pages of one revision; if that is compacted meanwhile, from the beginning."""
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
        if before is not None and before <= 1:  # 0 would mean any
            return KeyListing((), 0)
        answer = await self._caller.call(_range(request), repeatable=True)
        return KeyListing(tuple(key_value(kv) for kv in answer.kvs), int(answer.header.revision))

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """See `Store.between`."""
        if first.encode() >= behind.encode():  # which etcd would take for nothing, or for a mistake
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
        """See `Store.keep_alive`. A store that was put back to an older state has lost all leases, whatever it says of this one."""
        before = self._heard

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
        if answer.TTL <= 0:  # etcd's way to say that it knows no such lease
            raise LeaseLost(f"lease {lease:x} has ended", fix="Begin a new session; what stood under it is gone")
        if before.contradicts(answer.header) and await self._is_put_back(before):
            raise LeaseLost(
                f"the store was put back to revision {self._heard.revision}, from {before.revision}",
                fix="Begin a new session; what was read before is no more",
            )
        return float(answer.TTL)

    async def _is_put_back(self, before: RestoreCheck) -> bool:
        """Ask the whole cluster, for the member that answered may only lag behind."""
        nothing = rpc.RangeRequest(key=b"\0", count_only=True)
        answer = await self._caller.call(_range(nothing), repeatable=True, within_s=self._lease_call_s)
        if not before.contradicts(answer.header):
            return False
        self._heard = RestoreCheck.of(answer.header)
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
        return watch_prefix(self._caller, prefix, self.list)

    async def versions(self) -> dict[str, str]:
        """The version ("3.4.23") of each member that answers, by host:port; "unknown" of one that will not say."""
        members = self._caller.pool.all
        told = await asyncio.gather(*(self._version(member) for member in members))
        return {member.endpoint.target: version for member, version in zip(members, told, strict=True) if version}

    async def standing(self) -> dict[str, StoreMemberStatus]:
        """What each member that answers says of its size and of alarms, by host:port."""
        members = self._caller.pool.all
        told = await asyncio.gather(*(self._status(member) for member in members), return_exceptions=True)
        found: dict[str, StoreMemberStatus] = {}
        for member, status in zip(members, told, strict=True):
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
        """What a member says of itself. Raises grpc.aio.AioRpcError."""
        metadata = await self._caller.metadata(member, self._caller.timeout_s)
        timeout = self._caller.timeout_s
        return await member.maintenance.Status(rpc.StatusRequest(), metadata=metadata, timeout=timeout)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._caller.pool.close()
        # gRPC's thread tells this loop of the end of what was cancelled a moment later, and complains if it is closed.
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
