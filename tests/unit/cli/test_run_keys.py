"""A key press between two handled ones is not lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from controllers.cli.commands.run import RepeatedSignals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_press_before_it_is_heeded_counts_then_and_a_later_one_at_once(number: signal.Signals) -> None:
    presses = RepeatedSignals()
    os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        presses.heed()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_without_a_press_nothing_happens() -> None:
    RepeatedSignals().heed()
