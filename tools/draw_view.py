"""Draw the live view of a recorded run as a picture: `python -m tools.draw_view EVENTS.jsonl --out FILE.svg`.

The code that draws the terminal draws the picture too, from the events that `gcore run` recorded. The job's name is taken
from the `summary.json` beside the events, if there is one. `--sequence` draws an earlier moment. `--frames 16` draws an animated picture of the whole
run, with further pictures where shards move; a second of it is `--speed` seconds of the run.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
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
    for event in _parsed(lines, events):
        if until is None or event.sequence <= until:
            state = state.apply(event)
    return state


def _parsed(lines: Sequence[str], events: Path) -> Iterator[JobEvent]:
    for number, line in enumerate(lines, 1):
        try:
            yield JobEvent.from_line(line)
        except ValueError as error:
            raise UsageError(
                "the line is no event", where=f"{events}:{number}", fix="Name an events.jsonl of a run folder"
            ) from error


def render_animation(events: Path, *, frames: int, speed: float, width: int = 110) -> str:
    """The whole run as an SVG document of several pictures, each shown until the next one's time."""
    parsed = list(_parsed(events.read_text(encoding="utf-8").splitlines(), events))
    begin, end = parsed[0].time, parsed[-1].time
    even = {_last_before(parsed, begin + (end - begin) * part / (frames - 1)) for part in range(frames)}
    chosen = sorted(even | {place for place, event in enumerate(parsed) if event.kind in MOVES})
    times = [(parsed[place].time - begin) / speed for place in chosen]
    whole = times[-1] + LAST_FRAME_S
    styles, pictures, sizes = [], [], []
    for number, place in enumerate(chosen):
        state = replay_events(events, until=parsed[place].sequence)
        drawn = render_svg(state, width=width, name=f"f{number}")
        sizes.append(re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn))
        shown, hidden = times[number], times[number + 1] if number + 1 < len(times) else whole
        first, last = 100 * shown / whole, 100 * hidden / whole
        frame = f"0% {{visibility: {'hidden' if first else 'visible'}}} {first:.2f}% {{visibility: visible}} "
        frame += f"{last:.2f}% {{visibility: {'visible' if last >= 100 else 'hidden'}}} 100% {{visibility: hidden}}"
        styles.append(
            f"@keyframes s{number} {{{frame}}} #p{number} {{animation: s{number} {whole:.1f}s step-end infinite}}"
        )
        pictures.append(f'<g id="p{number}" visibility="hidden">{drawn}</g>')
    wide, high = (max(float(size[side]) for size in sizes if size) for side in (1, 2))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high:g}">'
    return f"{head}<style>{' '.join(styles)}</style>{''.join(pictures)}</svg>\n"


MOVES = ("member", "shards")
"""Kinds of events that always have a picture: the map of shards is drawn only while they move."""

LAST_FRAME_S = 4.0
"""How long the last picture is shown."""


def _last_before(events: Sequence[JobEvent], time: float) -> int:
    return max(place for place, event in enumerate(events) if event.time <= time or place == 0)


def render_svg(state: ViewState, *, width: int = 110, name: str = "gcore") -> str:
    """The view as an SVG document. `name`: begins the names of its style classes."""
    from rich.console import Console

    from controllers.cli.view.live import render_view

    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render_view(state, state.last_time or 0.0, width))
    # A fixed name for the style classes: by default it would be another one each time. Fonts are the reader's own: a
    # picture in a document fetches nothing.
    drawn = console.export_svg(title="gcore run", unique_id=name)
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
    frames: Annotated[int, typer.Option(help="Draw an animated picture of so many moments", min=0)] = 0,
    speed: Annotated[float, typer.Option(help="Seconds of the run in a second of an animated picture")] = 3.0,
) -> None:
    """Draw the live view of a recorded run."""
    if frames > 1:
        drawn = render_animation(events, frames=frames, speed=speed, width=width)
    else:
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
