"""The store in memory, for tests: the server, the network between client and server, and the client.

`MemoryCluster` is the server: revisions, leases, transactions, history and its compaction. Everything in it happens at
once and in one order, as after the raft log of a real etcd; only `wait_for_change` waits. A `Network` decides what goes
wrong between `MemoryStore`, the client, and the server. Leases end by the injected clock, lazily: at the next request,
or when a client waits for a change. A real etcd renews every lease after a change of its leader; `extend_leases` does
that here. There is no disk, no raft, no authentication, and no limit on the database size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeVar

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.types import (
    MIN_TTL_S,
    Compare,
    Delete,
    KeyListing,
    KeyValue,
    Put,
    TxnResult,
    WatchBatch,
    WatchEvent,
    check_transaction,
)
from gcore.system.clock import Clock


@dataclass(slots=True)
class _Lease:
    ttl: int
    ends: float
    keys: set[str]


class MemoryCluster:
    """An etcd server in memory, to which `MemoryStore` clients connect. `clock`: by its time leases expire."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.stopped = False
        self.revision = 1
        self.compacted = 0
        self._keys: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._history: list[tuple[WatchEvent, ...]] = []  # for revisions compacted+1 (or 2) .. revision
        self._changed = asyncio.Event()
        self._late: list[Callable[[], object]] = []
        self.listeners: list[Callable[[tuple[WatchEvent, ...]], None]] = []
        """Functions that are called with the events of each new revision, before any other task runs."""

    # Actions of a test on the server.

    def compact(self, revision: int | None = None) -> None:
        """Drop the history up to `revision` (None: all of it). Watches that have not read that far restart with a listing.

        Raises ValueError if that history is dropped already or does not exist yet.
        """
        upto = self.revision if revision is None else revision
        if not self.compacted < upto <= self.revision:
            raise ValueError(f"revision {upto} is not between {self.compacted + 1} and {self.revision}")
        del self._history[: upto - max(self.compacted, 1)]
        self.compacted = upto
        self._wake()

    def end_lease(self, lease: int) -> None:
        """Expire a lease now and delete its keys. No effect if it does not exist."""
        ended = self._leases.pop(lease, None)
        if ended is not None:
            self._commit([Delete(key) for key in sorted(ended.keys)])

    def stop(self) -> None:
        """Make the server unreachable for every client. No lease ends meanwhile."""
        self.stopped = True
        self._wake()

    def start(self) -> None:
        """Make the server reachable again, with all its data; every lease has its full time again."""
        self.stopped = False
        for lease in self._leases.values():
            lease.ends = self.clock.monotonic() + lease.ttl
        self._wake()

    def end_leases(self) -> None:
        """End the leases whose time is over and delete their keys, as etcd does from time to time."""
        self._end_leases()

    def extend_leases(self) -> None:
        """Give every lease its full TTL again, as a new etcd leader does."""
        self._end_leases()
        for lease in self._leases.values():
            lease.ends = self.clock.monotonic() + lease.ttl

    def deliver_late(self, count: int | None = None) -> int:
        """Execute the oldest `count` requests (None: all) that had the fate DELIVER_LATE. Return how many were executed."""
        due, self._late = self._late[:count], self._late[len(self._late[:count]) :]
        for do in due:
            try:
                do()
            except LeaseLost:
                continue  # its caller no longer waits
        return len(due)

    def hold_back(self, do: Callable[[], object]) -> None:
        """Keep a request for `deliver_late`."""
        self._late.append(do)

    # Requests of clients. Nothing here waits.

    def get(self, key: str) -> KeyValue | None:
        """Return the key's current value with its revisions; None if it does not exist."""
        self._end_leases()
        return self._keys.get(key)

    def listing(self, prefix: str) -> KeyListing:
        """Return the keys that begin with `prefix`, in order, with their values."""
        self._end_leases()
        return KeyListing(
            tuple(self._keys[key] for key in sorted(self._keys) if key.startswith(prefix)), revision=self.revision
        )

    def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """Return at most `limit` keys that begin with `prefix`, the most recently created first; only those created before revision `before`."""
        listing = self.listing(prefix)
        older = [kv for kv in listing.kvs if before is None or kv.create_revision < before]
        older.sort(key=lambda kv: -kv.create_revision)
        return KeyListing(tuple(older[:limit]), listing.revision)

    def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """Return at most `limit` keys from `first` on and before `behind`."""
        found = [kv for kv in self.listing("").kvs if first <= kv.key < behind]
        return KeyListing(tuple(found[:limit]), self.revision)

    def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """Apply all writes as one revision if every compare holds (the key has this mod_revision; 0: does not exist); otherwise none.

        Raises LeaseLost if a write names an ended lease.
        """
        self._end_leases()
        for compare in compares:
            kv = self._keys.get(compare.key)
            if (kv.mod_revision if kv else 0) != compare.mod_revision:
                return TxnResult(won=False, revision=self.revision)
        for write in writes:
            if isinstance(write, Put) and write.lease and write.lease not in self._leases:
                raise _lease_lost(write.lease)
        self._commit(writes)
        return TxnResult(won=True, revision=self.revision)

    def grant(self, ttl: int) -> int:
        """Create a lease of `ttl` seconds and return its id."""
        self._end_leases()
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        ttl = max(ttl, MIN_TTL_S)
        self._leases[lease] = _Lease(ttl, self.clock.monotonic() + ttl, set())
        self._wake()  # waiters for the next end of a lease must check again
        return lease

    def keep_alive(self, lease: int) -> float:
        """Renew a lease and return its remaining seconds. Raises LeaseLost if it has ended."""
        self._end_leases()
        held = self._leases.get(lease)
        if held is None:
            raise _lease_lost(lease)
        held.ends = self.clock.monotonic() + held.ttl
        return float(held.ttl)

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. No effect if it does not exist."""
        self._end_leases()
        self.end_lease(lease)

    def events_since(self, revision: int, prefix: str) -> tuple[WatchBatch, ...] | None:
        """Return changes under `prefix` after `revision`, one batch per revision; None if they were compacted."""
        self._end_leases()
        if revision < self.compacted:
            return None
        first = max(self.compacted, 1) + 1
        batches = []
        for number, events in enumerate(self._history[revision + 1 - first :], start=revision + 1):
            seen = tuple(event for event in events if event.kv.key.startswith(prefix))
            if seen:
                batches.append(WatchBatch(seen, number))
        return tuple(batches)

    async def wait_for_change(self) -> None:
        """Wait until something was written, granted or compacted, or a lease has ended."""
        changed = asyncio.ensure_future(self._changed.wait())
        waits: list[asyncio.Future[object]] = [changed]  # type: ignore[list-item]
        ends = min((lease.ends for lease in self._leases.values()), default=None)
        if ends is not None and not self.stopped:
            waits.append(asyncio.ensure_future(self.clock.sleep(ends - self.clock.monotonic())))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._end_leases()

    def _end_leases(self) -> None:
        if self.stopped:
            return
        now = self.clock.monotonic()
        for lease in sorted(number for number, held in self._leases.items() if held.ends <= now):
            self.end_lease(lease)

    def _commit(self, writes: Sequence[Put | Delete]) -> None:
        """Apply `writes` as one revision; without a change there is no new revision."""
        revision = self.revision + 1
        events: list[WatchEvent] = []
        for write in writes:
            if isinstance(write, Put):
                events.append(self._put(write, revision))
                continue
            doomed = sorted(key for key in self._keys if key.startswith(write.key)) if write.prefix else [write.key]
            for key in doomed:
                gone = self._keys.pop(key, None)
                if gone is not None:
                    self._detach(gone)
                    events.append(WatchEvent("delete", KeyValue(key, b"", 0, revision, version=0)))
        if events:
            self.revision = revision
            self._history.append(tuple(events))
            self._wake()
            for listener in self.listeners:
                listener(tuple(events))

    def _put(self, write: Put, revision: int) -> WatchEvent:
        old = self._keys.get(write.key)
        if old is not None:
            self._detach(old)
        kv = KeyValue(
            write.key,
            write.value,
            old.create_revision if old else revision,
            revision,
            version=old.version + 1 if old else 1,
            lease=write.lease,
        )
        self._keys[write.key] = kv
        if write.lease:
            self._leases[write.lease].keys.add(write.key)
        return WatchEvent("put", kv)

    def _detach(self, kv: KeyValue) -> None:
        lease = self._leases.get(kv.lease)
        if lease is not None:
            lease.keys.discard(kv.key)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _lease_lost(lease: int) -> LeaseLost:
    return LeaseLost(f"lease {lease:x} has ended", fix="Begin a new session; the keys of the lease are gone")


T = TypeVar("T")
CallKind = Literal["get", "list", "transact", "grant", "keep_alive", "revoke", "watch"]


class Fate(StrEnum):
    """Whether a call reaches the server, and its reply the client."""

    DELIVER = "deliver"
    LOSE_REQUEST = "lose_request"
    """The server never receives the request; the caller gets StoreUnavailable."""
    LOSE_REPLY = "lose_reply"
    """The server executes the request, but the reply is lost; the caller gets StoreUnavailable."""
    DELIVER_LATE = "deliver_late"
    """The caller gets StoreUnavailable; the server executes the request when `MemoryCluster.deliver_late` is called."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call from a client to the server, as the network sees it. For a watch: one batch of events for its client."""

    client: str
    kind: CallKind
    key: str = ""
    compares: tuple[Compare, ...] = ()
    writes: tuple[Put | Delete, ...] = ()
    lease: int = 0


