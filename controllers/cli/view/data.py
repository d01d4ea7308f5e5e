"""Samples of a step, held-out responses, and the data of a spec, rendered for a terminal, as JSON or for a contact sheet.

Text of models and datasets goes through `clip_text` or `printable_text`, which escape characters that could move the cursor, hide text or
color it. Long texts are truncated; JSON has the full texts. Progress bars are drawn on standard error, only on a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from controllers.cli.output import format_ranges, message_tree, printable_text
from controllers.cli.terminal import ATTENTION, BAD, GOOD, HEADING, QUIET, Rows, rows_table
from gcore.errors import UsageError
from gcore.observability.contact_sheet import (
    HeldOutPicture,
    HeldOutStep,
    SheetCard,
    SheetPicture,
    SheetSection,
    held_out_section,
)
from gcore.rollout.environments.episode import mark_observed

if TYPE_CHECKING:
    from controllers.api.submission.checks import CheckedSource, CheckProgress
    from controllers.cli.view.state import AnswerPoint, EvalPoint, ViewState
    from gcore.api.v1 import jobs_pb2 as pb
    from gcore.data.stream import LengthReport

PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 2000, 1500

COLUMN_WIDTH = 36
"""Minimum width of a response in a row of several."""

STANDINGS = {2: ", currently being trained", 3: ", discarded by a rollback"}


def clip_text(text: str, limit: int, more: int = 0) -> str:
    """`text` with its line breaks, truncated to `limit` characters. `more`: number of characters that were not stored."""
    shown = "\n".join(printable_text(line, limit) for line in text[:limit].split("\n"))
    left = max(0, len(text) - limit) + more
    return f"{shown}… ({left} more characters)" if left else shown


def groups_tree(groups: Sequence[pb.SampleGroup]) -> dict[str, Any]:
    """Sample groups (prompts with their responses) of one step as a JSON object. `groups` must not be empty."""
    first = groups[0]
    return {
        "step": first.step,
        "lineage": first.lineage,
        "standing": _standing(first),
        "of": first.of,
        "groups": [_group_tree(group) for group in groups],
    }


def show_groups(console: Console, groups: Sequence[pb.SampleGroup]) -> None:
    """Print the sample groups (prompts with their responses) of one step below a heading. `groups` must not be empty."""
    first = groups[0]
    note = STANDINGS.get(first.standing, "")
    head = f"step {first.step}, lineage {first.lineage}{note}: {len(groups)} of {first.of} kept prompts"
    console.print(head, style=HEADING, markup=False, highlight=False)
    for group in groups:
        if console.is_terminal:
            console.print(_panel(group, console.width))
        else:
            console.print(_plain(group), markup=False, highlight=False, soft_wrap=True)


def reward_text(response: pb.SampleResponse) -> str:
    """Reward and advantage of a response as text: `reward 1, advantage +0.707`."""
    return f"reward {_number(response.reward)}, advantage {_advantage(response)}"


def response_details(response: pb.SampleResponse) -> str:
    """Reward parts, finish reason, lengths and weight versions of a response, as text."""
    parts = [f"{printable_text(part.name, 40)} {_number(part.value)}" for part in response.parts]
    told = [f"{response.observed_tokens} of them observed"] if response.observed_tokens else []
    masked = ["masked"] if response.masked else []
    length = f"{response.steps} denoising steps" if response.HasField("picture") else f"{response.tokens} tokens"
    ending = [printable_text(response.finish_reason), length, *told, *masked]
    return ", ".join([*parts, *ending, f"by {'/'.join(map(printable_text, response.versions))}"])


def mark_observed_text(response: pb.SampleResponse) -> str:
    """The text of a response, with marks around the parts that tools or environments wrote, and not the model."""
    return mark_observed(response.text.text, ((told.start, told.end) for told in response.observed))


def response_body(response: pb.SampleResponse) -> str:
    """The text of a response, or the picture that the policy generated."""
    if response.HasField("picture"):
        return picture_line(response.picture)
    return clip_text(mark_observed_text(response), RESPONSE_CHARACTERS, response.text.more)


def picture_line(picture: pb.SamplePicture) -> str:
    """A picture as text: its file, or its SHA-256 if the file was deleted, and its size in pixels."""
    where = printable_text(picture.file, 1000) if picture.file else f"sha256:{picture.sha256}, deleted"
    return f"picture: {where} ({picture.width} x {picture.height} pixels)"


def _panel(group: pb.SampleGroup, width: int) -> RenderableType:
    side_by_side = max(1, min(len(group.responses), (width - 4) // COLUMN_WIDTH))
    table = Table(box=box.SIMPLE_HEAD, show_header=False, expand=True, show_lines=True, pad_edge=False)
    for _ in range(side_by_side):
        table.add_column(ratio=1, overflow="fold")
    cells = [_cell(response) for response in group.responses]
    for first in range(0, len(cells), side_by_side):
        row = cells[first : first + side_by_side]
        table.add_row(*row, *[Text()] * (side_by_side - len(row)))
    prompt = Text(clip_text(group.prompt.text, PROMPT_CHARACTERS, group.prompt.more))
    answer = Text(f"answer: {clip_text(group.answer, 300)}", style=QUIET) if group.answer else Text()
    pictures = [Text(picture_line(one), style=QUIET, overflow="fold") for one in group.pictures]
    return Panel(Group(prompt, *pictures, answer, table), title=Text(_title(group)), title_align="left")


def _cell(response: pb.SampleResponse) -> RenderableType:
    style = GOOD if response.reward > 0 else BAD if response.reward < 0 else ATTENTION
    return Text.assemble(
        (f"{reward_text(response)}\n", f"bold {style}"),
        (f"{response_details(response)}\n", QUIET),
        response_body(response),
        *((f"\n{picture_line(one)}", QUIET) for one in response.pictures),
    )


def _plain(group: pb.SampleGroup) -> str:
    lines = [
        f"--- {_title(group)}",
        _indented("prompt", clip_text(group.prompt.text, PROMPT_CHARACTERS, group.prompt.more)),
        *(f"  {picture_line(one)}" for one in group.pictures),
    ]
    if group.answer:
        lines.append(_indented("answer", clip_text(group.answer, 300)))
    for response in group.responses:
        lines.append(f"  response {response.index}: {reward_text(response)}; {response_details(response)}")
        lines.append(_indented("", response_body(response)))
        lines += [f"    {picture_line(one)}" for one in response.pictures]
    return "\n".join(lines)


def _indented(name: str, text: str) -> str:
    body = text.replace("\n", "\n    ")
    return f"  {name}: {body}" if name else f"    {body}"


def _title(group: pb.SampleGroup) -> str:
    node = printable_text(group.holder.rpartition(".")[0] or group.holder)
    pictures = any(response.HasField("picture") for response in group.responses)
    tokens = "" if pictures else f", {group.prompt_tokens} tokens"
    return f"prompt {printable_text(group.ref)} of {printable_text(group.source or 'the data')}{tokens}, from {node}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _advantage(response: pb.SampleResponse) -> str:
    if not response.HasField("advantage"):
        return "not kept"
    mean = f"{response.advantage:+.3f}"
    if not response.HasField("advantage_least"):
        return mean
    return f"{mean} ({response.advantage_least:+.3f} to {response.advantage_most:+.3f})"


def _standing(group: pb.SampleGroup) -> str:
    return {1: "committed", 2: "under way", 3: "cut off"}.get(group.standing, "unknown")


def _group_tree(group: pb.SampleGroup) -> dict[str, Any]:
    prompt = {"prompt": group.prompt.text, "prompt_more": group.prompt.more}
    return {
        **message_tree(group, "ref", "source", "holder", "digest"),
        **prompt,
        "pictures": _picture_trees(group.pictures),
        **message_tree(group, "prompt_tokens", "answer", "temperature"),
        "responses": [_response_tree(response) for response in group.responses],
    }


def _picture_trees(pictures: Iterable[pb.SamplePicture]) -> list[dict[str, Any]]:
    return [message_tree(one, "sha256", "bytes", "height", "width", "file") for one in pictures]


def _response_tree(response: pb.SampleResponse) -> dict[str, Any]:
    return {
        "index": response.index,
        "text": response.text.text,
        "more": response.text.more,
        **message_tree(response, "tokens", "reward"),
        "parts": {part.name: part.value for part in response.parts},
        **message_tree(response, "advantage", "advantage_least", "advantage_most", "finish_reason", "masked"),
        "observed": [[told.start, told.end] for told in response.observed],
        **message_tree(response, "observed_tokens", "versions"),
        "pictures": _picture_trees(response.pictures),
        "picture": _picture_trees([response.picture])[0] if response.HasField("picture") else None,
        "steps": response.steps,
    }


def samples_section(groups: Sequence[pb.SampleGroup]) -> SheetSection:
    """The generated pictures of the sample groups of one step, as a section of a contact sheet: a card for each prompt. The
    border is green for a reward of at least 1, and red for 0 and less. `groups` must not be empty."""
    responses = [response for group in groups for response in group.responses]
    mean = math.fsum(response.reward for response in responses) / max(len(responses), 1)
    title = f"Step {groups[0].step}: mean reward {mean:.3f} over {len(groups)} of {groups[0].of} kept prompts"
    return SheetSection(title, tuple(SheetCard(group.prompt.text, _sheet_pictures(group)) for group in groups))


def _sheet_pictures(group: pb.SampleGroup) -> tuple[SheetPicture, ...]:
    return tuple(
        SheetPicture(
            Path(one.picture.file) if one.picture.file else None,
            f"reward {_number(one.reward)}",
            True if one.reward >= 1 else False if one.reward <= 0 else None,
        )
        for one in group.responses
        if one.HasField("picture")
    )


def choose_evaluations(state: ViewState, steps: Sequence[int], *, ends: bool) -> list[EvalPoint]:
    """The evaluations after `steps`. Without steps the newest, or with `ends` the first, the best and the newest one.

    Raises UsageError if one is missing.
    """
    by_step = {one.step: one for one in state.evals}
    if not by_step:
        raise UsageError(
            "the job has no evaluation yet", fix="Retry after the first one; eval.every says when it is due"
        )
    if ends and not steps:
        steps = [min(by_step), *([state.best.step] if state.best and state.best.step in by_step else ()), max(by_step)]
    wanted = sorted(set(steps)) or [max(by_step)]
    for step in wanted:
        if step not in by_step:
            there = format_ranges(list(by_step))
            raise UsageError(
                f"there is no evaluation after step {step}", fix=f"There are evaluations after steps {there}"
            )
    return [by_step[step] for step in wanted]


def held_out_sheet(evaluations: Sequence[EvalPoint]) -> SheetSection:
    """The generated pictures of evaluations, as a section of a contact sheet: a card for each held-out prompt."""

    def show(one: AnswerPoint) -> HeldOutPicture:
        file = None if one.picture.startswith("sha256:") else Path(one.picture)
        kept = file if file is not None and file.is_file() else None
        return HeldOutPicture("", one.prompt, kept, one.reward, one.right, bool(one.unscored))

    return held_out_section(
        [
            HeldOutStep(one.step, one.accuracy, tuple(show(answer) for answer in one.samples if answer.picture))
            for one in evaluations
        ]
    )


def show_evaluation(console: Console, point: EvalPoint) -> None:
    """Print the responses that an evaluation displays."""
    head = f"step {point.step}: {point.measured} on {point.count} held-out prompts, {len(point.samples)} of them shown"
    console.print(head, style=HEADING, markup=False, highlight=False)
    for answer in point.samples:
        verdict = f"{'correct' if answer.right else 'incorrect'}, reward {_number(answer.reward)}"
        lines = [
            f"--- {clip_text(answer.prompt, PROMPT_CHARACTERS)}",
            *([_indented("answer", clip_text(answer.answer, 300))] if answer.answer else ()),
            f"  response: {f'not scored: {printable_text(answer.unscored, 1000)}' if answer.unscored else verdict}",
            f"    picture: {printable_text(answer.picture, 1000)}"
            if answer.picture
            else _indented("", clip_text(answer.response, RESPONSE_CHARACTERS)),
        ]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def evaluation_tree(point: EvalPoint) -> dict[str, Any]:
    """The responses that an evaluation displays as a JSON object."""
    return {
        "step": point.step,
        "lineage": point.lineage,
        "accuracy": point.accuracy,
        "count": point.count,
        "responses": [asdict(answer) | {"correct": answer.right} for answer in point.samples],
    }


BINS = 8
BAR_CELLS = 30
PROMPT_SHOWN = 240


def sources_table(sources: Sequence[CheckedSource]) -> Rows:
    """A table with one row per data source: entries, weight, prompts per epoch, filtered prompts and reward. Lengths
    are printed separately."""
    numbers = ("ENTRIES", "WEIGHT", "PER EPOCH")
    rows = (
        (
            printable_text(tree["source"]),
            tree["for"],
            f"{tree['entries']:,}",
            "-" if checked.held_out else f"{tree['weight']:g}",
            f"{tree['refs']:,}",
            _filtered(checked.lengths),
            printable_text(tree["reward"]),
        )
        for checked in sources
        for tree in [source_tree(checked)]
    )
    return rows_table(("SOURCE", "FOR", *numbers, "FILTERED", "REWARD"), rows, right=numbers)


def source_tree(checked: CheckedSource) -> dict[str, Any]:
    """A data source as a JSON object. `refs`: number of its prompts in one data epoch, or for a held-out source in one
    evaluation."""
    from gcore.data.order import SourceShare

    source, lengths = checked.opened.source, checked.lengths
    refs = lengths.entries if checked.held_out else SourceShare(source.name, len(checked.opened), source.weight).refs
    return {
        "source": source.name,
        "for": "evaluation" if checked.held_out else "training",
        "path": source.path,
        "entries": len(checked.opened),
        "weight": source.weight,
        "refs": refs,
        "reward": source.reward.shown_as,
        "counted": lengths.checked,
        "filtered": dict(lengths.filtered),
        "unknown": lengths.unknown,
        "tokens": {
            "mean": round(lengths.mean, 2),
            "p50": lengths.percentile(50),
            "p95": lengths.percentile(95),
            "max": lengths.longest,
        },
        "longest": checked.opened.dataset.name_of(lengths.longest_entry),
        "first": lengths.first.text,
    }


def data_notes(sources: Sequence[CheckedSource]) -> list[str]:
    """Sentences about properties of the data that may be unintended."""
    found = []
    for checked in sources:
        lengths, name = checked.lengths, source_title(checked)
        if lengths.checked < lengths.entries:
            found.append(f"{name}: {lengths.checked:,} of {lengths.entries:,} prompts were tokenized, evenly spaced.")
        found += [f"{name}: {count:,} filtered: {reason}." for reason, count in lengths.filtered.items()]
        found += [f"{name}: column {c!r} is ignored: {why}." for c, why in checked.opened.dataset.left_out.items()]
        found += _picture_notes(checked)
        if lengths.unknown:
            found.append(f"{name}: {lengths.unknown:,} prompts contain text that the model's tokenizer does not know.")
    return found


def _picture_notes(checked: CheckedSource) -> list[str]:
    name, pictures, marker = source_title(checked), checked.opened.pictures, checked.opened.source.image_marker
    if pictures is None:
        if marker not in checked.lengths.first.text:
            return []
        return [f"{name}: data.images is not set, so the model sees no pictures, and reads {marker!r} as text."]
    sizes = {(one.height, one.width) for one in pictures.index}
    if not sizes:
        return [f"{name}: no entry has a picture."]
    ends = min(sizes, key=math.prod), max(sizes, key=math.prod)
    shown = dict.fromkeys(f"{width}x{height}" for height, width in ends)
    seen = dict.fromkeys(
        f"{width}x{height} ({pictures.rule.token_count(height, width)} tokens)"
        for height, width in (pictures.rule.target_size(*size) for size in ends)
    )
    count = len(pictures.index)
    return [
        f"{name}: {count:,} picture{'s' * (count != 1)}, {' to '.join(shown)} pixels. The model sees {' to '.join(seen)}."
    ]


def histogram(lengths: LengthReport) -> list[str]:
    """Histogram of prompts by length in tokens: one line per range, with a bar."""
    edges = _edges(int(lengths.tokens.min()), lengths.longest)
    counts = [int(np.count_nonzero((lengths.tokens >= low) & (lengths.tokens < high))) for low, high in pairwise(edges)]
    names = [f"{low}-{high - 1}" if high - low > 1 else str(low) for low, high in pairwise(edges)]
    width, most = max(map(len, names)), max(counts)
    return [
        f"{name:>{width}}  {'█' * round(BAR_CELLS * count / most) or ('▏' if count else ''):<{BAR_CELLS}} {count:,}"
        for name, count in zip(names, counts, strict=True)
    ]


def lengths_title(checked: CheckedSource) -> str:
    """The heading of a source's histogram, with mean, P50, P95 and maximum of the prompt lengths in tokens."""
    tokens = source_tree(checked)["tokens"]
    numbers = f"mean {tokens['mean']:.1f}, P50 {tokens['p50']}, P95 {tokens['p95']}, longest {tokens['max']}"
    return f"Prompts of {source_title(checked)} by tokens ({numbers}):"


