"""Emulated slots that have engines in common, mostly one: who is resident there, and what they take from one another. Pure; the caller
says what time it is.

Those that sleep take nothing. Of those that are awake, whoever has sequences to decode shares the slot with the others that have:
of two that compute at once each goes half as fast, and as soon as one of them has nothing more to do, the other has all of the
slot. One that spans several slots goes no faster than on the one of them that most others compute on. What is copied (weights, memory that is given back and taken again) takes its time beside that.

Train ranks are processes of their own and share nothing here. At staleness 0 they compute only when no engine does, by the step's own
order; at a staleness above 0 a rank and an engine on one slot are emulated as if each had it for itself.
"""

from __future__ import annotations

from collections import Counter

from gcore.emulated.device import ALMOST, Device
from gcore.rollout.engine.tasks import Delivery


class Slot:
    """The devices on it, in one time. Whatever is done to one of them is done between `advance` and `share`, at the same moment."""

    def __init__(self) -> None:
        self._devices: dict[Device, tuple[str, ...]] = {}

    def add(self, device: Device, now: float, on: tuple[str, ...] = ("",)) -> None:
        """It is resident from now on, on these slots."""
        device.advance(now)
        self._devices[device] = on
        self.share(now)

    def remove(self, device: Device, now: float) -> None:
        """It is gone, with all that it had under way."""
        del self._devices[device]
        self.share(now)

    def advance(self, now: float) -> list[tuple[Device, list[Delivery]]]:
        """Time goes on for all of them: what ended until now, and whose it is. With one end the others' paces change, so each is
        taken in its turn."""
        found: list[tuple[Device, list[Delivery]]] = []
        while len(self._devices) > 1 and (at := self.wake_at()) is not None and at < now - ALMOST:
            found += self._to(at)
            self.share(at)
        return found + self._to(now)

    def share(self, now: float) -> None:
        """Who computes may have changed."""
        busy = Counter(slot for device, on in self._devices.items() if device.busy for slot in on)
        for device, on in self._devices.items():
            most = max(busy[slot] for slot in on)
            device.shared_by(max(1, most if device.busy else most + 1), now)

    def wake_at(self) -> float | None:
        """When something ends next, if nothing happens before; None: never."""
        return min((at for device in self._devices if (at := device.wake_at()) is not None), default=None)

    def _to(self, now: float) -> list[tuple[Device, list[Delivery]]]:
        return [(device, ended) for device in self._devices if (ended := device.advance(now))]
