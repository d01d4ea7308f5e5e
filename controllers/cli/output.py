"""Tables and JSON of the messages of the job API, and text that is safe to print.

`-o json` has every field under its API name; tables show a selection. Models and datasets may write control characters that move the cursor,
so every text from a spec, a model or a dataset is printed through `printable_text`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controllers.cli.terminal import STATE_COLOURS, Rows, rows_table
from controllers.cli.view.state import (
    BestPoint,
    JobSnapshot,
    NodeView,
    RollbackPoint,
    SourceFigures,
    WaitPoint,
    WarningPoint,
)
from gcore.config.data import OF_PART, REWARD
from gcore.ledger.records.restart_reasons import restart_sentence
from gcore.quickstart import NAMES

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gcore.api.v1 import jobs_pb2 as pb

LEVELS = " ▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
MIN_CHART_VALUES = 3


def printable_text(text: str, limit: int = 60) -> str:
    """Make `text` safe to print: on one line, truncated to `limit` characters, with control and invisible characters
    escaped."""
    shown = "".join(c if c == " " or _harmless(c) else _spelt(c) for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def distinguish_texts(texts: Sequence[str], limit: int = 60) -> list[str]:
    """Make each of `texts` safe to print (`printable_text`). If one is longer than `limit` characters, the first words
    that all have in common (such as a system message) are replaced by "…", so that the differences remain visible."""
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)) if len(texts) > 1 else ()
    end = max((n + 1 for n, column in enumerate(alike) if column[0].isspace()), default=0)
    if not end or all(len(text) <= limit for text in texts):
        return [printable_text(text, limit) for text in texts]
    return ["…" + printable_text(text[end:], limit - 1) for text in texts]


def _harmless(character: str) -> bool:
    return unicodedata.category(character)[0] not in "CZ"


def _spelt(character: str) -> str:
    return character.encode("unicode_escape", errors="backslashreplace").decode()


def format_seconds(value: float) -> str:
    """Format a duration in seconds for people: 0.42s, 12s, 3m05s, 2h07m."""
    if value < 10:
        return f"{value:.2f}s"
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def bin_points(points: Sequence[tuple[float, float]], width: int) -> tuple[float | None, ...]:
    """The mean value of the points in each of `width` chart columns; None for a column without a point.

    `points`: (place, value); the place is the horizontal position in the chart, 0 to 1.
    """
    sums = [0.0] * width
    counts = [0] * width
    for place, value in points:
        column = min(width - 1, max(0, int(place * width)))
        sums[column] += value
        counts[column] += 1
    return tuple(s / n if n else None for s, n in zip(sums, counts, strict=True))


def fill_gaps(values: Sequence[float | None], end: int) -> tuple[float | None, ...]:
    """Fill each empty chart column (None) up to column `end` with the value before it, for values that are not measured
    in every step."""
    result: list[float | None] = []
    last: float | None = None
    for column, value in enumerate(values):
        last = value if value is not None else last
        result.append(value if value is not None else last if column <= end else None)
    return tuple(result)


def draw_chart(values: Sequence[float | None], *, height: int, low: float, high: float) -> tuple[str, ...]:
    """Draw a column chart as `height` lines of text, top first; None: an empty column.

    `low`, `high`: the ends of the axis. A value at or below `low` still gets the lowest mark, one above `high` the
    highest.
    """
    steps = height * (len(LEVELS) - 1)
    span = (high - low) or 1.0
    filled = [None if v is None else max(1, min(steps, round((v - low) / span * steps))) for v in values]
    lines = []
    for row in range(height - 1, -1, -1):
        base = row * (len(LEVELS) - 1)
        lines.append("".join(" " if f is None else LEVELS[max(0, min(len(LEVELS) - 1, f - base))] for f in filled))
    return tuple(lines)


def scale_chart(values: Sequence[float], *, clip_first: bool = False) -> tuple[float, float]:
    """Choose the lower and upper end of a chart's axis: round numbers close to the range of `values`.

    `clip_first`: for times and rates, whose first step includes the start of engines and train ranks. The first value does not count if it is
    farther from the later ones than these are apart; `draw_chart` then draws it at the end of the axis.
    """
    known = list(values)
    if clip_first and first_is_outlier(known):
        known = known[1:]
    low, high = min(known, default=0.0), max(known, default=1.0)
    if high - low <= 1e-9 * max(1.0, abs(low), abs(high)):
        return (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (min(0.0, low), max(0.0, high))
    unit = 10.0 ** math.floor(math.log10(high - low))
    step = unit * max(share for share in (0.1, 0.2, 0.5, 1.0) if share * unit * 4 <= high - low)
    return min(low, math.floor(low / step) * step), max(high, math.ceil(high / step) * step)


def first_is_outlier(values: Sequence[float]) -> bool:
    """Whether the first of at least three values is farther from the range of the others than the width of that range."""
    if len(values) < MIN_CHART_VALUES:
        return False
    first, low, high = values[0], min(values[1:]), max(values[1:])
    return max(low - first, first - high) > high - low


def divide_cells(amounts: Mapping[str, float], width: int) -> dict[str, int]:
    """Divide the `width` cells of a bar in proportion to `amounts`: the number of cells by name. They sum to `width`
    (largest remainders)."""
    total = sum(amounts.values())
    if total <= 0:
        return {}
    exact = {name: amount / total * width for name, amount in amounts.items()}
    cells = {name: int(share) for name, share in exact.items()}
    for name in sorted(exact, key=lambda n: cells[n] - exact[n])[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def shard_strip(owned: Collection[int], count: int, width: int) -> str:
    """Draw which of the shards 0 to `count`-1 a node owns (`owned`), in at most `width` characters.

    A character stands for a range of shards and is fuller the more of them are owned. All ranges but the last have
    equal length.
    """
    mine = frozenset(owned)
    line = []
    for cell in _cells(count, width):
        share = sum(shard in mine for shard in cell) / len(cell)
        line.append("·" if share == 0 else SHADES[max(1, round(share * (len(SHADES) - 1)))])
    return "".join(line)


def moved_cells(moved: Collection[int], count: int, width: int) -> frozenset[int]:
    """Positions of the characters of `shard_strip` whose range contains a shard in `moved`."""
    return frozenset(index for index, cell in enumerate(_cells(count, width)) if any(s in moved for s in cell))


def _cells(count: int, width: int) -> tuple[range, ...]:
    if count <= 0:
        return ()
    each = -(-count // width)
    return tuple(range(first, min(count, first + each)) for first in range(0, count, each))


def format_measure(metric: str, value: float) -> str:
    """Format a metric with its value: `accuracy 98.5%`, `pass@4 71.2%`, but `reward 0.712` and `mean@4 0.712`, because
    a reward need not be a share. The mean of a reward part is a percentage if it is between 0 and 1: `judged 95.3%`,
    `stars 3.214`."""
    if metric.startswith(OF_PART):
        return f"{metric.removeprefix(OF_PART)} {f'{value:.1%}' if 0 <= value <= 1 else f'{value:.3f}'}"
    number = f"{value:.3f}" if metric == REWARD or metric.rpartition("/")[2].startswith("mean@") else f"{value:.1%}"
    return f"{metric} {number}"


def format_measures(metrics: Mapping[str, float], accuracy: float | None) -> list[str]:
    """Format the metrics of an evaluation set. Those that equal its `accuracy` are omitted: pass@1, and mean@N if all
    rewards are 0 or 1."""

    def place(metric: str) -> tuple[str, int]:
        name, _, number = metric.partition("@")
        return name, int(number) if number.isdecimal() else 0

    told = {m: v for m, v in metrics.items() if m != "pass@1" and not (m.startswith("mean@") and v == accuracy)}
    return [format_measure(metric, told[metric]) for metric in sorted(told, key=place)]


def format_part_measures(metrics: Mapping[str, float]) -> list[str]:
    """Format the means of the reward parts among the metrics of an evaluation set, also those that equal the accuracy."""
    return [format_measure(metric, value) for metric, value in sorted(metrics.items()) if metric.startswith(OF_PART)]


def source_line(source: SourceFigures, *, pictures: bool = False) -> str:
    """Prompt outcomes and means of a source: `120 trained, 3 filtered, 0 failed; reward 0.531, length 3.1, 4%
    truncated; accuracy 75.0%`. `pictures`: whether the policy generates pictures, which have denoising steps."""
    words = [f"{source.trained} trained, {source.filtered} filtered, {source.failed} failed"]
    means = []
    if source.mean_reward is not None:
        means.append(f"reward {source.mean_reward:.3f}")
    if source.mean_length is not None:
        means.append(f"denoising steps {source.mean_length:.4g}" if pictures else f"length {source.mean_length:.1f}")
    if source.truncated is not None and not pictures:
        means.append(f"{source.truncated:.0%} truncated")
    if means:
        words.append(", ".join(means))
    if source.accuracy is not None:
        told = [f"accuracy {source.accuracy:.1%}", *format_measures(source.metrics, source.accuracy)]
        if source.eval_unscored:
            told.append(f"{source.eval_unscored} responses not scored")
        words.append(", ".join(told))
    return "; ".join(words)


class Output(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"

    @property
    def is_for_programs(self) -> bool:
        """Whether the format is JSON or YAML, which have all fields under their API names; a table shows a selection."""
        return self is not Output.TABLE

    def text(self, tree: Any) -> str:
        """Encode a tree of dicts and lists in this format: YAML, or else JSON."""
        return as_yaml(tree) if self is Output.YAML else as_json(tree)


def as_json(tree: Any) -> str:
    """Encode `tree` as indented JSON, keys in their given order. NaN and infinity, which JSON does not have, become
    null."""
    try:
        return json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(tree), indent=2, ensure_ascii=False, allow_nan=False)


def as_yaml(tree: Any) -> str:
    """Encode `tree` as YAML, keys in their given order, without a trailing newline. NaN and infinity become null."""
    import yaml

    text = yaml.safe_dump(
        _plain(_finite(tree)), sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(tree: Any) -> Any:
    """Replace StrEnum members in a tree by plain text, because PyYAML writes a subclass of str with its type."""
    match tree:
        case dict():
            return {str(key): _plain(value) for key, value in tree.items()}
        case list():
            return [_plain(value) for value in tree]
        case StrEnum():
            return tree.value
    return tree


def _finite(tree: Any) -> Any:
    match tree:
        case float():
            return tree if math.isfinite(tree) else None
        case dict():
            return {key: _finite(value) for key, value in tree.items()}
        case list() | tuple():
            return [_finite(value) for value in tree]
    return tree


MOST_VIOLATIONS = 20
"""Maximum number of violations in a table; JSON has all."""


def job_snapshot(job: pb.Job) -> JobSnapshot:
    """Convert a job of the API into the `JobSnapshot` that tables and live views render."""
    from gcore.client.calls import job_state_name

    try:
        spec = json.loads(job.spec_json) if job.spec_json else {}
    except ValueError:
        spec = {}
    tree = message_tree(job, *(field.name for field in job.DESCRIPTOR.fields if field.name != "spec_json"))
    return JobSnapshot(
        **tree
        | {
            "state": job_state_name(job.state),
            "spec": spec if isinstance(spec, dict) else {},
            "namespace": job.namespace or "default",
            "shares": tuple(NodeView(share.node, shards=tuple(share.shards)) for share in job.shares),
            "waiting": tuple(WaitPoint(**wait) for wait in tree["waiting"]),
            "sources": tuple(SourceFigures(**source) for source in tree["sources"]),
            "warnings": tuple(WarningPoint(**warning) for warning in tree["warnings"]),
            "best": BestPoint(**tree["best"]) if tree["best"] is not None else None,
            "rollback": RollbackPoint(**tree["rollback"]) if tree["rollback"] is not None else None,
        }
    )


def job_tree(job: JobSnapshot) -> dict[str, Any]:
    """The job as a JSON object."""
    tree = dataclasses.asdict(job)
    tree["shares"] = {node.name: list(node.shards) for node in job.shares}
    return tree


def message_tree(message: Message, *names: str) -> dict[str, Any]:
    """The fields `names` (default: all) of an API message as a JSON object. Maps are sorted; absent fields are null."""
    fields = message.DESCRIPTOR.fields_by_name
    return {name: _field_tree(message, fields[name]) for name in names or fields}


def _field_tree(message: Message, field: Any) -> Any:
    value, inner = getattr(message, field.name), field.message_type
    if field.has_presence and not message.HasField(field.name):
        return None
    if inner is not None and inner.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [one if inner is None else message_tree(one) for one in value]
    return value if inner is None else message_tree(value)


def audit_tree(report: pb.AuditReport) -> dict[str, Any]:
    """The audit report as a JSON object."""
    return message_tree(
        report,
        *("clean", "violations", "findings", "steps", "epochs", "issued", "trained", "filtered", "failed", "in_flight"),
        *("groups_by_node", "lineages"),
    )


def jobs_table(jobs: Sequence[JobSnapshot]) -> Rows:
    """A table with one line per job."""
    from rich.text import Text

    headings = ("NAME", "UID", "STATE", "PRIORITY", "SLOTS", "STEP", "CREATED", "REASON")
    rows = (
        (
            printable_text(job.full_name),
            printable_text(job.uid),
            Text(
                job.state + (f" ({job.queue_position})" if job.queue_position else ""),
                style=STATE_COLOURS.get(job.state, ""),
            ),
            str(job.priority),
            str(job.slots or "-"),
            f"{job.step}/{job.of_steps}",
            format_time(job.created) if job.created else "",
            printable_text(job.reason, 80),
        )
        for job in jobs
    )
    return rows_table(headings, rows)


def printable_cells(*values: object) -> tuple[str, ...]:
    """Convert the values of a table row to text that is safe to print (`printable_text`)."""
    return tuple(printable_text(str(value)) for value in values)


def job_rows(job: JobSnapshot, now: float) -> dict[str, str]:
    """The rows of `gcore describe` (name and text). `now`: present time in seconds since the epoch."""
    rows = {
        "job": f"{printable_text(job.full_name)} ({printable_text(job.uid)})"
        + (f", owner {printable_text(job.owner)}" if job.owner else ""),
        "state": job.state + (f": {printable_text(job.reason, 300)}" if job.reason else ""),
        "slots": slots_line(job),
        "step": f"{job.step} of {job.of_steps}, lineage {job.lineage}",
        "created": format_time(job.created),
    }
    if job.ended:
        rows["ended"] = format_time(job.ended)
    rows["run folder"] = job.run_dir
    rows["checkpoint"] = job.checkpoint or "none yet"
    if job.best is not None:
        rows["best"] = best_line(job.best)
    for node in job.shares:
        rows[f"shards of {printable_text(node.name)}"] = f"{len(node.shards)}: {format_ranges(node.shards)}"
    for source in job.sources:
        rows[f"source {printable_text(source.name)}"] = source_line(source, pictures=job.generates_pictures)
    for number, wait in enumerate(job.waiting, 1):
        since = format_seconds(max(0.0, now - wait.since))
        rows[f"waits ({number})"] = f"{printable_text(wait.who)}: {printable_text(wait.what, 300)}, for {since}"
    if job.rollback is not None:
        back = job.rollback
        rows["last rollback"] = printable_text(restart_sentence(back.step, back.lineage, back.reason), 400)
    for number, warning in enumerate(job.warnings, 1):
        ago = f", {format_seconds(max(0.0, now - warning.time))} ago" if warning.time else ""
        told = f"{printable_text(warning.node)}: {printable_text(warning.sentence, 300)}"
        rows[f"warning ({number})"] = f"{told} ({printable_text(warning.topic)}{ago})"
    return rows


def slots_line(job: JobSnapshot) -> str:
    """Slots, limits and priority of a job: `4 (min 2, max 8), priority 0; position 3 in the queue`."""
    most = str(job.slots_max) if job.slots_max else "unlimited"
    bounds = f" (min {job.slots_min or 1}, max {most})" if not job.ended else ""
    queued = f"; position {job.queue_position} in the queue" if job.queue_position else ""
    return f"{job.slots or 'none'}{bounds}, priority {job.priority}{queued}"


def best_line(best: BestPoint) -> str:
    """The best evaluated step with its checkpoint folder: `step 32, accuracy 98.5%: FOLDER`."""
    where = best.checkpoint or ("the initial model" if best.step == 0 else "its checkpoint is not written yet")
    return f"step {best.step}, {format_measure(best.metric, best.value)}: {where}"


def audit_rows(report: pb.AuditReport) -> dict[str, str]:
    """The rows of `gcore audit` (name and text)."""
    told = list(report.violations)
    beyond = (
        told.pop() if 0 < len(report.findings) < len(told) else ""
    )  # The audit itself limits the number of violations.
    verdict = f"{len(told)} violation{'s' * (len(told) != 1)}" + (f", {beyond}" if beyond else "")
    rows = {
        "verdict": "clean" if report.clean else verdict,
        "steps": f"{report.steps}, lineage {report.lineages}; {report.epochs} complete data epochs",
        "prompts": f"{report.issued} sampled: {report.trained} trained, {report.filtered} filtered, "
        f"{report.failed} failed, {report.in_flight} in flight",
    }
    for node, count in sorted(report.groups_by_node.items()):
        rows[f"groups of {printable_text(node)}"] = str(count)
    for number, violation in enumerate(told[:MOST_VIOLATIONS], 1):
        rows[f"violation {number}"] = printable_text(violation, 500)
    if len(told) > MOST_VIOLATIONS:
        rows["not shown"] = f"and {len(told) - MOST_VIOLATIONS} more (-o json has {'these' if beyond else 'all'})"
    return rows


def format_ranges(numbers: Sequence[int]) -> str:
    """Format integers as ranges: `0-3, 7, 9-10`; `none` if there are none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(end) for end in part) for part in parts) or "none"


def format_time(epoch_s: float) -> str:
    """Format a time (seconds since the epoch) for people, in UTC; "-" if it is 0."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if epoch_s else "-"


PREPARED = ".cache/examples"
"""Default target folder of `gcore prepare`."""


def prepare_hint(text: str) -> str:
    """A hint to append to the error message `text`: if it names a missing file of an example, the command that creates
    it; else empty."""
    for path in re.findall(rf"(\S*{re.escape(PREPARED)}/[a-z-]+)/", text):
        name = Path(path).name
        if name in NAMES and not Path(path).exists():
            there = "" if Path(path).resolve() == Path(PREPARED, name).resolve() else f" --to {path}"
            return f". Create it with `gcore prepare {name}{there}`"
    return ""
