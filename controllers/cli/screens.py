"""Where a followed job is shown: a terminal that is drawn over, or lines.

Both fold the events into a `ViewState` and hold it; neither asks the cluster anything (`following`).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from controllers.cli import view_plain
from controllers.cli.answers import Output
from controllers.cli.view_points import JobSnapshot, Wait
from controllers.cli.view_state import ViewState
from gcore.clock import Clock
from gcore.events import JobEvent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Screen(Protocol):
    """Shows a job. Events and observations only while `open()` is entered."""

    state: ViewState

    def open(self) -> AbstractContextManager[object]:
        """Take the terminal; give it back at the end."""
        ...

    def show(self, event: JobEvent) -> None:
        """Something happened."""
        ...

    def observe(self, job: JobSnapshot) -> None:
        """The API was asked."""
        ...

    def trouble(self, who: str, why: str, now: float) -> None:
        """Why `who` does not do what it should; nothing: it does. `now`: seconds since the epoch."""
        ...


class PlainScreen:
    """Lines on a console."""

    def __init__(self, console: Console) -> None:
        self.state = ViewState()
        self._console = console
        self._troubles: dict[str, Wait] = {}

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def trouble(self, who: str, why: str, now: float) -> None:
        """A line when it begins, when the reason becomes another, and when it is over."""
        before = self._troubles.get(who)
        self._print(view_plain.trouble_lines(before, who, why, now))
        if why:
            self._troubles[who] = Wait(who, why, before.since if before else now)
        else:
            self._troubles.pop(who, None)

    def show(self, event: JobEvent) -> None:
        self._print(view_plain.lines(self.state, event))
        self.state = self.state.apply(event)

    def observe(self, job: JobSnapshot) -> None:
        self.state = self.state.observe(job)

    def _print(self, lines: Iterable[str]) -> None:
        """A log on a full disk must not end what it tells of; whoever reads nothing more (a closed pipe) has ended it."""
        for line in lines:
            try:
                self._console.out(line, highlight=False)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise


def event_text(event: JobEvent, output: Output) -> str:
    """An event for programs: a line of JSON, or a document of YAML."""
    return f"---\n{output.text(json.loads(event.to_line()))}" if output is Output.YAML else event.to_line()


class JsonScreen:
    """Events as they are, one JSON object a line, or one YAML document each, for programs."""

    def __init__(self, console: Console, output: Output = Output.JSON) -> None:
        self._output = output
        self.state = ViewState()
        self._console = console

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def trouble(self, who: str, why: str, now: float) -> None:
        """Not an event."""

    def show(self, event: JobEvent) -> None:
        self._console.out(event_text(event, self._output), highlight=False)
        self.state = self.state.apply(event)

    def observe(self, job: JobSnapshot) -> None:
        self.state = self.state.observe(job)


class LiveScreen:
    """The view, drawn four times a second; its last state stays on the terminal."""

    def __init__(self, console: Console, clock: Clock) -> None:
        from rich.live import Live

        self.state = ViewState()
        self._console = console
        self._clock = clock
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=4, vertical_overflow="ellipsis"
        )

    def open(self) -> AbstractContextManager[object]:
        return self._live

    def trouble(self, who: str, why: str, now: float) -> None:
        self.state = self.state.with_trouble(who, why, now)

    def show(self, event: JobEvent) -> None:
        self.state = self.state.apply(event)

    def observe(self, job: JobSnapshot) -> None:
        self.state = self.state.observe(job)

    def _render(self) -> RenderableType:
        from controllers.cli.view_live import render

        return render(self.state, self._clock.wall(), self._console.width, self._console.height)


def choose_screen(console: Console, clock: Clock, *, plain: bool) -> Screen:
    """The live view on a terminal, unless lines are asked for."""
    return LiveScreen(console, clock) if console.is_terminal and not plain else PlainScreen(console)
