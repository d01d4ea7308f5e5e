"""An emulated slot, or several that have engines in common, in an event loop: what is done to its devices, and
when what they have made is delivered.

One alarm a slot, set for the next end of any of its devices; nothing runs between two of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gcore.clock import Clock
from gcore.emulated.device import Device
from gcore.emulated.slot import Slot
from gcore.rollout.engine.tasks import Delivery

Deliver = Callable[[list[Delivery]], None]


class LiveSlot:
    """A slot. Belongs to the loop in which something is first done to it."""

    def __init__(self, clock: Clock, speedup: float) -> None:
        self._clock = clock
        self._speedup = speedup
        self._slot = Slot()
        self._deliver: dict[Device, Deliver] = {}
        self._alarm: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Emulated seconds."""
        return self._clock.monotonic() * self._speedup

    def add(self, device: Device, deliver: Deliver, on: tuple[str, ...] = ("",)) -> None:
        """It is resident from now on, on these slots; `deliver` is handed what ends."""
        now = self.now()
        self._advance(now)
        self._deliver[device] = deliver
        self._slot.add(device, now, on)

    def remove(self, device: Device) -> None:
        """It is gone, with all that it had under way."""
        now = self.now()
        self._advance(now)
        del self._deliver[device]
        self._slot.remove(device, now)
        self._set_alarm()

    def do(self, device: Device, deed: Callable[[float], list[Delivery] | None]) -> None:
        """`deed` is done to the device, at the moment that it is given; to one that is gone nothing is."""
        now = self.now()
        self._advance(now)
        if (deliver := self._deliver.get(device)) is not None:
            deliver(deed(now) or [])
        self._slot.share(now)
        self._set_alarm()

    def _advance(self, now: float) -> None:
        for device, ended in self._slot.advance(now):
            self._deliver[device](ended)

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        at = self._slot.wake_at()
        if at is not None:
            delay = max(0.0, at - self.now()) / self._speedup
            self._alarm = asyncio.get_running_loop().call_later(delay, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self.now()
        self._advance(now)
        self._slot.share(now)
        self._set_alarm()
