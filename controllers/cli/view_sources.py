"""A job's sources as a person sees them: a line for each, where there is more than one. Pure.

The newest step's numbers, and the newest evaluation's. A source without a prompt in the newest step has a dash.
"""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from controllers.cli.view_points import SetPoint
from controllers.cli.view_state import ViewState
from controllers.cli.view_text import measures, visible

SHOWN = 6
"""Sources in the live view; the others are counted."""


def sources_of(state: ViewState) -> tuple[str, ...]:
    """The sources that the events tell of; none for a job with one."""
    stats = state.points[-1].stats if state.points else {}
    named = {key.partition("/")[2] for key in stats if key.startswith(("groups/", "filtered/", "failed/"))}
    if state.evals and (
        len(state.evals[-1].by_source) > 1 or any(one.samples > 1 for one in state.evals[-1].sets.values())
    ):
        named |= set(state.evals[-1].by_source)
    return tuple(sorted(named))


def sources_table(state: ViewState) -> Table | None:
    """The table; None for a job with one source."""
    names = sources_of(state)
    if not names:
        return None
    stats = state.points[-1].stats if state.points else {}
    scores = state.evals[-1].by_source if state.evals else {}
    sets = state.evals[-1].sets if state.evals else {}
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(
        *(Text(heading, style="dim") for heading in ("source", "groups", "reward", "length", "cut off", "accuracy"))
    )
    for name in names[:SHOWN]:
        table.add_row(
            Text(visible(name, 24)),
            _number(stats.get(f"groups/{name}"), "{:.0f}"),
            _number(stats.get(f"reward/{name}"), "{:.3f}"),
            _number(stats.get(f"response_length/{name}"), "{:.1f}"),
            _number(stats.get(f"truncated/{name}"), "{:.0%}"),
            Text(_measured(scores.get(name), sets.get(name))),
        )
    if len(names) > SHOWN:
        table.add_row(Text(f"and {len(names) - SHOWN} more", style="dim"))
    return table


def _measured(accuracy: float | None, of_set: SetPoint | None) -> str:
    """`45.0%, pass@4 71.2%`."""
    if accuracy is None:
        return "-"
    return ", ".join([f"{accuracy:.1%}", *measures(of_set.metrics if of_set is not None else {}, accuracy)])


def _number(value: float | None, form: str) -> Text:
    return Text("-" if value is None else form.format(value))
