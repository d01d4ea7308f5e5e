"""A lease that is renewed while its process lives. Keys under the lease are valid only that long.

`run` renews the lease, in the caller's task group, and raises `LeaseLost` when the store says that the lease has ended.
While the store does not answer, `run` keeps trying without limit: after an outage the store gives leases their full TTL
again, and nothing expires without a leader. `valid_until` is the time of the monotonic clock before which the lease
cannot have ended; it is counted from *before* the renewal was sent. After that time `alive` is false until a renewal
succeeds.

A session gives no mutual exclusion: the process may be stopped right after it checked `alive`. Only transactions with
compares prevent that something happens twice.
"""

from __future__ import annotations

import asyncio
import logging

from gcore.errors import LeaseLost, StoreUnavailable
from gcore.store.types import LeaseTimes, Store
from gcore.system.clock import Clock

TTL_S = 15
log = logging.getLogger(__name__)


class Session:
    """One lease and its renewal. Created by `open`. `lease`: its ID. `lost`: set when the store says that it has ended."""

    def __init__(self, store: Store, clock: Clock, *, lease: int, valid_until: float, times: LeaseTimes) -> None:
        self.lease = lease
        self.lost = asyncio.Event()
        self._store = store
        self._clock = clock
        self.valid_until = valid_until
        """Monotonic time before which the lease cannot have ended, unless it was revoked."""
        self._times = times
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, store: Store, *, clock: Clock, ttl: int = TTL_S, interval_s: float | None = None) -> Session:
        """Create a lease of `ttl` seconds. `run` renews it every `interval_s` seconds (None: three times per TTL).

        The timeout of a renewal is set in the store's client; it must fit these two (`gcore.store.types`). Raises
        StoreUnavailable; if the lease was created nevertheless, it expires.
        """
        before = clock.monotonic()
        lease = await store.grant(ttl)
        return cls(
            store,
            clock,
            lease=lease,
            valid_until=before + ttl,
            times=LeaseTimes.of(ttl, tick_s=interval_s),
        )

    def alive(self, now: float) -> bool:
        """Return whether the lease certainly exists at `now`, a time of the monotonic clock."""
        return not self.lost.is_set() and not self._closed.is_set() and now < self.valid_until

    async def run(self) -> None:
        """Renew the lease until `close`. Raises LeaseLost when the store says that the lease has ended."""
        wait_s = self._times.tick_s
        while not await self._closed_within(wait_s):
            before = self._clock.monotonic()
            try:
                lives_s = await self._store.keep_alive(self.lease)
            except StoreUnavailable as error:
                log.warning("could not renew lease %x: %s", self.lease, error)
                wait_s = min(self._times.retry_s, self._times.tick_s)
            except LeaseLost:
                if self._closed.is_set():  # `close` ended it
                    return
                self.lost.set()
                raise
            else:
                self.valid_until = max(self.valid_until, before + lives_s)
                wait_s = self._times.tick_s

    async def close(self) -> None:
        """End the lease, which deletes its keys; `run` returns. If the store is unavailable, the lease expires later."""
        self._closed.set()
        try:
            await self._store.revoke(self.lease)
        except StoreUnavailable as error:
            log.warning("could not revoke lease %x; it will expire: %s", self.lease, error)

    async def _closed_within(self, seconds: float) -> bool:
        waits = [asyncio.ensure_future(self._closed.wait()), asyncio.ensure_future(self._clock.sleep(seconds))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._closed.is_set()
