"""A store in memory that behaves as etcd does, for tests and for the simulation of the protocol.

`MemoryCluster` is the server, `MemoryStore` one client's connection to it; a simulation gives each controller its own,
so that it can cut one off. Whatever `gcore.store.types.Store` says holds here too: one contract suite runs against both
this and a real etcd.

What happens to a call on its way is decided by a `Network`: it can hold a call up, lose the request, lose the reply, or
deliver the request after its caller has given up. A transaction itself is atomic and takes no time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeVar

from gcore.clock import Clock
from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.limits import check_transaction
from gcore.store.types import Compare, Delete, KeyValue, Listing, Put, TxnResult, WatchBatch, WatchEvent
from gcore.testing.memory_cluster import MemoryCluster

T = TypeVar("T")
CallKind = Literal["get", "list", "transact", "grant", "keep_alive", "revoke", "watch"]


class Fate(StrEnum):
    """What becomes of a call."""

    DELIVER = "deliver"
    LOSE_REQUEST = "lose_request"
    """The server never sees it; the caller gets StoreUnavailable."""
    LOSE_REPLY = "lose_reply"
    """It is done, and the caller gets StoreUnavailable."""
    DELIVER_LATE = "deliver_late"
    """The caller gets StoreUnavailable; it is done when `MemoryCluster.deliver_late` is called."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the network sees it. For a watch: one batch that is about to be delivered."""

    client: str
    kind: CallKind
    key: str = ""
    compares: tuple[Compare, ...] = ()
    writes: tuple[Put | Delete, ...] = ()
    lease: int = 0


class Network(Protocol):
    """What lies between clients and the server. Both may sleep."""

    async def request(self, call: Call) -> Fate:
        """On the way there. For a watch, anything but DELIVER breaks the stream, which is then opened again."""
        ...

    async def reply(self, call: Call) -> None:
        """On the way back."""
        ...


class PerfectNetwork:
    """Loses nothing, and gives way to other tasks once each way, as a real one does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def request(self, call: Call) -> Fate:
        """Delivered."""
        await self._clock.sleep(0)
        return Fate.DELIVER

    async def reply(self, call: Call) -> None:
        """Delivered."""
        await self._clock.sleep(0)


class MemoryStore:
    """`gcore.store.types.Store` over a `MemoryCluster`.

    `network` decides what happens to calls, and may be replaced at any time. While `away` is true, or the cluster is stopped,
    every call ends in StoreUnavailable after `timeout_s` on the cluster's clock, and watches wait. While `deaf` is true what is
    sent arrives and is done, and nothing comes back: calls end like that all the same.
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

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`."""
        return await self._call(Call(self.name, "list", prefix), lambda: self.cluster.listing(prefix))

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> Listing:
        """See `Store.newest`."""
        return await self._call(Call(self.name, "list", prefix), lambda: self.cluster.newest(prefix, limit, before))

    async def between(self, first: str, behind: str, limit: int) -> Listing:
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
        """Until the network lets a batch through."""
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
        if fate in (Fate.DELIVER_LATE, Fate.LOSE_REQUEST) or self._cut_off:  # cut off on the way
            raise self._unavailable(call)
        lost: LeaseLost | None = None
        try:
            answer = do()
        except LeaseLost as error:
            lost = error
        await self.network.reply(call)  # an error travels back like any other answer
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
"""Seconds between attempts to open a watch again."""
