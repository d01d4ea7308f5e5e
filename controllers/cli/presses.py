"""Ctrl-C, once more: a press that comes while nobody can heed it is not lost."""

from __future__ import annotations

import signal
from types import FrameType


def press(number: int, frame: FrameType | None) -> None:
    """A handler by which another signal is what Ctrl-C is then: within a run of asyncio that cancels what is awaited, while a
    KeyboardInterrupt in the middle of some task would be told of with a traceback."""
    signal.raise_signal(signal.SIGINT)


class FurtherPresses:
    """From its making on, SIGINT and SIGTERM are remembered; from `heed` on, each is a KeyboardInterrupt."""

    def __init__(self) -> None:
        self._pressed = self._heeded = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def heed(self) -> None:
        """Raises KeyboardInterrupt now if one was remembered, and wherever the caller is at the next."""
        self._heeded = True
        if self._pressed:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True
        if self._heeded:
            raise KeyboardInterrupt
