"""How a preparation shows where it is: a bar on a terminal, a plain line now and then elsewhere, or nothing.

Shows what it is told; decides nothing. Everything goes to standard error, so that standard output stays the command's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINES = 8
"""About so many lines where there is no terminal."""


@dataclass(frozen=True, slots=True)
class TeachingProgress:
    """`update` of `updates` are done. `accuracy`: greedy, on held-out prompts, at the last look; None before the first."""

    update: int
    updates: int
    accuracy: float | None


class Reporter:
    """Shows nothing; the base of those that do. Use as a context manager around what it reports."""

    def report(self, at: TeachingProgress) -> None:
        """Called after every update."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @classmethod
    def for_terminal(cls, progress: bool, what: str = "warm start") -> Reporter:
        """What fits standard error: a bar, lines, or, without `progress`, nothing. `what`: what it is the progress of."""
        if not progress:
            return Reporter()
        console = Console(stderr=True)
        return BarReporter(console, what) if console.is_terminal else LineReporter(console, what)


class LineReporter(Reporter):
    """A line now and then, and one at the end."""

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what

    def report(self, at: TeachingProgress) -> None:
        every = max(1, at.updates // PLAIN_LINES)
        if at.update % every == 0 or at.update == at.updates:
            self._console.print(f"{self._what} {at.update}/{at.updates} {_accuracy(at)}".rstrip(), highlight=False)


class BarReporter(Reporter):
    """A bar with the time that is left."""

    def __init__(self, console: Console, what: str) -> None:
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(what, total=None, accuracy="")

    def report(self, at: TeachingProgress) -> None:
        self._bar.update(self._task, completed=at.update, total=at.updates, accuracy=_accuracy(at))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _accuracy(at: TeachingProgress) -> str:
    return "" if at.accuracy is None else f"{at.accuracy:.0%} of held-out prompts right"
