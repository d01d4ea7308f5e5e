"""The live view: one job on one screen.

`render_view` is a function of the state, the wall clock and the terminal size. From top to bottom it shows the progress of the job, the curves
of reward and held-out accuracy, and the seconds of the steps. Phases and waits of recent steps follow, then each controller, each source if
there are several, held-out responses before and now, and the newest events. "-" stands for an unknown value.

Charts are scaled by their data. The chart of seconds leaves out the first step if it is an outlier, because it includes the start of engines and
train ranks. A map of the shards is drawn while shards move or a shard has no living owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from controllers.cli.output import (
    bin_points,
    distinguish_texts,
    divide_cells,
    draw_chart,
    fill_gaps,
    first_is_outlier,
    format_measure,
    format_measures,
    format_seconds,
    moved_cells,
    printable_text,
    scale_chart,
    shard_strip,
)
from controllers.cli.terminal import (
    ACTIVE,
    ATTENTION,
    BAD,
    EVENT_STYLES,
    GOOD,
    HEADING,
    HELD_OUT_COLOUR,
    NODE_COLOURS,
    PHASE_COLOURS,
    QUIET,
    REWARD_COLOUR,
    STATE_COLOURS,
    wrap_text,
)
from controllers.cli.view.state import (
    PHASE_NAMES,
    PHASES,
    RECENT_STEPS,
    AnswerPoint,
    NodeView,
    SetPoint,
    StepPoint,
    ViewState,
)

SHOWN = 6
"""Maximum number of sources shown; a line counts the others."""


def list_sources(state: ViewState) -> tuple[str, ...]:
    """Names of the data sources and evaluation sets in the newest step and evaluation; empty for a job with a single
    source."""
    stats = state.points[-1].stats if state.points else {}
    named = {key.partition("/")[2] for key in stats if key.startswith(("groups/", "filtered/", "failed/"))}
    if state.evals and (
        len(state.evals[-1].by_source) > 1 or any(one.samples > 1 for one in state.evals[-1].sets.values())
    ):
        named |= set(state.evals[-1].by_source)
    return tuple(sorted(named))


def sources_table(state: ViewState) -> Table | None:
    """The table of data sources with the numbers of the newest step and evaluation; None for a job with a single
    source."""
    names = list_sources(state)
    if not names:
        return None
    stats = state.points[-1].stats if state.points else {}
    scores = state.evals[-1].by_source if state.evals else {}
    sets = state.evals[-1].sets if state.evals else {}
    table = Table.grid(padding=(0, 3, 0, 0))
    length = "steps" if state.generates_pictures else "length"
    table.add_row(
        *(Text(heading, style=QUIET) for heading in ("source", "groups", "reward", length, "truncated", "accuracy"))
    )
    for name in names[:SHOWN]:
        table.add_row(
            Text(printable_text(name, 24)),
            _number(stats.get(f"groups/{name}"), "{:.0f}"),
            _number(stats.get(f"reward/{name}"), "{:.3f}"),
            _number(stats.get(f"response_length/{name}"), "{:.1f}"),
            _number(stats.get(f"truncated/{name}"), "{:.0%}"),
            Text(_measured(scores.get(name), sets.get(name))),
        )
    if len(names) > SHOWN:
        table.add_row(Text(f"and {len(names) - SHOWN} more", style=QUIET))
    return table


def _measured(accuracy: float | None, of_set: SetPoint | None) -> str:
    """Accuracy and other metrics of an evaluation set: `45.0%, pass@4 71.2%`; `-` if it was not evaluated."""
    if accuracy is None:
        return "-"
    return ", ".join([f"{accuracy:.1%}", *format_measures(of_set.metrics if of_set is not None else {}, accuracy)])


def _number(value: float | None, form: str) -> Text:
    return Text("-" if value is None else form.format(value))


WAITS = {
    "wait_for_batch_s": "ranks wait {} for a batch",
    "wait_for_weights_s": "engines wait {} for weights",
    "tail_s": "tail {}",
}
"""How the view words the waits of a step, by the name of the statistic; `{}` is replaced by the duration."""


def usual_waits(points: Sequence[StepPoint]) -> dict[str, float]:
    """The median of each wait in `WAITS` over the given steps, in seconds, by the name of the statistic. Steps that
    lack a wait do not count."""
    told = {name: [point.stats[name] for point in points if name in point.stats] for name in WAITS}
    return {name: median(values) for name, values in told.items() if values}


def waits_line(waits: Mapping[str, float]) -> str:
    """Format the waits of a step (from `usual_waits`) and the bottleneck as one line; empty if no wait is known."""
    said = ", ".join(words.format(format_seconds(waits[name])) for name, words in WAITS.items() if name in waits)
    bottleneck = find_bottleneck(waits)
    return f"{said}; bottleneck: {bottleneck}" if bottleneck else said


def find_bottleneck(waits: Mapping[str, float]) -> str:
    """The phase of a step that train ranks or engines wait for the longest. Empty if unknown, for example if both share
    slots.

    `waits`: seconds by the name of the statistic.
    """
    batch, weights = waits.get("wait_for_batch_s"), waits.get("wait_for_weights_s")
    if batch is None or weights is None:
        return ""
    if weights >= batch:
        return "training"
    return "the tail of generation" if waits.get("tail_s", 0.0) > batch / 2 else "generation"


CHART_HEIGHT = 5
AXIS = 7
"""Columns of a chart's axis."""

