"""What the daemon tells whoever runs it: its health service, and systemd.

It is *ready* while it can work: its lease surely lives (so the store was reached) and its node is registered. Health says SERVING
then, and else NOT_SERVING; systemd is told READY when that is first so (it has no word for "not any more", but a status line), and
that the daemon stops, or reads its certificates anew. The watchdog is fed by the event loop: a daemon whose loop stands still is
killed and started again by systemd, and its workers do not notice.

Does not decide whether a daemon is ready (`controllers.life`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gcore.clock import Clock
from gcore.systemd import ServiceManager

FED_PER_LIMIT = 3.0
"""So often within its limit is the watchdog fed: one message may be late."""


class Notifying:
    """Of one daemon. `health`: sets what the health service answers."""

    def __init__(self, manager: ServiceManager, health: Callable[[bool], Awaitable[None]], clock: Clock) -> None:
        self._manager = manager
        self._health = health
        self._clock = clock
        self._told_ready = False
        self._stopping = False
        self.ready = False
        """As it was last told."""

    async def say(self, ready: bool, status: str) -> None:
        """Whether the daemon can work, and a sentence for people."""
        self.ready = ready and not self._stopping
        await self._health(self.ready)
        if self._stopping:
            return
        if ready and not self._told_ready:
            self._told_ready = True
            self._manager.tell("READY=1", f"STATUS={status}")
        else:
            self._manager.tell(f"STATUS={status}")

    async def stopping(self, status: str) -> None:
        """It hands over and ends; nobody is to come any more."""
        self._stopping = True
        self._manager.tell("STOPPING=1", f"STATUS={status}")
        await self.say(False, status)

    def reloading(self) -> None:
        """It reads anew what it was told; `reloaded` follows."""
        if self._told_ready and not self._stopping:
            micros = int(self._clock.monotonic() * 1e6)
            self._manager.tell("RELOADING=1", f"MONOTONIC_USEC={micros}")

    def reloaded(self, status: str) -> None:
        """It has, or could not: `status` says it."""
        if self._told_ready and not self._stopping:
            self._manager.tell("READY=1", f"STATUS={status}")

    async def feed_watchdog(self) -> None:
        """For ever; at once over where nobody counts."""
        limit = self._manager.watchdog_s
        while limit is not None:
            self._manager.tell("WATCHDOG=1")
            await self._clock.sleep(limit / FED_PER_LIMIT)
