"""Screens that show a followed job: the live view on a terminal, plain lines for logs and pipes, and JSON.

All apply events to a `ViewState`. A plain line is a function of the previous state and the event; a missing number is "-" or omitted.
Held-out responses are shown with the first evaluation and with the one after the last step.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from controllers.cli.output import (
    Output,
    distinguish_texts,
    format_measures,
    format_part_measures,
    format_seconds,
    printable_text,
)
from controllers.cli.terminal import wrap_text
from controllers.cli.view.state import (
    PHASE_NAMES,
    AnswerPoint,
    EvalPoint,
    JobSnapshot,
    SetPoint,
    StepPoint,
    ViewState,
    WaitPoint,
)
from gcore.observability.events import JobEvent
from gcore.system.clock import Clock

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SHOWN_ANSWERS = 5
LONGEST_PATH = 1000
_NUMBER = re.compile(r"\d+(\.\d+)?")


def event_lines(before: ViewState, event: JobEvent) -> tuple[str, ...]:
    """The lines printed for `event`; none if it was already shown."""
    after = before.apply(event)
    if after is before:
        return ()
    if event.kind == "step" and after.points and after.points[-1] is not (before.points[-1] if before.points else None):
        return (step_line(after, after.points[-1]),)
    if event.kind == "eval" and after.evals and after.evals[-1] not in before.evals:
        return tuple(_eval_lines(after, after.evals[-1]))
    if event.kind == "fault":  # The author of the plug-in needs its traceback.
        trace = str(event.data.get("trace", "")).splitlines()
        return (f"fault: {printable_text(event.message, 500)}", *(f"  {printable_text(line, 300)}" for line in trace))
    text = printable_text(event.message, 500) or (
        printable_text(after.log[-1].text, 500) if after.log != before.log else ""
    )
    return (f"{event.kind}: {text}",) if text else ()


def trouble_lines(before: WaitPoint | None, who: str, why: str, now: float) -> tuple[str, ...]:
    """The lines to print when the problem of `who` changes from `before` to `why` (empty: solved).

    `before`: the last reported problem of `who`, or None. A reason that differs from it only in numbers is not printed
    again.
    """
    if not why:
        return (f"waiting: {who} recovered after {format_seconds(max(0.0, now - before.since))}",) if before else ()
    if before is not None and _NUMBER.sub("", before.what) == _NUMBER.sub("", why):
        return ()
    return (f"waiting: {who}: {printable_text(why, 500)}",)


def step_line(state: ViewState, point: StepPoint) -> str:
    """The line about a committed step: `step 12/150 reward 0.620 accuracy 0.450 length 3.1 812 tok/s generate 0.31s
    ...`, or of a policy that generates pictures `... denoising steps 5 31.2 pictures/s generate ...`.

    The accuracy is that of the newest evaluation. Phases follow in seconds, then the groups by node.
    """
    reward, length, denoising = (point.stats.get(name) for name in ("reward", "response_length", "denoising_steps"))
    accuracy = state.evals[-1].accuracy if state.evals else None
    words = [
        f"step {point.step}/{state.of_steps}",
        "reward " + ("-" if reward is None else f"{reward:.3f}"),
        "accuracy " + ("-" if accuracy is None else f"{accuracy:.3f}"),
        f"denoising steps {denoising:.4g}"
        if denoising is not None
        else "length " + ("-" if length is None else f"{length:.1f}"),
    ]
    if point.tokens_per_second is not None:
        words.append(f"{point.tokens_per_second:.0f} tok/s")
    if point.pictures_per_second is not None:
        words.append(f"{point.pictures_per_second:.1f} pictures/s")
    words += [f"{PHASE_NAMES[name]} {format_seconds(value)}" for name, value in point.phases.items()]
    if streamed := point.stats.get("parts"):
        words.append(f"parts {streamed:.0f}")
    if point.groups:
        words.append(
            "groups " + " ".join(f"{printable_text(name)}:{count}" for name, count in sorted(point.groups.items()))
        )
    if point.filtered:
        rate = point.stats.get("filter_rate")
        words.append(f"filtered {point.filtered}" + (f" ({rate:.0%})" if rate is not None else ""))
    if point.failed:
        words.append(f"failed {point.failed}")
    return " ".join(words)


def _eval_lines(state: ViewState, point: EvalPoint) -> Iterator[str]:
    one_by_one = len(point.by_source) > 1 or any(one.samples > 1 for one in point.sets.values())
    parts = [] if one_by_one else [part for one in point.sets.values() for part in format_part_measures(one.metrics)]
    measured = printable_text(", ".join([point.measured, *parts]), 500)
    yield f"eval: {measured} on {point.count} held-out prompts after step {point.step}"
    if one_by_one:
        sets = [set_line(point, name) for name in sorted(point.by_source)]
        yield "  " + ("; " if any(", " in one for one in sets) else ", ").join(sets)
    if point.unscored:
        yield f"  {point.unscored} responses could not be scored and count as incorrect"
    if len(state.evals) == 1 or point.step >= state.steps:
        answers = point.samples[:SHOWN_ANSWERS]
        for answer, prompt in zip(answers, distinguish_texts([answer.prompt for answer in answers]), strict=True):
            yield "  " + answer_line(answer, prompt)


def set_line(point: EvalPoint, name: str) -> str:
    """The result of one evaluation set: `sums 45.0%, pass@4 71.2%`; with the mean reward if it differs from the
    accuracy."""
    score = point.sets.get(name, SetPoint())
    return ", ".join(
        [f"{printable_text(name)} {point.by_source[name]:.1%}", *format_measures(score.metrics, point.by_source[name])]
    )


def answer_line(answer: AnswerPoint, prompt: str) -> str:
    """A held-out response with its verdict: `47+8= → 55 correct` or `47+8= → 54 incorrect, expected 55`; a picture with
    its file and its reward. `prompt`: the part to display."""
    verdict = "correct" if answer.right else "incorrect"
    if answer.picture:
        verdict += f", reward {answer.reward:.3g}"
    if answer.answer and not answer.right:
        verdict += f", expected {printable_text(answer.answer, 40)}"
    if answer.unscored:
        verdict = f"not scored: {printable_text(answer.unscored, 200)}"
    response = printable_text(answer.picture, LONGEST_PATH) or printable_text(answer.response) or "(empty)"
    return f"{prompt} → {response}  {verdict}"


class Screen(Protocol):
    """Shows the progress of one followed job. `state`: what was applied so far. Call the other methods only inside
    `with screen.open()`."""

    state: ViewState

    def open(self) -> AbstractContextManager[object]:
        """Take over the terminal; release it at exit."""
        ...

    def show(self, event: JobEvent) -> None:
        """Show an event."""
        ...

    def observe(self, job: JobSnapshot) -> None:
        """Apply the newest state of the job that the API returned."""
        ...

    def trouble(self, who: str, why: str, now: float) -> None:
        """Show the problem `why` of `who`; an empty `why` means that it is solved. `now`: seconds since the epoch."""
        ...


class PlainScreen:
    """Prints each event as a line on a console, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.state = ViewState()
        self._console = console
        self._troubles: dict[str, WaitPoint] = {}

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def trouble(self, who: str, why: str, now: float) -> None:
        """Print a line when the problem begins, when its reason changes, and when it is solved."""
        before = self._troubles.get(who)
        self._print(trouble_lines(before, who, why, now))
        if why:
            self._troubles[who] = WaitPoint(who, why, before.since if before else now)
        else:
            self._troubles.pop(who, None)

    def show(self, event: JobEvent) -> None:
        self._print(event_lines(self.state, event))
        self.state = self.state.apply(event)

    def observe(self, job: JobSnapshot) -> None:
        self.state = self.state.observe(job)

    def _print(self, lines: Iterable[str]) -> None:
        """Print lines. A full disk must not end the run, so that error is ignored; a closed pipe ends it."""
        width = self._console.width if self._console.is_terminal else None
        for line in lines:
            try:
                self._console.out(wrap_text(line, width, "  "), highlight=False)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise


