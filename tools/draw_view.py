"""Draw the live view of a recorded run as a picture: `python -m tools.draw_view EVENTS.jsonl --out FILE.svg`.

The code that draws the terminal draws the picture too, from the events that `gcore run` recorded. The job's name is taken
from the `summary.json` beside the events, if there is one. `--sequence` draws an earlier moment.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from controllers.cli.view.state import ViewState
from gcore.errors import GcoreError, UsageError
from gcore.observability.events import JobEvent

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def replay_events(events: Path, *, until: int | None = None) -> ViewState:
    """The view after the recorded events, or after those up to sequence number `until`. Raises UsageError."""
    try:
        lines = events.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the events ({error})", where=str(events), fix="Name an events.jsonl of a run folder"
        ) from error
    state = _named(ViewState(), events.with_name("summary.json"))
    for number, line in enumerate(lines, 1):
        try:
            event = JobEvent.from_line(line)
        except ValueError as error:
            raise UsageError(
                "the line is no event", where=f"{events}:{number}", fix="Name an events.jsonl of a run folder"
            ) from error
        if until is None or event.sequence <= until:
            state = state.apply(event)
    return state


def render_svg(state: ViewState, *, width: int = 110) -> str:
    """The view as an SVG document."""
    from rich.console import Console

    from controllers.cli.view.live import render_view

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render_view(state, state.last_time or 0.0, width))
    # A fixed name for the style classes: by default it would be another one each time. Fonts are the reader's own: a
    # picture in a document fetches nothing.
    drawn = console.export_svg(title="gcore run", unique_id="gcore")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)


def _named(state: ViewState, summary: Path) -> ViewState:
    try:
        tree = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return state
    if not isinstance(tree, dict):
        return state
    return replace(state, job=str(tree.get("job", "")), uid=str(tree.get("uid", "")))


@app.command()
def draw(
    events: Annotated[Path, typer.Argument(help="events.jsonl of a run folder")],
    out: Annotated[Path, typer.Option(help="Where the SVG goes")],
    sequence: Annotated[int | None, typer.Option(help="Draw the moment of this event instead of the last")] = None,
    width: Annotated[int, typer.Option(help="Columns")] = 110,
) -> None:
    """Draw the live view of a recorded run."""
    drawn = render_svg(replay_events(events, until=sequence), width=width)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the picture ({error.strerror})", where=str(out), fix="Choose another --out"
        ) from error
    typer.echo(f"{out}")


if __name__ == "__main__":
    try:
        app()
    except GcoreError as error:
        typer.echo(f"draw_view: {error}", err=True)
        raise SystemExit(error.exit_code) from None
