"""What `gcore validate` shows of a job's data: a table of the sources, how long their prompts are, and the first of each.

Pure but for the bar, which is drawn on standard error, and only on a terminal. What data and templates wrote is shown
through `visible`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.cli.view_text import visible

if TYPE_CHECKING:
    from rich.table import Table

    from controllers.service.checking import CheckedSource, CheckProgress
    from gcore.prompts.lengths import LengthReport

BINS = 8
BAR_CELLS = 30
PROMPT_SHOWN = 240


def sources_table(sources: Sequence[CheckedSource]) -> Table:
    """One line a source. Of 80 columns, if names are short; lengths have a place of their own below."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("SOURCE", "FOR", "ENTRIES", "WEIGHT", "AN EPOCH SHOWS", "FILTERED", "REWARD"):
        table.add_column(heading, justify="right" if heading in ("ENTRIES", "WEIGHT", "AN EPOCH SHOWS") else "left")
    for checked in sources:
        tree = source_tree(checked)
        table.add_row(
            visible(tree["source"]),
            tree["for"],
            f"{tree['entries']:,}",
            "-" if checked.held_out else f"{tree['weight']:g}",
            f"{tree['refs']:,}",
            _filtered(checked.lengths),
            visible(tree["reward"]),
        )
    return table


def source_tree(checked: CheckedSource) -> dict[str, Any]:
    """For JSON. `refs`: prompts of an epoch; of a held-out source, prompts that an evaluation shows."""
    from gcore.prompts.mixture import Share

    source, lengths = checked.opened.source, checked.lengths
    refs = lengths.entries if checked.held_out else Share(source.name, len(checked.opened), source.weight).refs
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


def notes(sources: Sequence[CheckedSource]) -> list[str]:
    """Sentences about what may not have been meant."""
    found = []
    for checked in sources:
        lengths, name = checked.lengths, title(checked)
        if lengths.checked < lengths.entries:
            found.append(f"{name}: {lengths.checked:,} of {lengths.entries:,} prompts were counted, spread evenly.")
        found += [f"{name}: {count:,} filtered: {reason}." for reason, count in lengths.filtered.items()]
        if lengths.unknown:
            found.append(f"{name}: {lengths.unknown:,} prompts hold text that the model's tokenizer does not know.")
    return found


def histogram(lengths: LengthReport) -> list[str]:
    """Prompts by length in tokens: one line a range, with a bar."""
    edges = _edges(int(lengths.tokens.min()), lengths.longest)
    counts = [int(np.count_nonzero((lengths.tokens >= low) & (lengths.tokens < high))) for low, high in pairwise(edges)]
    names = [f"{low}-{high - 1}" if high - low > 1 else str(low) for low, high in pairwise(edges)]
    width, most = max(map(len, names)), max(counts)
    return [
        f"{name:>{width}}  {'█' * round(BAR_CELLS * count / most) or ('▏' if count else ''):<{BAR_CELLS}} {count:,}"
        for name, count in zip(names, counts, strict=True)
    ]


def lengths_title(checked: CheckedSource) -> str:
    """What stands above the histogram: how long the prompts are in a few numbers."""
    tokens = source_tree(checked)["tokens"]
    numbers = f"mean {tokens['mean']:.1f}, P50 {tokens['p50']}, P95 {tokens['p95']}, longest {tokens['max']}"
    return f"Prompts of {title(checked)} by tokens ({numbers}):"


def first_prompt(checked: CheckedSource) -> str:
    """The first prompt as the model is shown it, on one line."""
    return f"{title(checked)} begins: {visible(checked.lengths.first.text, PROMPT_SHOWN)}"


def title(checked: CheckedSource) -> str:
    """The source's name, and whether it is held out."""
    return f"{checked.opened.name} (evaluation)" if checked.held_out else checked.opened.name


@contextmanager
def progress_bar() -> Iterator[CheckProgress]:
    """A bar on standard error for what takes long; nothing where that is no terminal, and nothing that stays."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=(console := Console(stderr=True)), transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(visible(what))
            bar.update(tasks[what], completed=done, total=total)

        yield tell


def _filtered(lengths: LengthReport) -> str:
    count = sum(lengths.filtered.values())
    return f"{count:,} ({100 * count / lengths.checked:.1f} %)" if count else "0"


def _edges(least: int, most: int) -> list[int]:
    """Bounds of at most `BINS` ranges of one round width that hold least..most."""
    width = 1
    for step in (1, 2, 5, *(factor * 10**power for power in range(1, 10) for factor in (1, 2, 5))):
        width = step
        if most // step - least // step < BINS:
            break
    first = least // width * width
    return list(range(first, most + width + 1, width))