def first_prompt(checked: CheckedSource) -> str:
    """The first prompt in the form that the model receives, on one line."""
    return f"First prompt of {source_title(checked)}: {printable_text(checked.lengths.first.text, PROMPT_SHOWN)}"


def source_title(checked: CheckedSource) -> str:
    """The name of a source; held-out sources are marked."""
    return f"{checked.opened.name} (evaluation)" if checked.held_out else checked.opened.name


@contextmanager
def progress_bar() -> Iterator[CheckProgress]:
    """A transient progress bar on standard error, only on a terminal."""
    with Progress(console=(console := Console(stderr=True)), transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(printable_text(what))
            bar.update(tasks[what], completed=done, total=total)

        yield tell


def _filtered(lengths: LengthReport) -> str:
    count = sum(lengths.filtered.values())
    return f"{count:,} ({100 * count / lengths.checked:.1f} %)" if count else "0"


def _edges(least: int, most: int) -> list[int]:
    """The bounds of the histogram's bins: at most `BINS` ranges of equal, round width that cover `least` to `most`."""
    width = 1
    for step in (1, 2, 5, *(factor * 10**power for power in range(1, 10) for factor in (1, 2, 5))):
        width = step
        if most // step - least // step < BINS:
            break
    first = least // width * width
    return list(range(first, most + width + 1, width))
