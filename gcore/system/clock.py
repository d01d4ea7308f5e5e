"""The only module that reads time and sleeps; and the delays between retries.

Other modules get a `Clock`, so that tests and the simulation can use a fake one (`gcore.testing.FakeClock`). `monotonic` orders and measures;
`wall` is only for display and records, and never compared.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Reads the time and sleeps. All times are seconds, as floats."""

    def monotonic(self) -> float:
        """Return seconds since a fixed moment of this process; never decreases."""
        ...

    def wall(self) -> float:
        """Return seconds since the Unix epoch, for display."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep for at least `seconds`."""
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
"""The delay doubles with each retry, between these bounds."""


def retry_delay(tries: int) -> float:
    """Return the seconds to wait before the next try, after `tries` (at least 1) have failed."""
    return min(FIRST_DELAY_S * 2.0 ** min(tries - 1, 16), LONGEST_DELAY_S)
