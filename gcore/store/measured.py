"""A store whose calls are counted: how long each took, and which had no answer in time. Does nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from gcore.clock import Clock
from gcore.errors import StoreUnavailable
from gcore.metrics import Metrics
from gcore.store.types import Compare, Delete, KeyValue, Listing, Put, Store, TxnResult, WatchBatch

T = TypeVar("T")


class MeasuredStore:
    """`inner`, as `gcore.store.types.Store`. A watch is no call: it has no end."""

    def __init__(self, inner: Store, metrics: Metrics, clock: Clock) -> None:
        self._inner = inner
        self._metrics = metrics
        self._clock = clock

    async def get(self, key: str) -> KeyValue | None:
        """See `Store.get`."""
        return await self._timed("get", self._inner.get(key))

    async def list(self, prefix: str) -> Listing:
        """See `Store.list`."""
        return await self._timed("list", self._inner.list(prefix))

    async def newest(self, prefix: str, limit: int, before: int | None = None) -> Listing:
        """See `Store.newest`."""
        return await self._timed("newest", self._inner.newest(prefix, limit, before))

    async def between(self, first: str, behind: str, limit: int) -> Listing:
        """See `Store.between`."""
        return await self._timed("between", self._inner.between(first, behind, limit))

    async def transact(self, compares: Sequence[Compare], writes: Sequence[Put | Delete]) -> TxnResult:
        """See `Store.transact`."""
        return await self._timed("transact", self._inner.transact(compares, writes))

    async def grant(self, ttl: int) -> int:
        """See `Store.grant`."""
        return await self._timed("grant", self._inner.grant(ttl))

    async def keep_alive(self, lease: int) -> float:
        """See `Store.keep_alive`."""
        return await self._timed("keep_alive", self._inner.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        """See `Store.revoke`."""
        await self._timed("revoke", self._inner.revoke(lease))

    def watch(self, prefix: str) -> AsyncIterator[WatchBatch]:
        """See `Store.watch`."""
        return self._inner.watch(prefix)

    async def close(self) -> None:
        """See `Store.close`."""
        await self._inner.close()

    async def _timed(self, operation: str, call: Awaitable[T]) -> T:
        self._metrics.store_unavailable.labels(operation)  # there, before it counts anything
        begun = self._clock.monotonic()
        try:
            return await call
        except StoreUnavailable:
            self._metrics.store_unavailable.labels(operation).inc()
            raise
        finally:
            self._metrics.store_seconds.labels(operation).observe(max(self._clock.monotonic() - begun, 0.0))