class Network(Protocol):
    """The network between clients and the server. Both methods may sleep."""

    async def request(self, call: Call) -> Fate:
        """Transmit the request, and return what happens to it. For a watch, any fate except DELIVER breaks the stream, which is then opened again."""
        ...

    async def reply(self, call: Call) -> None:
        """Transmit the reply; return when the client has it."""
        ...


class PerfectNetwork:
    """Loses nothing, and yields to other tasks once in each direction, like a real network."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def request(self, call: Call) -> Fate:
        """Deliver the request."""
        await self._clock.sleep(0)
        return Fate.DELIVER

    async def reply(self, call: Call) -> None:
        """Deliver the reply."""
        await self._clock.sleep(0)


class MemoryStore:
    """`gcore.store.types.Store` over a `MemoryCluster`: one client's connection to a server in memory that behaves like
    etcd.

    A simulation gives each controller its own connection, so that it can cut one off. One contract suite runs against
    both this class and a real etcd. `network` decides the fate of a call and may be replaced at any time: it can delay
    a call, lose the request, lose the reply, or deliver the request after its caller has stopped waiting. A transaction
    is atomic and takes no time. While `away` is true, or the cluster is stopped, every call ends with StoreUnavailable
    after `timeout_s` on the cluster's clock, and watches wait. While `deaf` is true, requests arrive and are executed,
    but no reply arrives: calls end in the same way.
    """

    def __init__(
        self, cluster: MemoryCluster, name: str = "client", *, network: Network | None = None, timeout_s: float = 5.0
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.network: Network = network or PerfectNetwork(cluster.clock)
        self.away = False
        self.deaf = False
        self.closed = False
        self._timeout_s = timeout_s

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        return await self._call(Call(self.name, "get", key), lambda: self.cluster.get(key))

    async def list(self, prefix: str) -> KeyListing:
        """See `Store.list`."""
        return await self._call(Call(self.name, "list", prefix), lambda: self.cluster.listing(prefix))

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """See `Store.newest`."""
        return await self._call(Call(self.name, "list", prefix), lambda: self.cluster.newest(prefix, limit, before))

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """See `Store.between`."""
        return await self._call(Call(self.name, "list", first), lambda: self.cluster.between(first, behind, limit))

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        check_transaction(compares, writes)
        call = Call(self.name, "transact", compares=tuple(compares), writes=tuple(writes))
        return await self._call(call, lambda: self.cluster.transact(call.compares, call.writes))

    async def grant(self, ttl: int) -> int:
        """See `Store.grant`."""
        return await self._call(Call(self.name, "grant"), lambda: self.cluster.grant(ttl))

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        return await self._call(Call(self.name, "keep_alive", lease=lease), lambda: self.cluster.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        await self._call(Call(self.name, "revoke", lease=lease), lambda: self.cluster.revoke(lease))

    async def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """See `Store.watch`."""
        call = Call(self.name, "watch", prefix)
        known: int | None = None
        while True:
            if known is None:
                batches: tuple[WatchBatch, ...] = (await self._reset(call),)
            else:
                since = self.cluster.events_since(known, prefix)
                if since is None:
                    known = None
                    continue
                batches = since
            if not batches:
                await self.cluster.wait_for_change()
                continue
            for batch in batches:
                await self._deliverable(call)
                known = batch.revision
                yield batch

    async def close(self) -> None:
        """See `Store.close`."""
        self.closed = True

    @property
    def _cut_off(self) -> bool:
        return self.away or self.cluster.stopped

    async def _reset(self, call: Call) -> WatchBatch:
        await self._deliverable(call)
        listing = self.cluster.listing(call.key)
        return WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), listing.revision, reset=True)

    async def _deliverable(self, call: Call) -> None:
        """Wait until the network delivers the next batch of a watch."""
        while self._cut_off or self.deaf or await self.network.request(call) is not Fate.DELIVER:
            await self.cluster.clock.sleep(_RETRY_S)

    async def _call(self, call: Call, do: Callable[[], T]) -> T:
        if self.closed:
            raise RuntimeError("the store's connection is closed")
        if self._cut_off:
            await self.cluster.clock.sleep(self._timeout_s)
            raise self._unavailable(call)
        fate = await self.network.request(call)
        if fate is Fate.DELIVER_LATE:
            self.cluster.hold_back(do)
        if fate in (Fate.DELIVER_LATE, Fate.LOSE_REQUEST) or self._cut_off:  # disconnected during the call
            raise self._unavailable(call)
        lost: LeaseLost | None = None
        try:
            answer = do()
        except LeaseLost as error:
            lost = error
        await self.network.reply(call)  # an error is transmitted like any other reply
        if self.deaf:
            await self.cluster.clock.sleep(self._timeout_s)
        if fate is Fate.LOSE_REPLY or self.deaf:
            raise self._unavailable(call)
        if lost is not None:
            raise lost
        return answer

    def _unavailable(self, call: Call) -> StoreUnavailable:
        return StoreUnavailable(f"the store did not answer {self.name}'s {call.kind}", where="memory store")


_RETRY_S = 0.1
"""Seconds between attempts to reopen a watch."""