def event_text(event: JobEvent, output: Output) -> str:
    """An event for programs: one line of JSON, or one YAML document."""
    return f"---\n{output.text(json.loads(event.to_line()))}" if output is Output.YAML else event.to_line()


class JsonScreen:
    """Prints events for programs: one JSON line or one YAML document each."""

    def __init__(self, console: Console, output: Output = Output.JSON) -> None:
        self._output = output
        self.state = ViewState()
        self._console = console

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def trouble(self, who: str, why: str, now: float) -> None:
        """Do nothing: a problem of this command is not an event of the job."""

    def show(self, event: JobEvent) -> None:
        self._console.out(event_text(event, self._output), highlight=False)
        self.state = self.state.apply(event)

    def observe(self, job: JobSnapshot) -> None:
        self.state = self.state.observe(job)


class LiveScreen:
    """The live view, drawn four times a second. Its last state stays on the terminal."""

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
        from controllers.cli.view.live import render_view

        return render_view(self.state, self._clock.wall(), self._console.width, self._console.height)


def choose_screen(console: Console, clock: Clock, *, plain: bool) -> Screen:
    """The live view on a terminal that can draw over a line; plain lines otherwise or with `plain`."""
    can_draw = console.is_terminal and not console.is_dumb_terminal
    return LiveScreen(console, clock) if can_draw and not plain else PlainScreen(console)
