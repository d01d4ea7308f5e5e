"""Messages between simulated processes, and a store at the other end of them.

A message arrives even if its sender was killed meanwhile, late or twice or never. Messages for a stopped process wait
until it continues. A link can be cut in one direction. Nothing here interprets the messages.

`RemoteStore` is `gcore.store.types.Store` over such messages to a `MemoryCluster`, which is never stopped by itself and executes
each call on arrival. A watch requests everything after the revision that it knows, and lists again after a
compaction. A call without a timely answer ends in StoreUnavailable; the store may have executed it.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from virtual_time import VirtualLoop

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.types import (
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
from gcore.testing import MemoryCluster

STORE = "etcd"
LONGEST_POLL_S = 8.0


@dataclass
class Weather:
    """What becomes of messages: how late they are, in seconds, and how many of them are lost or come twice."""

    typical_s: float = 0.02
    late: float = 0.0
    """The share of messages that are late by up to `lateness_s`."""
    lateness_s: float = 12.0
    lost: float = 0.0
    twice: float = 0.0


class Network:
    """Between nodes, by name; the store is one of them."""

    def __init__(self, loop: VirtualLoop | asyncio.AbstractEventLoop, chance: random.Random) -> None:
        self.loop = loop
        self.weather = Weather()
        self.cut: set[tuple[str, str]] = set()
        """Directions in which nothing gets through: (from, to)."""
        self._chance = chance

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """`arrive` is called when the message does, if it does; as often as it does."""
        if (source, target) in self.cut:
            return
        weather, chance = self.weather, self._chance.random
        if source != target and chance() < weather.lost:
            return
        self.loop.call_later(self._delay(), arrive)
        if source != target and chance() < weather.twice:
            self.loop.call_later(self._delay() + chance() * weather.lateness_s, arrive)

    def _delay(self) -> float:
        chance = self._chance.random
        late = self.weather.lateness_s * chance() if chance() < self.weather.late else 0.0
        return self.weather.typical_s * (0.5 + chance()) + late


class NoAnswer(Exception):
    """None came in time."""


async def ask(
    network: Network,
    source: str,
    target: str,
    do: Callable[[Callable[[Any], None]], None],
    *,
    timeout_s: float,
) -> Any:
    """A call of the running process: `do(reply)` is called at the target; what it replies comes back. Raises NoAnswer."""
    loop = network.loop
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any) -> None:
        if not answer.done():
            answer.set_result(value)

    def reply(value: Any) -> None:
        network.send(target, source, lambda: settle(value))

    def give_up() -> None:
        if not answer.done():
            answer.set_exception(NoAnswer(f"{target} does not answer {source}"))

    # In no process: messages go on without their sender.
    contextvars.Context().run(lambda: network.send(source, target, lambda: do(reply)))
    limit = loop.call_later(timeout_s, give_up)
    try:
        return await answer
    finally:
        limit.cancel()


class RemoteStore:
    """The store as `node` reaches it. `cluster` is what answers."""

    def __init__(
        self, cluster: MemoryCluster, network: Network, node: str, waiting: PendingWatches, *, timeout_s: float = 5.0
    ) -> None:
        self.cluster = cluster
        self.node = node
        self._network = network
        self._waiting = waiting
        self._timeout_s = timeout_s
        self.longest_poll_s = LONGEST_POLL_S

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        found: KeyValue | None = await self._call(lambda: self.cluster.get(key))
        return found

    async def list(self, prefix: str) -> KeyListing:
        """See `Store.list`."""
        found: KeyListing = await self._call(lambda: self.cluster.listing(prefix))
        return found

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> KeyListing:
        """See `Store.newest`."""
        found: KeyListing = await self._call(lambda: self.cluster.newest(prefix, limit, before))
        return found

    async def between(self, first: str, behind: str, limit: int) -> KeyListing:
        """See `Store.between`."""
        found: KeyListing = await self._call(lambda: self.cluster.between(first, behind, limit))
        return found

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        check_transaction(compares, writes)
        made: TxnResult = await self._call(lambda: self.cluster.transact(compares, writes))
        return made

    async def grant(self, ttl: int) -> int:
        """See `Store.grant`."""
        lease: int = await self._call(lambda: self.cluster.grant(ttl))
        return lease

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        lives_s: float = await self._call(lambda: self.cluster.keep_alive(lease))
        return lives_s

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        await self._call(lambda: self.cluster.revoke(lease))

    async def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """See `Store.watch`."""
        known: int | None = None
        while True:
            try:
                if known is None:
                    listing = await self.list(prefix)
                    known = listing.revision
                    yield WatchBatch(tuple(WatchEvent("put", kv) for kv in listing.kvs), known, reset=True)
                batches = await self._poll(prefix, known)
            except StoreUnavailable:
                await asyncio.sleep(0.5)
                continue
            if batches is None:
                known = None
                continue
            for batch in batches:
                known = batch.revision
                yield batch

    async def close(self) -> None:
        """See `Store.close`."""

    async def _poll(self, prefix: str, known: int) -> tuple[WatchBatch, ...] | None:
        """Return the changes after `known` once there are some, nothing after a timeout, or None after a compaction."""

        def do(reply: Callable[[Any], None]) -> None:
            self._waiting.add(prefix, known, reply)

        try:
            found: tuple[WatchBatch, ...] | None = await ask(
                self._network, self.node, STORE, do, timeout_s=self.longest_poll_s
            )
        except NoAnswer:
            return ()
        return found

    async def _call(self, do: Callable[[], Any]) -> Any:
        def answer(reply: Callable[[Any], None]) -> None:
            if self.cluster.stopped:
                return
            try:
                reply((do(), None))
            except LeaseLost as error:
                reply((None, error))

        try:
            value, error = await ask(self._network, self.node, STORE, answer, timeout_s=self._timeout_s)
        except NoAnswer as error:
            raise StoreUnavailable(str(error), where="simulated store") from None
        if error is not None:
            raise LeaseLost(error.what, fix=error.fix)
        return value


class PendingWatches:
    """The server's side of watches: the watchers of each prefix. Abandoned ones are removed."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._waiting: list[tuple[str, int, float, Callable[[Any], None]]] = []
        cluster.listeners.append(self._changed)

    def add(self, prefix: str, known: int, reply: Callable[[Any], None]) -> None:
        """Answered now if there is something, or once there is."""
        until = self._cluster.clock.monotonic() + LONGEST_POLL_S
        found = None if self._cluster.stopped else self._cluster.events_since(known, prefix)
        if self._cluster.stopped or found == ():
            self._waiting.append((prefix, known, until, reply))
        else:
            reply(found)

    def look(self) -> None:
        """Answer whom there is something to tell: after an outage, or when history was forgotten."""
        waiting, self._waiting = self._waiting, []
        for prefix, known, until, reply in waiting:
            if until > self._cluster.clock.monotonic():
                self.add(prefix, known, reply)

    def _changed(self, events: tuple[WatchEvent, ...]) -> None:
        now, waiting = self._cluster.clock.monotonic(), self._waiting
        self._waiting = []
        for prefix, known, until, reply in waiting:
            if until <= now:
                continue
            if any(event.kv.key.startswith(prefix) for event in events):
                reply(self._cluster.events_since(known, prefix))
            else:
                self._waiting.append((prefix, known, until, reply))
