"""A lease that is kept alive: under it stands whatever a process says of itself only while it lives.

`run` renews it, in the caller's task group, and ends in `LeaseLost` when the store says that the lease is gone. Only
the store can say so. While it does not answer, `run` goes on trying, for as long as that takes: a store that comes back
after an outage gives its leases their full time again, and nothing expires while it has no leader. What the session
knows by itself is `valid_until`: up to that moment of the monotonic clock the lease cannot have ended, because it is
counted from *before* the renewal was sent. After it, `alive` is false until a renewal succeeds; nothing more follows.

A session protects nothing. A process may be stopped right after it asked `alive`; what must not be done twice is
guarded by the compares of its transaction.
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
    """One lease. Made by `open`. `lease` is its id; `lost` is set once the store has said that it is gone."""

    def __init__(self, store: Store, clock: Clock, *, lease: int, valid_until: float, times: LeaseTimes) -> None:
        self.lease = lease
        self.lost = asyncio.Event()
        self._store = store
        self._clock = clock
        self.valid_until = valid_until
        """The moment of the monotonic clock before which the lease cannot have ended, unless it was revoked."""
        self._times = times
        self._closed = asyncio.Event()

    @classmethod
    async def open(cls, store: Store, *, clock: Clock, ttl: int = TTL_S, interval_s: float | None = None) -> Session:
        """Grant a lease of `ttl` seconds, to be renewed every `interval_s` (None: three times in its life).

        How long one renewal may take is the store's to keep (`gcore.store.client`), and ties to these two
        (`gcore.store.types`).

        Raises StoreUnavailable; a lease that was granted nevertheless then ends by itself.
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
        """Whether the lease surely lives at `now`, by the monotonic clock."""
        return not self.lost.is_set() and not self._closed.is_set() and now < self.valid_until

    async def run(self) -> None:
        """Renew until `close`. Raises LeaseLost when the store says that the lease has ended."""
        wait_s = self._times.tick_s
        while not await self._closed_within(wait_s):
            before = self._clock.monotonic()
            try:
                lives_s = await self._store.keep_alive(self.lease)
            except StoreUnavailable as error:
                log.warning("lease %x is not renewed: %s", self.lease, error)
                wait_s = min(self._times.retry_s, self._times.tick_s)
            except LeaseLost:
                if self._closed.is_set():  # it was we who ended it
                    return
                self.lost.set()
                raise
            else:
                self.valid_until = max(self.valid_until, before + lives_s)
                wait_s = self._times.tick_s

    async def close(self) -> None:
        """End the lease, and with it what stands under it; `run` returns. If the store is away, it ends by itself."""
        self._closed.set()
        try:
            await self._store.revoke(self.lease)
        except StoreUnavailable as error:
            log.warning("lease %x is left to end by itself: %s", self.lease, error)

    async def _closed_within(self, seconds: float) -> bool:
        waits = [asyncio.ensure_future(self._closed.wait()), asyncio.ensure_future(self._clock.sleep(seconds))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._closed.is_set()