HIGHLIGHT_S = 6.0
"""How long moved shards are highlighted."""

LOG_LINES = 8
"""Maximum lines of events on the screen; a long event takes several."""

EVENT_LINES = 3
"""Maximum lines of one event."""

ANSWERS_SHOWN = 5
WAITS_SHOWN = 2
WAIT_LINES = 3
"""Maximum lines of one wait report."""

GAP = 3
ROWS_WITH_ANSWERS = 37


def render_view(state: ViewState, now: float, width: int = 100, height: int | None = None) -> RenderableType:
    """Render the view at `now` (seconds since the epoch) for a terminal of `width` columns and `height` rows (None: unlimited).

    With few rows, sources and held-out responses are omitted, so that the events remain visible.
    """
    inner = max(40, min(width, 140)) - 4
    rows: list[RenderableType] = [
        _progress(state, now, inner),
        Text(),
        _charts(state, inner),
        Text(),
        _numbers(state, inner),
        *_seconds_chart(state, inner),
    ]
    rows += [_time_bar(state, inner), *_waits(state, now, inner), Text(), _controllers(state, now, inner)]
    if (sources := sources_table(state)) is not None and (height is None or height >= ROWS_WITH_ANSWERS):
        rows += [Rule("sources, newest step", style=QUIET, align="left"), sources]
    if state.evals and (height is None or height >= ROWS_WITH_ANSWERS):
        rows += [Rule("held-out responses", style=QUIET, align="left"), _answers(state)]
    rows += [Rule("events", style=QUIET, align="left"), *_log(state, inner)]
    return Panel(Group(*rows), title=_title(state), title_align="left", border_style=QUIET, width=inner + 4)


def _title(state: ViewState) -> Text:
    title = Text(" gcore  ", style=f"{HEADING} not dim")
    title.append(printable_text(state.job) or "a job")
    title.append("  ")
    title.append(printable_text(state.state), style=f"{STATE_COLOURS.get(state.state, '')}")
    if state.uid:
        title.append(f"  {printable_text(state.uid)}", style=QUIET)
    return title.append(" ")


