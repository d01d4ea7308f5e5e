"""The one place where time is read and waited for; and the delays before a failed attempt is repeated.

Everything else is handed a `Clock`, so that tests and the simulation run on a fake one (`gcore.testing.FakeClock`). `monotonic`
orders and measures; `wall` is only shown to people or written into records, never compared.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, as floats."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this process; never goes backwards."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Give way for at least `seconds`."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
"""Twice as long each time."""


def retry_delay(tries: int) -> float:
    """Seconds to wait after `tries` (from 1) in vain."""
    return min(FIRST_DELAY_S * 2.0 ** min(tries - 1, 16), LONGEST_DELAY_S)