def _progress(state: ViewState, now: float, width: int) -> RenderableType:
    line = Table.grid(expand=False, padding=(0, 2, 0, 0))
    share = state.step / state.steps if state.steps else 0.0
    words = [Text(f"step {state.step}/{state.of_steps}", style=HEADING), Text(f"{share:.0%}")]
    if state.started is not None:
        end = state.last_time if state.ended and state.last_time is not None else now
        words.append(Text(f"{format_seconds(max(0.0, end - state.started))} elapsed", style=QUIET))
    left = state.seconds_left
    if left and not state.ended:
        words.append(Text(f"about {format_seconds(left)} left", style=QUIET))
    if state.rollbacks:
        words.append(Text(f"rolled back {state.rollbacks}×", style=ATTENTION))
    room = width - sum(word.cell_len + 2 for word in words) - 2
    bar = ProgressBar(
        total=max(1, state.steps),
        completed=state.step,
        width=max(4, min(width // 3, room)),
        complete_style=ACTIVE,
        finished_style=GOOD,
    )
    for word in words:
        word.no_wrap, word.overflow = True, "ellipsis"
    line.add_row(words[0], bar, *words[1:])
    return line


def _charts(state: ViewState, width: int) -> RenderableType:
    cells = max(10, (width - 2 * AXIS - GAP) // 2)
    steps = max(1, state.steps, state.step)
    rewards = [((p.step - 1) / steps, p.stats["reward"]) for p in state.points if "reward" in p.stats]
    held_out = [(e.step / steps, e.accuracy) for e in state.evals]
    if state.is_graded:
        held_out = [(e.step / steps, e.mean_reward) for e in state.evals if e.mean_reward is not None]
    end = int((state.step / steps) * cells)
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_row(
        _chart(
            "reward",
            fill_gaps(bin_points(rewards, cells), end),
            f"{rewards[-1][1]:.3f}" if rewards else "-",
            REWARD_COLOUR,
        ),
        _chart(
            "held-out reward" if state.is_graded else "held-out accuracy",
            fill_gaps(bin_points(held_out, cells), end),
            _held_out(state),
            HELD_OUT_COLOUR,
        ),
    )
    return table


def _held_out(state: ViewState) -> str:
    """The newest held-out result as text: accuracy (`97.1%`), or with graded rewards the mean reward (`0.367`)."""
    if not state.evals:
        return "-"
    newest = state.evals[-1]
    return (
        f"{newest.mean_reward:.3f}" if state.is_graded and newest.mean_reward is not None else f"{newest.accuracy:.1%}"
    )


def _beside_held_out(state: ViewState) -> Iterator[tuple[str, str, str]]:
    """Further held-out numbers, as (name, text, format): the accuracy if the chart shows graded rewards, and the best
    value so far if another step than the newest has it."""
    if not state.evals:
        return
    newest, best = state.evals[-1], state.best
    if state.is_graded and newest.mean_reward is not None:
        yield "held-out accuracy", f"{newest.accuracy:.1%}", "{}"
    if best is not None and best.step != newest.step:
        value = format_measure(best.metric, best.value).removeprefix("accuracy ").removeprefix("reward ")
        yield "best", f"{value} (step {best.step})", "{}"


def _chart(name: str, values: tuple[float | None, ...], last: str, colour: str) -> RenderableType:
    head = Text.assemble((name, HEADING), "  ", (last, f"bold {colour}"), no_wrap=True, overflow="ellipsis")
    body = Table.grid()
    low, high = scale_chart([value for value in values if value is not None])
    drawn = draw_chart(values, height=CHART_HEIGHT, low=low, high=high)
    for row, line in enumerate(drawn):
        label = f"{high:>5.3g} ┤" if row == 0 else f"{low:>5.3g} ┤" if row == len(drawn) - 1 else "      │"
        body.add_row(Text(label, style=QUIET, no_wrap=True), Text(line, style=colour, no_wrap=True, overflow="crop"))
    return Group(head, body)


def _numbers(state: ViewState, width: int) -> RenderableType:
    """Render the metrics of the newest step. On a narrow terminal they wrap, but never between a name and its number."""
    stats = state.points[-1].stats if state.points else {}
    rate = state.points[-1].tokens_per_second if state.points else None
    shown: list[tuple[str, float | str | None, str]] = [
        ("length", stats.get("response_length"), "{:.1f}"),
        ("tokens/s", rate, "{:,.0f}"),
    ]
    if state.generates_pictures:
        shown = [
            ("denoising steps", stats.get("denoising_steps"), "{:.4g}"),
            ("pictures/s", stats.get("pictures_per_second"), "{:,.1f}"),
        ]
    shown += [
        ("loss", stats.get("loss"), "{:.3g}"),
        ("KL", stats.get("kl"), "{:.3g}"),
        ("clipped", stats.get("clip_fraction"), "{:.1%}"),
        ("gradient norm", stats.get("grad_norm"), "{:.4g}"),
        *([] if state.generates_pictures else [("entropy", stats.get("entropy"), "{:.3f}")]),
        ("learning rate", stats.get("learning_rate"), "{:.1e}"),
    ]
    if stats.get("filter_rate"):
        shown.append(("filtered", stats["filter_rate"], "{:.0%}"))
        shown.append(("unfiltered reward", stats.get("reward_before_filter"), "{:.3f}"))
    shown += _beside_held_out(state)
    lines = [Text()]
    for name, value, form in shown:
        number = Text.assemble((f"{name} ", QUIET), "-" if value is None else form.format(value))
        if lines[-1].cell_len + GAP + number.cell_len > width:
            lines.append(Text())
        lines[-1].append(" " * GAP if lines[-1].cell_len else "").append_text(number)
    return Group(*lines)


def _seconds_chart(state: ViewState, width: int) -> Iterator[RenderableType]:
    """Render a chart of the seconds per step on one line, if there are at least two steps."""
    steps = max(1, state.steps, state.step)
    seconds = [((p.step - 1) / steps, p.stats["seconds"]) for p in state.points if "seconds" in p.stats]
    if len(seconds) < 2:
        return
    cells = max(10, width // 3)
    columns = bin_points(seconds, cells)
    known = [value for value in columns if value is not None]
    low, high = scale_chart(known, clip_first=True)
    (drawn,) = draw_chart(fill_gaps(columns, int(state.step / steps * cells)), height=1, low=low, high=high)
    line = Text.assemble(("seconds per step ", QUIET), (drawn.rstrip(), ACTIVE), f"  {format_seconds(seconds[-1][1])}")
    if first_is_outlier(known):
        line.append(f"  (first {format_seconds(seconds[0][1])})", style=QUIET)
    yield line


def _time_bar(state: ViewState, width: int) -> RenderableType:
    # The median without the first step, which includes the start of engines and train ranks.
    recent = state.points[max(1, len(state.points) - RECENT_STEPS) :] or state.points
    usual = {phase: median(p.phases.get(phase, 0.0) for p in recent) if recent else 0.0 for phase in PHASES}
    head, legend = Text.assemble(("step ", QUIET), no_wrap=True), Text()
    for phase in PHASES:
        legend.append(f"  {PHASE_NAMES[phase]} ", style=PHASE_COLOURS[phase])
        legend.append(format_seconds(usual[phase]) if recent else "-")
    cells = divide_cells(usual, max(4, min(width // 4, width - head.cell_len - legend.cell_len)))
    if not cells:
        return head.append("-")
    for phase in PHASES:
        head.append("█" * cells.get(phase, 0), style=PHASE_COLOURS[phase])
    head.append_text(legend)
    if waits := waits_line(usual_waits(recent)):
        return Group(head, Padding(Text(waits, style=QUIET), (0, 0, 0, 7)))
    return head


def _controllers(state: ViewState, now: float, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    map_width = max(16, min(64, width - 42))
    has_map = shows_shards(state, now)
    shards = f"shards (of {state.shard_count or '?'})"
    headings = ("controller", shards, "", "groups", "now") if has_map else ("controller", shards, "groups", "now")
    table.add_row(*(Text(text, style=QUIET) for text in headings if text or has_map))
    groups = state.groups_by_node
    fresh = state.moved if now - state.moved_at < HIGHLIGHT_S else frozenset()
    for index, node in enumerate(sorted(state.nodes, key=lambda node: node.name)):
        colour = NODE_COLOURS[index % len(NODE_COLOURS)]
        lamp = Text("● " if node.alive else "✗ ", style=GOOD if node.alive else BAD)
        shard_map = [_shard_map(node, fresh, state.shard_count, map_width, colour)] if has_map else []
        table.add_row(
            lamp.append(printable_text(node.name, 20), style=colour if node.alive else BAD),
            *shard_map,
            Text(str(len(node.shards)), style=colour),
            Text(str(groups.get(node.name, 0))),
            Text(_doing(state, node), style="" if node.alive else BAD, overflow="ellipsis", no_wrap=True),
        )
    if not state.nodes:
        return Text("no controller runs the job yet", style=QUIET)
    return table


def shows_shards(state: ViewState, now: float) -> bool:
    """Whether to draw the map of shards: some moved in the last `HIGHLIGHT_S` seconds, or a shard of a running job has
    no living owner."""
    if state.ended or not any(node.shards for node in state.nodes):
        return False
    owned = sum(len(node.shards) for node in state.nodes if node.alive)
    return owned < state.shard_count or (bool(state.moved) and now - state.moved_at < HIGHLIGHT_S)


def _shard_map(node: NodeView, fresh: frozenset[int], count: int, width: int, colour: str) -> Text:
    marked = moved_cells(fresh & frozenset(node.shards), count, width)
    line = Text(no_wrap=True)
    for cell, character in enumerate(shard_strip(node.shards, count, width)):
        style = QUIET if character == "·" else f"bold reverse {colour}" if cell in marked else colour
        line.append(character, style=style)
    return line


def _doing(state: ViewState, node: NodeView) -> str:
    if not node.alive:
        return "gone"
    if state.ended:
        return "done"
    return "working" if node.shards else "idle"


def _waits(state: ViewState, now: float, width: int) -> Iterator[RenderableType]:
    """Render the wait reports of an unfinished job, the longest wait first."""
    waits = () if state.ended else sorted(state.waiting, key=lambda wait: wait.since)
    for wait in waits[:WAITS_SHOWN]:
        head = f"waits  {format_seconds(max(0.0, now - wait.since)):>6}  "
        yield _hanging(head, f"{wait.who}: {wait.what}", width, WAIT_LINES)


def _hanging(head: str, text: str, width: int, most: int, style: str = "") -> Text:
    """Lay out `text` to the right of `head`, wrapped on words in at most `most` lines of `width` columns."""
    room = max(10, width - len(head))
    lines = wrap_text(printable_text(text, room * most), room).split("\n")
    shown = Text.assemble((head, QUIET), no_wrap=True, overflow="ellipsis")
    for number, line in enumerate(lines[:most]):
        left = "\n" + " " * len(head) if number else ""
        rest = len(lines) > most and number == most - 1
        shown.append(left + (line[: room - 2] + " …" if rest else line), style=style)
    return shown


def _answers(state: ViewState) -> RenderableType:
    first, last = state.evals[0], state.evals[-1]
    now_by_prompt = dict(zip(_numbered(last.samples), last.samples, strict=True)) if last is not first else {}
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(
        Text("prompt", style=QUIET),
        Text(f"before ({first.accuracy:.1%})", style=QUIET),
        Text(f"after step {last.step} ({last.accuracy:.1%})" if last is not first else "now", style=QUIET),
        Text("expected" if any(answer.answer for answer in first.samples) else "", style=QUIET),
    )
    answers = first.samples[:ANSWERS_SHOWN]
    prompts = distinguish_texts([answer.prompt for answer in answers], 40)
    for before, name, prompt in zip(answers, _numbered(answers), prompts, strict=True):
        now = now_by_prompt.get(name)
        table.add_row(Text(prompt), _marked(before), _marked(now), Text(printable_text(before.answer, 24), QUIET))
    folders = (answer.picture.rpartition("/")[0] for answer in (*last.samples, *first.samples))
    folder = next((one for one in folders if one), "")
    return Group(table, Text(f"pictures in {printable_text(folder, 400)}", QUIET, overflow="fold")) if folder else table


def _numbered(answers: Sequence[AnswerPoint]) -> list[tuple[str, int]]:
    """Each response's prompt, and how many before it have the same prompt."""
    prompts = [answer.prompt for answer in answers]
    return [(prompt, prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]


def _marked(answer: AnswerPoint | None) -> Text:
    if answer is None:
        return Text("-", style=QUIET)
    right = answer.right
    text = Text("✓ " if right else "✗ ", style=GOOD if right else BAD)
    if answer.picture:
        return text.append(f"reward {answer.reward:.3g}")
    return text.append(printable_text(answer.response, 24) or "(empty)")


def _log(state: ViewState, width: int) -> Iterator[RenderableType]:
    """The newest events that fit into `LOG_LINES`, oldest first."""
    room, shown = LOG_LINES, []
    for line in reversed(state.log[-LOG_LINES:]):
        since = line.time - (state.started if state.started is not None else line.time)
        head = f"{format_seconds(max(0.0, since)):>7}  "
        text = _hanging(head, line.text, width, EVENT_LINES, EVENT_STYLES.get(line.kind, ""))
        room -= text.plain.count("\n") + 1
        if room < 0:
            break
        shown.append(text)
    yield from reversed(shown)
